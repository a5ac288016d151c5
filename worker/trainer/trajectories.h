// All trajectories of one process, seen from outside as one worker with weight K.
//
// Problem: every device trains on its own shard, but the coordinator should see one push of the process.
// Idea: K trainers on K threads; a block gives each its slice of the sample stream (neighbouring ranks, see
// worker/data/sample_stream.h), then the mean of their models leaves the process.
// Usage:  node.Load(broadcast); auto facts = node.Train(plan); node.Mean(&local);
#ifndef BMUF_WORKER_TRAINER_TRAJECTORIES_H_
#define BMUF_WORKER_TRAINER_TRAJECTORIES_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/base/thread_pool.h"
#include "worker/data/sample_stream.h"
#include "worker/trainer/node_reducer.h"
#include "worker/trainer/trainer.h"

namespace bmuf::worker {

// One block of one round, from what the coordinator said.
struct BlockPlan {
  uint64_t seed = 0;           // Of the sample stream; the same for all workers of the job.
  uint64_t total_samples = 0;  // Committed before the round: where the round starts in the sample stream.
  uint32_t rank = 0;           // Of this process's first trajectory.
  uint32_t steps = 0;
  uint32_t batch_size = 64;
  double progress_begin = 0;  // Of the whole training, in [0, 1].
  double progress_end = 0;
};

// Thread-compatible. All calls block. A failure of one trajectory is the failure of the call; its text names it.
class Trajectories {
 public:
  // Requires at least one trainer, all of one manifest, and a reducer for their devices in this order. `samples` is
  // the size of the training set.
  Trajectories(std::vector<std::unique_ptr<Trainer>> trainers, std::unique_ptr<NodeReducer> reducer, uint64_t samples);

  const v1::Manifest& manifest() const { return trainers_[0]->manifest(); }
  uint32_t count() const { return static_cast<uint32_t>(trainers_.size()); }
  std::string reducer_name() const { return reducer_->name(); }

  absl::Status Load(const ModelState& state);
  // Trajectory k trains the slice of rank plan.rank + k. Samples are summed over the trajectories, steps are those of
  // each, the loss is their mean.
  absl::StatusOr<BlockResult> Train(const BlockPlan& plan);
  // Warm-up: the first trajectory alone trains the slice at plan.total_samples; the others then take its model.
  absl::StatusOr<BlockResult> TrainAlone(const BlockPlan& plan);
  // The mean of the trajectories' models; auxiliary tensors by role. `out` has the manifest's sizes.
  absl::Status Mean(ModelState* out);
  absl::Status ResetInnerState();
  // On the first trajectory's model: call it after Load.
  absl::StatusOr<Evaluation> Evaluate() { return trainers_[0]->Evaluate(); }

 private:
  std::vector<uint32_t> Slice(uint64_t seed, uint64_t position, uint64_t count);
  // Runs body(k) for all k at once; the first error in order of k.
  absl::Status ForEach(const std::function<absl::Status(size_t)>& body);

  const std::vector<std::unique_ptr<Trainer>> trainers_;
  const std::unique_ptr<NodeReducer> reducer_;
  const uint64_t samples_;
  uint64_t seed_ = 0;
  SampleStream stream_;  // Of seed_.
  ThreadPool pool_;
};

}  // namespace bmuf::worker

#endif  // BMUF_WORKER_TRAINER_TRAJECTORIES_H_
