#include "worker/block_loop.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace bmuf::worker {
namespace {

template <typename... Fs>
struct Overloaded : Fs... {
  using Fs::operator()...;
};
template <typename... Fs>
Overloaded(Fs...) -> Overloaded<Fs...>;

const char* YesNo(bool b) { return b ? "yes" : "no"; }

const char* Name(Finish::Outcome outcome) {
  switch (outcome) {
    case Finish::Outcome::kDone:
      return "done";
    case Finish::Outcome::kStopped:
      return "stopped";
    case Finish::Outcome::kRefused:
      return "refused";
    case Finish::Outcome::kUnreachable:
      return "unreachable";
    case Finish::Outcome::kJobFailed:
      return "job-failed";
  }
  return "unknown";
}

}  // namespace

std::string ToString(const Event& event) {
  return std::visit(
      Overloaded{
          [](const Start&) -> std::string { return "Start"; },
          [](const Joined& e) {
            return absl::StrFormat("Joined round=%d initial=%s warmup=%d max_rounds=%d", e.round,
                                   YesNo(e.need_initial_model), e.warmup_steps, e.max_rounds);
          },
          [](const Elected&) -> std::string { return "Elected"; },
          [](const WarmedUp&) -> std::string { return "WarmedUp"; },
          [](const InitialUploaded&) -> std::string { return "InitialUploaded"; },
          [](const RoundStarted& e) {
            return absl::StrFormat("RoundStarted round=%d base=%d rank=%d size=%d steps=%d samples=%d", e.round,
                                   e.base_version, e.rank, e.size, e.block_steps, e.total_samples);
          },
          [](const Pulled& e) { return absl::StrFormat("Pulled version=%d", e.version); },
          [](const Trained&) -> std::string { return "Trained"; },
          [](const PushAccepted&) -> std::string { return "PushAccepted"; },
          [](const PushStale& e) { return absl::StrFormat("PushStale round=%d", e.round); },
          [](const Committed& e) {
            return absl::StrFormat("Committed round=%d next=%d reset=%s finished=%s", e.round, e.next_round,
                                   YesNo(e.reset_inner_state), YesNo(e.job_finished));
          },
          [](const Restarted&) -> std::string { return "Restarted"; },
          [](const Ended& e) { return absl::StrFormat("Ended finished=%s: %s", YesNo(e.finished), e.reason); },
          [](const Evaluated&) -> std::string { return "Evaluated"; },
          [](const Left&) -> std::string { return "Left"; },
          [](const Refused& e) { return absl::StrCat("Refused: ", e.reason); },
          [](const StopRequested&) -> std::string { return "StopRequested"; },
          [](const Interrupted&) -> std::string { return "Interrupted"; },
      },
      event);
}

std::string ToString(const Action& action) {
  return std::visit(
      Overloaded{
          [](const Join&) -> std::string { return "Join"; },
          [](const TrainWarmup& a) { return absl::StrFormat("TrainWarmup steps=%d", a.steps); },
          [](const UploadInitial&) -> std::string { return "UploadInitial"; },
          [](const AwaitRound& a) { return absl::StrFormat("AwaitRound round=%d", a.round); },
          [](const Pull& a) {
            return a.version.has_value() ? absl::StrFormat("Pull version=%d", *a.version) : std::string("Pull newest");
          },
          [](const ResetInner&) -> std::string { return "ResetInner"; },
          [](const Train& a) {
            return absl::StrFormat("Train round=%d rank=%d size=%d steps=%d samples=%d progress=%g..%g", a.round,
                                   a.rank, a.size, a.steps, a.total_samples, a.progress_begin, a.progress_end);
          },
          [](const Push& a) { return absl::StrFormat("Push round=%d", a.round); },
          [](const AwaitCommit& a) { return absl::StrFormat("AwaitCommit round=%d", a.round); },
          [](const Evaluate& a) { return absl::StrFormat("Evaluate version=%d final=%s", a.version, YesNo(a.final)); },
          [](const Leave& a) { return absl::StrCat("Leave: ", a.reason); },
          [](const Finish& a) {
            return absl::StrCat("Finish ", Name(a.outcome), a.reason.empty() ? "" : ": ", a.reason);
          },
      },
      action);
}

