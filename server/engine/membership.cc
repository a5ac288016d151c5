// Who is a member: joins, incarnations, leases, leaving, eviction.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "core/base/limits.h"
#include "core/base/status_macros.h"
#include "server/engine/stepper.h"

namespace bmuf::engine {
namespace {

Error SessionNotFound(const std::string& worker) {
  return Error(v1::REASON_SESSION_NOT_FOUND, absl::StrCat("no such session of worker ", worker, "; join again"));
}

Error Evicted(const std::string& worker) {
  return std::move(Error(v1::REASON_WORKER_EVICTED,
                         absl::StrCat("an operator removed worker ", worker, "; `bmufctl readmit` lets it back"))
                       .With("worker", worker));
}

Error Replaced(const std::string& worker, Incarnation by) {
  return std::move(
      Error(v1::REASON_STALE_INCARNATION, absl::StrCat("a newer process joined as worker ", worker, "; stop this one"))
          .With("incarnation", by.value()));
}

}  // namespace

absl::Status Engine::State::CheckSession(const WorkerKey& who, const std::string& token) const {
  const auto it = workers.find(who.worker);
  if (it == workers.end()) return SessionNotFound(who.worker);
  const Worker& worker = it->second;
  if (worker.state == WorkerState::kEvicted) return Evicted(who.worker);
  if (who.incarnation < worker.incarnation) return Replaced(who.worker, worker.incarnation);
  if (who.incarnation > worker.incarnation || token != worker.token || worker.state == WorkerState::kLeft) {
    return SessionNotFound(who.worker);
  }
  return absl::OkStatus();
}

bool Engine::State::IsInitializer(const std::string& name, const Worker& worker) const {
  return !has_model && !storing.has_value() && worker.active() && name == initializer &&
         worker.incarnation == initializer_life;
}

bool Engine::State::LeaseRuns(const Worker& worker) const {
  return worker.active() && !(worker.push.has_value() && worker.push->whole());
}

absl::Status Stepper::Touch(Entry& entry) {
  auto& [name, worker] = entry;
  if (worker.state == WorkerState::kExpired) {
    if (s_.ActiveWorkers() >= s_.config.max_workers()) {
      return Error(v1::REASON_MAX_WORKERS,
                   absl::StrCat("the lease of worker ", name, " ran out and its place is taken"))
          .With("limit", s_.config.max_workers());
    }
    worker.state = WorkerState::kActive;
    if (s_.phase == Phase::kCollecting && worker.seat == Seat::kExcused) worker.seat = Seat::kAwaited;
    Say(absl::StrCat("worker ", name, " is back", worker.seat == Seat::kAwaited ? " in time for the open round" : ""),
        name);
    Changed();
  }
  worker.last_seen = now_;
  return absl::OkStatus();
}

absl::StatusOr<Stepper::Entry*> Stepper::Accept(const WorkerKey& who, const std::string& token) {
  RETURN_IF_ERROR(s_.CheckSession(who, token));
  Entry& entry = *s_.workers.find(who.worker);
  RETURN_IF_ERROR(Touch(entry));
  return &entry;
}

void Stepper::Depart(Entry& entry, WorkerState state, const absl::Status& why) {
  Worker& worker = entry.second;
  worker.state = state;
  // Bytes that are all here need nothing more from a worker that said goodbye: the delta still counts.
  const bool finishing = state == WorkerState::kLeft && worker.push.has_value() && worker.push->whole();
  if (!finishing) {
    CancelUpload(worker, why);
    if (worker.seat == Seat::kAwaited || worker.seat == Seat::kExcused) {
      worker.seat = state == WorkerState::kExpired ? Seat::kExcused : Seat::kNone;
    }
  }
  Changed();
}

absl::Status Stepper::MakeRoom() {
  if (s_.workers.size() < limits::kMaxWorkersPerJob) return absl::OkStatus();
  auto oldest = s_.workers.end();
  for (auto it = s_.workers.begin(); it != s_.workers.end(); ++it) {
    const Worker& worker = it->second;
    const bool gone = worker.state == WorkerState::kLeft || worker.state == WorkerState::kExpired;
    if (!gone || worker.delta.has_value() || worker.push.has_value()) continue;
    if (oldest == s_.workers.end() || worker.last_seen < oldest->second.last_seen) oldest = it;
  }
  if (oldest == s_.workers.end()) {
    return Error(v1::REASON_MAX_WORKERS, "the job remembers as many workers as it can, none of which is gone")
        .With("limit", limits::kMaxWorkersPerJob);
  }
  s_.workers.erase(oldest);
  return absl::OkStatus();
}

absl::StatusOr<Stepper::Entry*> Stepper::NewLife(const JoinEvent& e) {
  const auto known = s_.workers.find(e.worker);
  const bool takes_over = known != s_.workers.end() && known->second.state != WorkerState::kLeft;
  if (takes_over) {
    auto& takeovers = known->second.takeovers;
    while (!takeovers.empty() && now_ - takeovers.front() >= absl::Minutes(1)) takeovers.pop_front();
    if (takeovers.size() >= kMaxTakeoversPerMinute) {
      return Error(v1::REASON_TOO_MANY, absl::StrCat("processes keep replacing each other as worker ", e.worker,
                                                     "; give each its own name, or slow down its restarts"))
          .RetryAfter(takeovers.front() + absl::Minutes(1) - now_);
    }
  }
  const bool counted = known != s_.workers.end() && known->second.active();
  if (s_.ActiveWorkers() - (counted ? 1 : 0) >= s_.config.max_workers()) {
    return Error(v1::REASON_MAX_WORKERS, absl::StrCat("the job has its ", s_.config.max_workers(), " workers"))
        .With("limit", s_.config.max_workers());
  }
  if (known == s_.workers.end()) RETURN_IF_ERROR(MakeRoom());

  Entry& entry = *s_.workers.try_emplace(e.worker).first;
  Worker& worker = entry.second;
  const Incarnation incarnation(++s_.last_incarnation);
  CancelUpload(worker, Replaced(e.worker, incarnation));
  if (worker.seat == Seat::kAwaited || worker.seat == Seat::kExcused) worker.seat = Seat::kNone;
  if (!worker.instance.empty()) {
    worker.former_instances.push_back(worker.instance);
    if (worker.former_instances.size() > kMaxFormerInstances) worker.former_instances.pop_front();
  }
  if (takes_over) {
    worker.takeovers.push_back(now_);
    Count(Counter::kReplaced);
  }
  worker.state = WorkerState::kActive;
  worker.incarnation = incarnation;
  worker.instance = e.instance;
  worker.token = e.token;
  worker.client_info = e.client_info;
  worker.trajectories = std::max(e.trajectories, uint32_t{1});
  worker.last_seen = now_;
  worker.steps_done = 0;
  Count(Counter::kJoined);
  Say(absl::StrCat("worker ", e.worker, takes_over ? " was replaced by a new process" : " joined", ", incarnation ",
                   incarnation.value(),
                   worker.trajectories == 1 ? "" : absl::StrCat(", ", worker.trajectories, " trajectories")),
      e.worker);
  Changed();
  return &entry;
}

v1::JoinResponse Stepper::JoinAnswer(const Entry& entry) const {
  const auto& [name, worker] = entry;
  v1::JoinResponse answer;
  v1::Session* session = answer.mutable_session();
  session->set_job(s_.job);
  session->set_worker(name);
  session->set_incarnation(worker.incarnation.value());
  session->set_epoch(s_.epoch.value());
  session->set_token(worker.token);
  *answer.mutable_lease() = s_.config.lease();
  // Two heartbeats may be lost before the lease runs out.
  SetDuration(ToDuration(s_.config.lease()) / 3, answer.mutable_heartbeat_period());
  answer.set_round(s_.round.value());
  answer.set_version(s_.version.value());
  answer.set_has_model(s_.has_model);
  answer.set_need_initial_model(s_.IsInitializer(name, worker));
  *answer.mutable_config() = s_.config;
  answer.set_model_digest(s_.model_digest);
  answer.set_total_samples(s_.total_samples);
  answer.set_job_state(s_.job_state());
  if (const auto momentum = s_.MomentumInForce(); momentum.has_value()) answer.set_resolved_block_momentum(*momentum);
  return answer;
}

void Stepper::On(const JoinEvent& e) {
  const auto refuse = [&](const absl::Status& why) { Emit(ReplyJoin{e.request, why}); };
  if (s_.draining) {
    return refuse(Error(v1::REASON_DRAINING, "the coordinator is shutting down; its successor answers")
                      .RetryAfter(absl::Seconds(1)));
  }
  if (s_.phase == Phase::kEnded) {
    return refuse(
        Error(s_.ended_as == v1::JOB_STATE_FINISHED ? v1::REASON_JOB_FINISHED : v1::REASON_JOB_FAILED, s_.end_reason));
  }
  if (e.trajectories > limits::kMaxTrajectoriesPerWorker) {
    const std::string rule = absl::StrCat("must be at most ", limits::kMaxTrajectoriesPerWorker);
    return refuse(Error(v1::REASON_INVALID_REQUEST, absl::StrCat("trajectories ", rule)).Field("trajectories", rule));
  }
  Entry* entry = nullptr;
  if (const auto it = s_.workers.find(e.worker); it != s_.workers.end()) {
    Worker& worker = it->second;
    if (worker.state == WorkerState::kEvicted) return refuse(Evicted(e.worker));
    const bool same = worker.instance == e.instance && worker.state != WorkerState::kLeft;
    if (same) {
      if (absl::Status touched = Touch(*it); !touched.ok()) return refuse(touched);
      entry = &*it;
    } else if (worker.state != WorkerState::kLeft &&
               std::count(worker.former_instances.begin(), worker.former_instances.end(), e.instance) > 0) {
      // A late or repeated Join of a process that was replaced must not take the place back.
      return refuse(Replaced(e.worker, worker.incarnation));
    }
  }
  if (entry == nullptr) {
    absl::StatusOr<Entry*> fresh = NewLife(e);
    if (!fresh.ok()) return refuse(fresh.status());
    entry = *fresh;
  }
  Settle();  // The answer tells whether this worker is to send the initial model.
  Emit(ReplyJoin{e.request, JoinAnswer(*entry)});
}

void Stepper::On(const HeartbeatEvent& e) {
  absl::StatusOr<Entry*> entry = Accept(e.who, e.token);
  if (!entry.ok()) {
    Emit(ReplyHeartbeat{e.request, entry.status()});
    return;
  }
  Worker& worker = (*entry)->second;
  worker.steps_done = e.steps_done;
  Settle();
  v1::HeartbeatResponse answer;
  answer.set_epoch(s_.epoch.value());
  answer.set_job_state(s_.job_state());
  answer.set_round(s_.round.value());
  answer.set_version(s_.version.value());
  answer.set_reason(s_.SituationAt(now_).reason);
  answer.set_need_initial_model(s_.IsInitializer(e.who.worker, worker));
  Emit(ReplyHeartbeat{e.request, std::move(answer)});
}

void Stepper::On(const SignOfLifeEvent& e) { Accept(e.who, e.token).IgnoreError(); }

void Stepper::On(const LeaveEvent& e) {
  const auto it = s_.workers.find(e.who.worker);
  if (it != s_.workers.end() && it->second.state == WorkerState::kLeft && it->second.incarnation == e.who.incarnation &&
      it->second.token == e.token) {
    Emit(ReplyStatus{e.request, absl::OkStatus()});  // Said twice.
    return;
  }
  if (absl::Status known = s_.CheckSession(e.who, e.token); !known.ok()) {
    Emit(ReplyStatus{e.request, known});
    return;
  }
  it->second.last_seen = now_;
  Depart(*it, WorkerState::kLeft, Error(v1::REASON_TRANSFER_CANCELLED, "the worker left the job"));
  Count(Counter::kLeft);
  Say(absl::StrCat("worker ", e.who.worker, " left", e.reason.empty() ? "" : absl::StrCat(": ", e.reason)),
      e.who.worker);
  Emit(ReplyStatus{e.request, absl::OkStatus()});
}

void Stepper::On(const EvictEvent& e) {
  const auto it = s_.workers.find(e.worker);
  if (it == s_.workers.end()) {
    Emit(ReplyStatus{e.request, Error(v1::REASON_NOT_KEPT, absl::StrCat("the job knows no worker ", e.worker))});
    return;
  }
  if (it->second.state != WorkerState::kEvicted) {
    Depart(*it, WorkerState::kEvicted, Evicted(e.worker));
    Count(Counter::kEvicted);
    Warn(absl::StrCat("worker ", e.worker, " was evicted by an operator"), e.worker);
  }
  Emit(ReplyStatus{e.request, absl::OkStatus()});
}

void Stepper::On(const ReadmitEvent& e) {
  const auto it = s_.workers.find(e.worker);
  if (it == s_.workers.end()) {
    Emit(ReplyStatus{e.request, Error(v1::REASON_NOT_KEPT, absl::StrCat("the job knows no worker ", e.worker))});
    return;
  }
  if (it->second.state == WorkerState::kEvicted) {
    it->second.state = WorkerState::kLeft;
    Say(absl::StrCat("worker ", e.worker, " may join again"), e.worker);
    Changed();
  }
  Emit(ReplyStatus{e.request, absl::OkStatus()});
}

void Stepper::ExpireLeases() {
  const absl::Duration lease = ToDuration(s_.config.lease());
  for (Entry& entry : s_.workers) {
    auto& [name, worker] = entry;
    if (!s_.LeaseRuns(worker) || now_ - worker.last_seen < lease) continue;
    Warn(absl::StrCat("worker ", name, " was silent for ", ForPeople(now_ - worker.last_seen), ": its lease of ",
                      ForPeople(lease), " ran out"),
         name);
    Depart(entry, WorkerState::kExpired,
           Error(v1::REASON_TRANSFER_CANCELLED, "the transfer stood still until the worker's lease ran out"));
    Count(Counter::kExpired);
  }
}

}  // namespace bmuf::engine
