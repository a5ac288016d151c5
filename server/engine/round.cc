// The life of a round: initial model, gathering, collecting, commit, the next one.
#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "core/base/limits.h"
#include "server/engine/stepper.h"

namespace bmuf::engine {

void Stepper::EnterPhase(Phase phase) {
  s_.phase = phase;
  s_.watchdog_from = now_;
  Changed();
}

// ------------------------------------------------------------------------------------------------- initial model

void Stepper::ElectInitializer() {
  if (s_.storing.has_value()) return;
  const auto current = s_.workers.find(s_.initializer);
  const bool alive = current != s_.workers.end() && s_.IsInitializer(current->first, current->second);
  const absl::Duration timeout = ToDuration(s_.config.initial_model_timeout());
  const bool late = alive && s_.ticked - s_.elected_at >= timeout;
  if (alive && !late) return;
  if (late) {
    Warn(absl::StrCat("worker ", s_.initializer, " did not send the initial model within ", ForPeople(timeout)),
         s_.initializer);
  }
  // The next active worker in the order of joining, from the first again after the last.
  Entry* next = nullptr;
  Entry* first = nullptr;
  const auto earlier = [](const Entry& entry, const Entry* than) {
    return than == nullptr || entry.second.incarnation < than->second.incarnation;
  };
  for (Entry& entry : s_.workers) {
    if (!entry.second.active()) continue;
    if (earlier(entry, first)) first = &entry;
    if (entry.second.incarnation > s_.initializer_life && earlier(entry, next)) next = &entry;
  }
  if (next == nullptr) next = first;
  if (late && next != &*current) {
    CancelUpload(current->second,
                 Error(v1::REASON_TRANSFER_CANCELLED, "another worker was asked for the initial model"));
  }
  if (next == nullptr) {
    if (!s_.initializer.empty()) Changed();
    s_.initializer.clear();
    return;
  }
  s_.initializer = next->first;
  s_.initializer_life = next->second.incarnation;
  s_.elected_at = now_;
  Count(Counter::kElected);
  Say(absl::StrCat("worker ", next->first, " is asked for the initial model"), next->first);
  Changed();
}

void Stepper::On(const InitialModelStoredEvent& e) {
  if (s_.has_model) return;
  if (s_.storing.has_value()) {
    // A model from a file cannot overtake one that is being stored: the caller stores one thing at a time.
    if (s_.storing->request != e.request) return;
    Emit(ReplyPush{e.request, PushAnswer(v1::PUSH_OUTCOME_ACCEPTED, RoundId(0), 1)});
  } else if (e.request != RequestId(0)) {
    return;
  }
  const std::string from = s_.storing.has_value() ? absl::StrCat("worker ", s_.storing->worker) : std::string("a file");
  s_.stored = std::move(s_.storing);
  s_.storing.reset();
  s_.has_model = true;
  s_.version = ModelVersion(0);
  s_.model_digest = e.model_digest;
  s_.initializer.clear();
  Say(absl::StrCat("version 0 is the initial model from ", from));
  OpenRound(RoundId(1));
}

void Stepper::On(const InitialModelFailedEvent& e) {
  if (!s_.storing.has_value() || s_.storing->request != e.request) return;
  Warn(absl::StrCat("the initial model from worker ", s_.storing->worker,
                    " was refused: ", std::string(e.status.message())),
       s_.storing->worker);
  s_.storing.reset();
  Count(Counter::kPushRejected);
  Emit(ReplyPush{e.request, e.status});
  Changed();
}

// ------------------------------------------------------------------------------------------------------- settling

void Stepper::Settle() {
  if (s_.paused) return;
  // Ends: an attempt that has just started has nothing folded and none of its deadlines behind it, so that it waits.
  while (true) {
    switch (s_.phase) {
      case Phase::kInitializing:
        ElectInitializer();
        return;
      case Phase::kGathering:
        if (!TryStart()) return;
        break;
      case Phase::kCollecting:
        if (!Collect()) return;
        break;
      case Phase::kCommitting:
      case Phase::kEnded:
        return;
    }
  }
}

bool Stepper::TryStart() {
  if (s_.config.max_rounds() > 0 && s_.version.value() >= s_.config.max_rounds()) {
    End(v1::JOB_STATE_FINISHED, absl::StrCat("all ", s_.config.max_rounds(), " rounds are done"));
    return false;
  }
  const v1::BarrierPolicy& policy = s_.config.barrier();
  const size_t present = s_.ActiveWorkers();
  if (present < policy.min_workers()) {
    s_.enough_since.reset();
    return false;
  }
  if (!s_.enough_since.has_value()) s_.enough_since = now_;
  const bool first_round = s_.version == ModelVersion(0);
  if (first_round && present < policy.expected_workers() &&
      s_.ticked - *s_.enough_since < ToDuration(policy.start_timeout())) {
    return false;
  }
  if (s_.draining) return false;

  EnterPhase(Phase::kCollecting);
  s_.started = s_.collect_from = s_.last_fold = now_;
  s_.extension = absl::ZeroDuration();
  s_.extensions = 0;
  for (Entry& entry : s_.workers) {  // By name, so that ranks do not depend on the order of joining.
    if (entry.second.active()) SeatWorker(entry);
  }
  if (!s_.auto_momentum.has_value()) {
    s_.auto_trajectories = s_.config.expected_trajectories() > 0 ? s_.config.expected_trajectories() : s_.trajectories;
    s_.auto_momentum = 1.0 - 1.0 / s_.auto_trajectories;
  }
  Emit(BeginAttempt{s_.round, s_.attempt});
  return true;
}

void Stepper::SeatWorker(Entry& entry) {
  Worker& worker = entry.second;
  worker.seat = Seat::kAwaited;
  worker.place = s_.places++;
  worker.first_trajectory = s_.trajectories;
  worker.seated_at = now_;
  s_.trajectories += worker.trajectories;
  Changed();
}

// Joiners count from the next round, unless this one cannot end without them.
void Stepper::SeatJoiners() {
  const uint32_t expected = s_.BarrierInputAt(absl::ZeroDuration()).expected;
  if (expected >= s_.config.barrier().min_workers()) return;
  for (Entry& entry : s_.workers) {
    auto& [name, worker] = entry;
    if (!worker.active() || worker.seat != Seat::kNone) continue;
    SeatWorker(entry);
    Say(absl::StrCat("worker ", name, " enters the open round ", s_.round.value(),
                     ", which has too few workers without it"),
        name);
  }
}

bool Stepper::Collect() {
  SeatJoiners();
  const absl::Duration elapsed = s_.JudgedElapsed();
  BarrierDecision decision = s_.DecideAt(elapsed);
  switch (decision.kind) {
    case BarrierDecision::Kind::kWait:
      return false;
    case BarrierDecision::Kind::kExtend:
      s_.extension = elapsed;
      ++s_.extensions;
      Count(Counter::kExtended);
      Warn(absl::StrCat("round ", s_.round.value(), ": ", decision.reason));
      Changed();
      return true;
    case BarrierDecision::Kind::kRegather:
      Restart(decision.reason, /*failed=*/false);
      return true;
    case BarrierDecision::Kind::kFailAttempt:
      Restart(decision.reason, /*failed=*/true);
      return true;
    case BarrierDecision::Kind::kCommit:
      CommitRound(decision.reason);
      return true;
  }
  return false;
}

// --------------------------------------------------------------------------------------------------------- commit

// The rule of this round as it is to be applied, all numbers resolved.
v1::OuterOptimizer Stepper::EffectiveOuter(uint32_t trajectories, uint32_t* cntk_n) const {
  v1::OuterOptimizer outer = s_.config.outer();
  if (s_.round.value() <= outer.warmup_rounds()) outer.set_variant(v1::VARIANT_AVERAGING);
  *cntk_n = s_.auto_trajectories;
  if (outer.variant() == v1::VARIANT_AVERAGING) {
    outer.set_block_learning_rate(1.0);
    outer.set_block_momentum(0.0);
  } else if (outer.momentum_policy() != v1::MOMENTUM_POLICY_FROZEN) {
    outer.set_block_momentum(1.0 - 1.0 / trajectories);
    *cntk_n = trajectories;
  } else if (!outer.has_block_momentum()) {
    outer.set_block_momentum(*s_.auto_momentum);
  }
  return outer;
}

void Stepper::CommitRound(const std::string& reason) {
  v1::RoundRecord record;
  std::vector<const Delta*> deltas;
  for (const auto& [name, worker] : s_.workers) {
    if (worker.delta.has_value()) deltas.push_back(&*worker.delta);
  }
  std::sort(deltas.begin(), deltas.end(),
            [](const Delta* a, const Delta* b) { return a->record.rank() < b->record.rank(); });
  double total_weight = 0;
  uint32_t trajectories = 0;
  for (const Delta* delta : deltas) {
    *record.add_contributions() = delta->record;
    total_weight += delta->record.weight();
    // Trajectories behind a delta of weight 0 trained nothing that is averaged.
    if (delta->record.weight() > 0) trajectories += delta->trajectories;
  }
  if (!(total_weight > 0)) {
    Restart(absl::StrCat(reason, ", but their total weight is 0"), /*failed=*/true);
    return;
  }
  Commit commit;
  commit.outer = EffectiveOuter(trajectories, &commit.trajectories_total);
  record.set_round(s_.round.value());
  record.set_attempts(s_.attempt);
  record.set_total_weight(total_weight);
  record.set_variant(commit.outer.variant());
  record.set_block_learning_rate(commit.outer.block_learning_rate());
  record.set_block_momentum(commit.outer.block_momentum());
  record.set_trajectories(trajectories);
  record.set_expected(s_.BarrierInputAt(absl::ZeroDuration()).expected);
  record.set_reason(reason);
  SetDuration(now_ - s_.started, record.mutable_duration());
  record.set_epoch(s_.epoch.value());
  record.set_momentum_rescale(1.0);
  if (commit.outer.momentum_policy() == v1::MOMENTUM_POLICY_FOLLOW_PRESENT_RESCALED && s_.last_momentum.has_value() &&
      commit.outer.variant() != v1::VARIANT_AVERAGING) {
    const double from = *s_.last_momentum, to = commit.outer.block_momentum();
    // With momentum 0 nothing of v is delivered any more, whatever it is multiplied by.
    if (from != to && to > 0) record.set_momentum_rescale(from / (1 - from) / (to / (1 - to)));
  }
  EnterPhase(Phase::kCommitting);
  for (Entry& entry : s_.workers) {
    if (!entry.second.push.has_value()) continue;
    Count(Counter::kPushStale);
    CancelUpload(entry.second, StaleRound(entry, absl::StrCat("round ", s_.round.value(), " closed: ", reason)));
  }
  s_.committing = record;
  commit.record = std::move(record);
  Emit(std::move(commit));
}

void Stepper::On(const CommittedEvent& e) {
  if (s_.phase != Phase::kCommitting || e.round != s_.round) return;
  v1::RoundRecord record = *std::move(s_.committing);
  s_.committing.reset();
  record.set_model_digest(e.model_digest);
  record.set_mean_norm(e.mean_norm);
  SetDuration(now_ - s_.last_fold, record.mutable_commit_time());
  const absl::Duration since_epoch = e.wall_time - absl::UnixEpoch();
  record.mutable_committed_at()->set_seconds(absl::ToInt64Seconds(absl::Floor(since_epoch, absl::Seconds(1))));
  record.mutable_committed_at()->set_nanos(
      static_cast<int32_t>(absl::ToInt64Nanoseconds(since_epoch - absl::Floor(since_epoch, absl::Seconds(1)))));

  s_.version = CommittedVersionOf(s_.round);
  s_.model_digest = e.model_digest;
  if (record.variant() != v1::VARIANT_AVERAGING) s_.last_momentum = record.block_momentum();
  for (auto& [name, worker] : s_.workers) {
    if (!worker.delta.has_value()) continue;
    const v1::Contribution& part = worker.delta->record;
    ++worker.contributions;
    s_.total_samples += part.facts().samples();
    s_.norms.push_back(part.norm());
    s_.block_times.push_back(worker.delta->took);
  }
  while (s_.norms.size() > kMaxNorms) s_.norms.pop_front();
  while (s_.block_times.size() > kMaxBlockTimes) s_.block_times.pop_front();
  if (s_.block_times.size() >= kLeastBlockTimes) {
    std::vector<absl::Duration> sorted(s_.block_times.begin(), s_.block_times.end());
    const size_t rank = (sorted.size() * 95 + 99) / 100 - 1;
    std::nth_element(sorted.begin(), sorted.begin() + rank, sorted.end());
    s_.block_time_p95 = sorted[rank];
  }
  Count(Counter::kCommitted);
  Say(absl::StrCat("round ", record.round(), " committed version ", s_.version.value(), ": ",
                   record.contributions_size(), " of ", record.expected(), " contributed in ",
                   ForPeople(ToDuration(record.duration())), " (", record.reason(), ")"));
  s_.kept_contributions += record.contributions_size();
  s_.records.push_back(std::move(record));
  while (s_.records.size() > limits::kMaxRoundRecords ||
         (s_.kept_contributions > kMaxKeptContributions && s_.records.size() > 1)) {
    s_.kept_contributions -= s_.records.front().contributions_size();
    s_.records.pop_front();
  }
  OpenRound(s_.round.Next());
}

void Stepper::On(const CommitFailedEvent& e) {
  if (s_.phase != Phase::kCommitting || e.round != s_.round) return;
  Restart(absl::StrCat("the commit failed: ", e.reason), /*failed=*/true);
}

// ---------------------------------------------------------------------------------------------- attempts and rounds

// Forgets the attempt: who sat where, and what was pushed.
void Stepper::ClearAttempt() {
  for (auto& [name, worker] : s_.workers) {
    worker.seat = Seat::kNone;
    worker.delta.reset();
  }
  s_.places = 0;
  s_.trajectories = 0;
  s_.enough_since.reset();
  s_.committing.reset();
}

void Stepper::Restart(const std::string& reason, bool failed) {
  for (auto& [name, worker] : s_.workers) {
    CancelUpload(worker, Error(v1::REASON_TRANSFER_CANCELLED,
                               absl::StrCat("round ", s_.round.value(), " starts again: push the same delta again")));
  }
  ClearAttempt();
  ++s_.attempt;
  s_.restart_reason = reason;
  Count(Counter::kRestarted);
  Warn(absl::StrCat("round ", s_.round.value(), " starts again as attempt ", s_.attempt, ": ", reason));
  if (failed) ++s_.failed_attempts;
  const uint32_t most = s_.config.barrier().max_failed_attempts();
  if (failed && most > 0 && s_.failed_attempts >= most) {
    End(v1::JOB_STATE_FAILED,
        absl::StrCat("round ", s_.round.value(), " failed ", s_.failed_attempts, " times in a row; last: ", reason));
    return;
  }
  EnterPhase(Phase::kGathering);
}

void Stepper::OpenRound(RoundId round) {
  s_.round = round;
  for (Entry& entry : s_.workers) {  // Retries of deltas that are in, and of the initial model.
    CancelUpload(entry.second, Error(v1::REASON_STALE_ROUND, "the round is over")
                                   .With("round", s_.round.value())
                                   .With("version", s_.version.value()));
  }
  ClearAttempt();
  s_.attempt = 1;
  s_.failed_attempts = 0;
  s_.restart_reason.clear();
  s_.opened = now_;
  if (s_.next_config.has_value()) {
    s_.config = *std::move(s_.next_config);
    s_.next_config.reset();
  }
  EnterPhase(Phase::kGathering);
}

void Stepper::End(v1::JobState state, const std::string& reason) {
  s_.ended_as = state;
  s_.end_reason = reason;
  const v1::Reason why = state == v1::JOB_STATE_FINISHED ? v1::REASON_JOB_FINISHED : v1::REASON_JOB_FAILED;
  for (auto& [name, worker] : s_.workers) CancelUpload(worker, Error(why, reason));
  ClearAttempt();
  EnterPhase(Phase::kEnded);
  if (state == v1::JOB_STATE_FAILED) {
    Warn(absl::StrCat("the job failed: ", reason));
  } else {
    Say(absl::StrCat("the job is finished: ", reason));
  }
  Emit(JobEnded{state, reason});
}

}  // namespace bmuf::engine