std::vector<Action> BlockLoop::Step(const Event& event) {
  if (done()) return {};
  return std::visit([this](const auto& e) { return On(e); }, event);
}

std::vector<Action> BlockLoop::On(const Start&) {
  if (phase_ != Phase::kNew) return {};
  phase_ = Phase::kJoining;
  return {Join{}};
}

std::vector<Action> BlockLoop::On(const Joined& joined) {
  switch (phase_) {
    case Phase::kJoining:
    case Phase::kUploading:
    case Phase::kAwaitingRound:
    case Phase::kPushing:
    case Phase::kAwaitingCommit:
      break;
    default:
      return {};
  }
  job_ = joined;
  if (stopping_) return LeaveAs(Finish::Outcome::kStopped, "asked to stop");
  // A coordinator that came back wants the delta again; the same bytes are the same push.
  if (delta_kept_ && joined.round == round_.round) {
    phase_ = Phase::kPushing;
    return {Push{round_.round}};
  }
  if (joined.need_initial_model) return MakeInitialModel();
  return GoToRound(joined.round);
}

std::vector<Action> BlockLoop::MakeInitialModel() {
  if (job_.warmup_steps == 0) {
    phase_ = Phase::kUploading;
    return {UploadInitial{}};
  }
  phase_ = Phase::kWarmingUp;
  return {TrainWarmup{job_.warmup_steps}};
}

std::vector<Action> BlockLoop::On(const Elected&) {
  if (phase_ != Phase::kAwaitingRound) return {};
  return MakeInitialModel();
}

std::vector<Action> BlockLoop::On(const WarmedUp&) {
  if (phase_ != Phase::kWarmingUp) return {};
  if (stopping_) return LeaveAs(Finish::Outcome::kStopped, "asked to stop");
  phase_ = Phase::kUploading;
  std::vector<Action> actions;
  // All others start without momentum; so does the initialiser.
  if (job_.reset_inner_state) actions.push_back(ResetInner{});
  actions.push_back(UploadInitial{});
  return actions;
}

std::vector<Action> BlockLoop::On(const InitialUploaded&) {
  if (phase_ != Phase::kUploading) return {};
  // The version is pulled like everybody's: the broadcast may be rounded to the job's codec.
  held_version_.reset();
  return GoToRound(0);
}

std::vector<Action> BlockLoop::GoToRound(uint64_t round) {
  if (stopping_) return LeaveAs(Finish::Outcome::kStopped, "asked to stop");
  delta_kept_ = false;
  phase_ = Phase::kAwaitingRound;
  return {AwaitRound{round}};
}

std::vector<Action> BlockLoop::On(const RoundStarted& started) {
  if (phase_ != Phase::kAwaitingRound) return {};
  round_ = started;
  if (held_version_ == started.base_version) return TrainBlock();
  phase_ = Phase::kPullingBase;
  return {Pull{started.base_version}};
}

std::vector<Action> BlockLoop::TrainBlock() {
  if (stopping_) return LeaveAs(Finish::Outcome::kStopped, "asked to stop");
  phase_ = Phase::kTraining;
  held_version_.reset();
  Train train;
  train.round = round_.round;
  train.rank = round_.rank;
  train.size = round_.size;
  train.steps = round_.block_steps;
  train.total_samples = round_.total_samples;
  train.seed = job_.seed;
  if (const auto limit = static_cast<double>(round_limit()); limit > 0) {
    train.progress_begin = static_cast<double>(round_.round - 1) / limit;
    train.progress_end = static_cast<double>(round_.round) / limit;
  }
  return {train};
}

std::vector<Action> BlockLoop::On(const Trained&) {
  if (phase_ != Phase::kTraining) return {};
  delta_kept_ = true;
  phase_ = Phase::kPushing;
  return {Push{round_.round}};
}

std::vector<Action> BlockLoop::On(const PushAccepted&) {
  if (phase_ != Phase::kPushing) return {};
  // A delta that was received counts, whether its worker stays or not.
  if (stopping_) return LeaveAs(Finish::Outcome::kStopped, "asked to stop");
  phase_ = Phase::kAwaitingCommit;
  return {AwaitCommit{round_.round}};
}

