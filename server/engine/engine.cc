#include "server/engine/engine.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "server/engine/state.h"
#include "server/engine/stepper.h"

namespace bmuf::engine {

Engine::Engine(std::string job, Epoch epoch, v1::JobConfig config, MonotonicTime now)
    : state_(std::make_unique<State>()) {
  state_->job = std::move(job);
  state_->epoch = epoch;
  state_->config = std::move(config);
  state_->ticked = state_->opened = state_->started = state_->elected_at = now;
  state_->collect_from = state_->last_fold = state_->watchdog_from = now;
  state_->announced_at = now - kReasonPeriod;
}

Engine::~Engine() = default;
Engine::Engine(Engine&&) noexcept = default;

Effects Engine::Step(MonotonicTime now, const Event& event) {
  Stepper stepper(*state_, now);
  std::visit([&](const auto& e) { stepper.On(e); }, event);
  return stepper.Finish();
}

Effects Stepper::Finish() {
  Settle();
  AnnounceReason();
  if (changed_) Emit(NotifyWatchers{});
  return std::move(effects_);
}

void Stepper::AnnounceReason() {
  Situation situation = s_.SituationAt(now_);
  // A deadline that passed without ending the round changes what is waited for, too.
  if (situation.gist != s_.shown_gist) {
    s_.shown_gist = situation.gist;
    Changed();
  }
  const bool overdue = s_.WatchdogRuns() && now_ - s_.watchdog_from >= kWatchdogPeriod;
  const bool news = situation.gist != s_.announced_gist && now_ - s_.announced_at >= kReasonPeriod;
  if (!news && !overdue) return;
  s_.announced_gist = std::move(situation.gist);
  s_.announced_at = now_;
  if (overdue) s_.watchdog_from = now_;
  Say(overdue ? absl::StrCat(situation.reason, " (open for ", ForPeople(now_ - s_.opened), ")") : situation.reason);
}

void Stepper::On(const TickEvent&) {
  s_.ticked = std::max(s_.ticked, now_);
  ExpireLeases();
  Settle();
  // What nobody waits for is not overdue.
  if (!s_.WatchdogRuns()) s_.watchdog_from = now_;
}

void Stepper::On(const UpdateConfigEvent& e) {
  if (s_.phase == Phase::kEnded) {
    Emit(ReplyStatus{e.request, Error(v1::REASON_WRONG_STATE, absl::StrCat("the job has ended: ", s_.end_reason))});
    return;
  }
  const bool not_started = s_.phase == Phase::kInitializing || (s_.phase == Phase::kGathering && s_.attempt == 1);
  if (not_started) {
    s_.config = e.config;
    s_.next_config.reset();
  } else {
    s_.next_config = e.config;
  }
  Say(absl::StrCat("new rules, in force from round ",
                   not_started ? std::max(s_.round.value(), uint64_t{1}) : s_.round.Next().value(), " on"));
  Changed();
  Emit(ReplyStatus{e.request, absl::OkStatus()});
}

void Stepper::On(const PauseEvent& e) {
  if (s_.phase == Phase::kEnded) {
    Emit(ReplyStatus{e.request, Error(v1::REASON_WRONG_STATE, absl::StrCat("the job has ended: ", s_.end_reason))});
    return;
  }
  s_.paused = true;
  s_.pause_reason = e.reason;
  Changed();
  Emit(ReplyStatus{e.request, absl::OkStatus()});
}

void Stepper::On(const ResumeEvent& e) {
  if (!s_.paused) {
    Emit(ReplyStatus{e.request, Error(v1::REASON_WRONG_STATE, "the job is not paused")});
    return;
  }
  s_.paused = false;
  s_.pause_reason.clear();
  s_.collect_from = s_.elected_at = s_.watchdog_from = now_;
  s_.extension = absl::ZeroDuration();
  s_.extensions = 0;
  s_.enough_since.reset();
  Changed();
  Emit(ReplyStatus{e.request, absl::OkStatus()});
}

void Stepper::On(const DrainEvent&) {
  if (s_.draining) return;
  s_.draining = true;
  Changed();
}

MonotonicTime Engine::NextDeadline() const {
  const State& s = *state_;
  MonotonicTime next = MonotonicTime::InfiniteFuture();
  const absl::Duration lease = ToDuration(s.config.lease());
  for (const auto& [name, worker] : s.workers) {
    if (s.LeaseRuns(worker)) next = std::min(next, worker.last_seen + lease);
  }
  if (s.WatchdogRuns()) next = std::min(next, s.watchdog_from + kWatchdogPeriod);
  if (s.paused) return next;
  switch (s.phase) {
    case Phase::kInitializing:
      if (!s.initializer.empty() && !s.storing.has_value()) {
        next = std::min(next, s.elected_at + ToDuration(s.config.initial_model_timeout()));
      }
      break;
    case Phase::kGathering:
      if (s.enough_since.has_value() && !s.draining) {
        next = std::min(next, *s.enough_since + ToDuration(s.config.barrier().start_timeout()));
      }
      break;
    case Phase::kCollecting: {
      const BarrierDecision decision = s.DecideAt(s.JudgedElapsed());
      next = std::min(next, s.collect_from + decision.next_deadline);
      break;
    }
    case Phase::kCommitting:
    case Phase::kEnded:
      break;
  }
  return next;
}

absl::Status Engine::CheckSession(const WorkerKey& who, const std::string& token) const {
  return state_->CheckSession(who, token);
}

const v1::JobConfig& Engine::config() const {
  return state_->next_config.has_value() ? *state_->next_config : state_->config;
}
v1::JobState Engine::state() const { return state_->job_state(); }
std::string Engine::state_reason() const {
  return state_->phase == Phase::kEnded ? state_->end_reason : state_->pause_reason;
}
RoundId Engine::round() const { return state_->round; }
bool Engine::has_model() const { return state_->has_model; }
ModelVersion Engine::version() const { return state_->version; }
uint32_t Engine::model_digest() const { return state_->model_digest; }

std::vector<v1::RoundRecord> Engine::Records(uint64_t before, size_t limit) const {
  std::vector<v1::RoundRecord> found;
  for (auto it = state_->records.rbegin(); it != state_->records.rend() && found.size() < limit; ++it) {
    if (before == 0 || it->round() < before) found.push_back(*it);
  }
  return found;
}

bool Engine::Idle() const { return state_->InflightPushes() == 0 && state_->phase != Phase::kCommitting; }

}  // namespace bmuf::engine
