// One worker process: the block loop's decisions carried out on trainers and a coordinator.
#ifndef BMUF_WORKER_WORKER_H_
#define BMUF_WORKER_WORKER_H_

#include <atomic>
#include <cstdint>
#include <optional>

#include "absl/status/statusor.h"
#include "core/base/clock.h"
#include "worker/block_loop.h"
#include "worker/exchange.h"
#include "worker/report.h"
#include "worker/trainer/trajectories.h"

namespace bmuf::worker {

class Worker {
 public:
  struct Options {
    BlockLoop::Options loop;
    uint32_t batch_size = 64;
  };

  // All references outlive the worker. Manifest of `trajectories` and of `exchange` are the same.
  Worker(const Options& options, Trajectories& trajectories, Exchange& exchange, const Clock& clock, Report& report);

  // Runs until the job is over, the worker is asked to stop, or nothing goes on; blocks all that time. Returns how it
  // ended. INTERNAL on a fault of the trainer, OUT_OF_RANGE if training diverged (a local model is no longer finite);
  // membership is ended then too.
  absl::StatusOr<Finish> Run();

  // Ends the work at the next block boundary. Thread-safe, returns at once, may be called before Run.
  void RequestStop();

  // The last evaluation of the final version, if there was one. After Run.
  const std::optional<Evaluation>& final_evaluation() const { return final_evaluation_; }

 private:
  absl::StatusOr<Finish> RunUntilFinished();
  // Once after RequestStop: tells the loop. The actions that take the place of what was under way, if any.
  std::vector<Action> StopIfRequested();
  // Performs one action; the event is empty for actions that lead to none.
  absl::StatusOr<std::optional<Event>> Perform(const Action& action);
  absl::StatusOr<Event> DoTrain(const Train& train);
  absl::StatusOr<Event> DoTrainWarmup(const TrainWarmup& warmup);
  absl::StatusOr<Event> DoPull(const Pull& pull);
  absl::StatusOr<Event> DoEvaluate(const Evaluate& evaluate);
  void SawCommit(const Committed& committed);

  const Options options_;
  Trajectories& trajectories_;
  Exchange& exchange_;
  const Clock& clock_;
  Report& report_;
  std::atomic<bool> stop_requested_{false};

  // Confined to the thread of Run.
  BlockLoop loop_;
  bool told_to_stop_ = false;
  ModelState base_;   // The version pulled last.
  ModelState local_;  // What the last block made of it.
  v1::BlockFacts facts_;
  Standing standing_;
  MonotonicTime trained_at_;
  std::optional<Evaluation> final_evaluation_;
};

}  // namespace bmuf::worker

#endif  // BMUF_WORKER_WORKER_H_