std::vector<Action> BlockLoop::On(const PushStale& stale) {
  if (phase_ != Phase::kPushing && phase_ != Phase::kAwaitingCommit) return {};
  std::vector<Action> actions;
  if (job_.reset_inner_state) actions.push_back(ResetInner{});
  for (Action& action : GoToRound(stale.round)) actions.push_back(std::move(action));
  return actions;
}

std::vector<Action> BlockLoop::On(const Committed& committed) {
  if (phase_ != Phase::kAwaitingRound && phase_ != Phase::kAwaitingCommit) return {};
  const bool own_block = phase_ == Phase::kAwaitingCommit;
  delta_kept_ = false;
  next_round_ = committed.next_round;
  finished_ = committed.job_finished || (round_limit() > 0 && committed.round >= round_limit());
  if (!finished_ && stopping_) return LeaveAs(Finish::Outcome::kStopped, "asked to stop");
  std::vector<Action> actions;
  if (own_block && committed.reset_inner_state) actions.push_back(ResetInner{});
  phase_ = Phase::kPullingCommit;
  actions.push_back(Pull{});
  return actions;
}

std::vector<Action> BlockLoop::On(const Pulled& pulled) {
  if (phase_ != Phase::kPullingBase && phase_ != Phase::kPullingCommit) return {};
  held_version_ = pulled.version;
  if (phase_ == Phase::kPullingBase) {
    // Another version than asked for: the round is over, and the next one starts from it.
    return pulled.version == round_.base_version ? TrainBlock() : GoToRound(pulled.version + 1);
  }
  const bool due = options_.eval_every > 0 && pulled.version > 0 && pulled.version % options_.eval_every == 0;
  if (finished_ || (due && !stopping_)) {
    phase_ = Phase::kEvaluating;
    return {Evaluate{pulled.version, finished_}};
  }
  return GoToRound(next_round_);
}

std::vector<Action> BlockLoop::On(const Evaluated&) {
  if (phase_ != Phase::kEvaluating) return {};
  if (finished_) return LeaveAs(Finish::Outcome::kDone, "done");
  return GoToRound(next_round_);
}

std::vector<Action> BlockLoop::On(const Restarted&) {
  if (phase_ == Phase::kAwaitingCommit) {
    phase_ = Phase::kPushing;
    return {Push{round_.round}};
  }
  return {};
}

std::vector<Action> BlockLoop::On(const Ended& ended) {
  if (phase_ != Phase::kAwaitingRound && phase_ != Phase::kAwaitingCommit && phase_ != Phase::kPushing) return {};
  if (!ended.finished) return LeaveAs(Finish::Outcome::kJobFailed, ended.reason);
  finished_ = true;
  phase_ = Phase::kPullingCommit;
  return {Pull{}};
}

std::vector<Action> BlockLoop::LeaveAs(Finish::Outcome outcome, const std::string& reason) {
  phase_ = Phase::kLeaving;
  finish_ = {outcome, outcome == Finish::Outcome::kDone ? "" : reason};
  return {Leave{reason}};
}

std::vector<Action> BlockLoop::On(const Left&) {
  if (phase_ != Phase::kLeaving) return {};
  phase_ = Phase::kDone;
  return {finish_};
}

std::vector<Action> BlockLoop::On(const Refused& refused) {
  // There is no membership to end, or nothing to gain from trying.
  if (phase_ != Phase::kLeaving) {
    finish_ = {refused.unreachable ? Finish::Outcome::kUnreachable : Finish::Outcome::kRefused, refused.reason};
  }
  phase_ = Phase::kDone;
  return {finish_};
}

std::vector<Action> BlockLoop::On(const StopRequested&) {
  stopping_ = true;
  switch (phase_) {
    case Phase::kNew:
    case Phase::kJoining:
      phase_ = Phase::kDone;
      finish_ = {Finish::Outcome::kStopped, "asked to stop"};
      return {finish_};
    case Phase::kAwaitingRound:
    case Phase::kAwaitingCommit:
      return LeaveAs(Finish::Outcome::kStopped, "asked to stop");
    default:
      return {};
  }
}

std::vector<Action> BlockLoop::On(const Interrupted&) {
  if (phase_ == Phase::kLeaving) return On(Left{});
  if (phase_ == Phase::kNew || phase_ == Phase::kJoining) return On(StopRequested{});
  return LeaveAs(Finish::Outcome::kStopped, "asked to stop");
}

}  // namespace bmuf::worker
