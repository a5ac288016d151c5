#include "worker/worker.h"

#include <cmath>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "core/base/status_macros.h"

namespace bmuf::worker {
namespace {

// Warm-up takes samples from passes that no round of a job ever reaches.
constexpr uint64_t kWarmupPosition = uint64_t{1} << 48;

// Actions that wait for news may be told something that is none; then they go on waiting.
bool Waits(const Action& action) {
  return std::holds_alternative<AwaitRound>(action) || std::holds_alternative<AwaitCommit>(action);
}

void SetDuration(absl::Duration d, google::protobuf::Duration* out) {
  const int64_t nanos = absl::ToInt64Nanoseconds(d);
  out->set_seconds(nanos / 1'000'000'000);
  out->set_nanos(static_cast<int32_t>(nanos % 1'000'000'000));
}

}  // namespace

Worker::Worker(const Options& options, Trajectories& trajectories, Exchange& exchange, const Clock& clock,
               Report& report)
    : options_(options),
      trajectories_(trajectories),
      exchange_(exchange),
      clock_(clock),
      report_(report),
      loop_(options.loop),
      base_(ModelState::For(trajectories.manifest())),
      local_(ModelState::For(trajectories.manifest())) {}

void Worker::RequestStop() {
  stop_requested_.store(true);
  exchange_.Interrupt();
}

absl::StatusOr<Finish> Worker::Run() {
  absl::StatusOr<Finish> finish = RunUntilFinished();
  // The others need not wait for the lease to end.
  if (!finish.ok()) exchange_.Leave(std::string(finish.status().message()));
  return finish;
}

std::vector<Action> Worker::StopIfRequested() {
  if (!stop_requested_.load() || std::exchange(told_to_stop_, true)) return {};
  std::vector<Action> actions = loop_.Step(StopRequested{});
  if (actions.empty()) report_.Line("stopping at the end of this block");
  return actions;
}

absl::StatusOr<Finish> Worker::RunUntilFinished() {
  std::vector<Action> actions = StopIfRequested();
  if (actions.empty()) actions = loop_.Step(Start{});
  while (true) {
    std::optional<Event> event;
    for (const Action& action : actions) {
      if (const auto* finish = std::get_if<Finish>(&action)) return *finish;
      ASSIGN_OR_RETURN(event, Perform(action));
    }
    if (!event.has_value()) return absl::InternalError("the block loop waits for nothing");
    // Before the event, which may be the start of a block that is no longer wanted.
    std::vector<Action> next = StopIfRequested();
    if (next.empty()) next = loop_.Step(*event);
    if (!next.empty()) {
      actions = std::move(next);
    } else if (Waits(actions.back())) {
      actions = {actions.back()};
    } else {
      return absl::InternalError(absl::StrCat("unexpected ", ToString(*event), " after ", ToString(actions.back())));
    }
  }
}

absl::StatusOr<std::optional<Event>> Worker::Perform(const Action& action) {
  if (std::holds_alternative<Join>(action)) return exchange_.Join();
  if (const auto* a = std::get_if<TrainWarmup>(&action)) return DoTrainWarmup(*a);
  if (std::holds_alternative<UploadInitial>(action)) {
    RETURN_IF_ERROR(trajectories_.Mean(&base_));
    report_.Line("uploading the initial model");
    return exchange_.UploadInitial(base_);
  }
  if (const auto* a = std::get_if<AwaitRound>(&action)) return exchange_.AwaitRound(a->round);
  if (const auto* a = std::get_if<Pull>(&action)) return DoPull(*a);
  if (std::holds_alternative<ResetInner>(action)) {
    RETURN_IF_ERROR(trajectories_.ResetInnerState());
    return std::optional<Event>();
  }
  if (const auto* a = std::get_if<Train>(&action)) return DoTrain(*a);
  if (const auto* a = std::get_if<Push>(&action)) return exchange_.Push(a->round, base_, local_, facts_);
  if (const auto* a = std::get_if<AwaitCommit>(&action)) {
    const Event event = exchange_.AwaitCommit(a->round);
    if (const auto* committed = std::get_if<Committed>(&event)) SawCommit(*committed);
    return event;
  }
  if (const auto* a = std::get_if<Evaluate>(&action)) return DoEvaluate(*a);
  if (const auto* a = std::get_if<Leave>(&action)) return exchange_.Leave(a->reason);
  return absl::InternalError("unknown action");
}

absl::StatusOr<Event> Worker::DoTrainWarmup(const TrainWarmup& warmup) {
  report_.Line(absl::StrCat("initialiser: warming up for ", warmup.steps, " steps"));
  BlockPlan plan;
  plan.total_samples = kWarmupPosition;
  plan.steps = warmup.steps;
  plan.batch_size = options_.batch_size;
  RETURN_IF_ERROR(trajectories_.TrainAlone(plan).status());
  return WarmedUp{};
}

absl::StatusOr<Event> Worker::DoPull(const Pull& pull) {
  const Event event = exchange_.Pull(pull.version, &base_);
  if (std::holds_alternative<Pulled>(event)) RETURN_IF_ERROR(trajectories_.Load(base_));
  return event;
}

absl::StatusOr<Event> Worker::DoTrain(const Train& train) {
  BlockPlan plan;
  plan.seed = train.seed;
  plan.total_samples = train.total_samples;
  plan.rank = train.rank;
  plan.steps = train.steps;
  plan.batch_size = options_.batch_size;
  plan.progress_begin = train.progress_begin;
  plan.progress_end = train.progress_end;
  const MonotonicTime start = clock_.Now();
  ASSIGN_OR_RETURN(const BlockResult result, trajectories_.Train(plan));
  RETURN_IF_ERROR(trajectories_.Mean(&local_));
  trained_at_ = clock_.Now();
  if (!std::isfinite(result.loss)) {
    return absl::OutOfRangeError(absl::StrCat("training diverged in round ", train.round,
                                              ": the loss is not finite. Lower --lr, or the job's block momentum."));
  }
  const absl::Duration took = trained_at_ - start;
  standing_.round = train.round;
  standing_.round_limit = loop_.round_limit();
  standing_.size = train.size;
  standing_.loss = result.loss;
  standing_.samples_per_second = static_cast<double>(result.samples) / std::max(absl::ToDoubleSeconds(took), 1e-9);
  facts_.set_samples(result.samples);
  facts_.set_steps(result.steps);
  SetDuration(took, facts_.mutable_block_time());
  (*facts_.mutable_metrics())["loss"] = result.loss;
  (*facts_.mutable_metrics())["samples_per_second"] = standing_.samples_per_second;
  return Trained{};
}

void Worker::SawCommit(const Committed& committed) {
  standing_.round = committed.round;
  standing_.waited = clock_.Now() - trained_at_;
  report_.Round(standing_);
  // Said once: it belongs to the version before.
  for (const char* name : {"accuracy", "test_loss"}) facts_.mutable_metrics()->erase(name);
}

absl::StatusOr<Event> Worker::DoEvaluate(const Evaluate& evaluate) {
  ASSIGN_OR_RETURN(const Evaluation result, trajectories_.Evaluate());
  if (evaluate.final) final_evaluation_ = result;
  report_.Line(absl::StrFormat("%s accuracy %.4f  test loss %.4f  version %d", evaluate.final ? "final" : "test",
                               result.accuracy, result.loss, evaluate.version));
  (*facts_.mutable_metrics())["accuracy"] = result.accuracy;
  (*facts_.mutable_metrics())["test_loss"] = result.loss;
  return Evaluated{};
}

}  // namespace bmuf::worker
