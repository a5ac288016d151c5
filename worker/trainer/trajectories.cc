#include "worker/trainer/trajectories.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/blocking_counter.h"
#include "core/base/status_macros.h"

namespace bmuf::worker {

Trajectories::Trajectories(std::vector<std::unique_ptr<Trainer>> trainers, std::unique_ptr<NodeReducer> reducer,
                           uint64_t samples)
    : trainers_(std::move(trainers)),
      reducer_(std::move(reducer)),
      samples_(samples),
      stream_(seed_, samples_),
      pool_("trajectory", trainers_.size()) {}

absl::Status Trajectories::ForEach(const std::function<absl::Status(size_t)>& body) {
  std::vector<absl::Status> results(trainers_.size());
  absl::BlockingCounter left(static_cast<int>(trainers_.size()));
  for (size_t k = 0; k < trainers_.size(); ++k) {
    pool_.Schedule([&, k] {
      results[k] = body(k);
      left.DecrementCount();
    });
  }
  left.Wait();
  for (size_t k = 0; k < results.size(); ++k) {
    if (!results[k].ok()) {
      return absl::Status(results[k].code(), absl::StrCat("trajectory ", k, ": ", std::string(results[k].message())));
    }
  }
  return absl::OkStatus();
}

std::vector<uint32_t> Trajectories::Slice(uint64_t seed, uint64_t position, uint64_t count) {
  if (seed != seed_) {
    seed_ = seed;
    stream_ = SampleStream(seed_, samples_);
  }
  return stream_.Slice(position, count);
}

absl::Status Trajectories::Load(const ModelState& state) {
  return ForEach([&](size_t k) { return trainers_[k]->Load(state); });
}

absl::StatusOr<BlockResult> Trajectories::Train(const BlockPlan& plan) {
  const uint64_t block_samples = uint64_t{plan.steps} * plan.batch_size;
  const std::vector<uint32_t> indices =
      Slice(plan.seed, plan.total_samples + plan.rank * block_samples, block_samples * trainers_.size());
  std::vector<BlockResult> results(trainers_.size());
  RETURN_IF_ERROR(ForEach([&](size_t k) -> absl::Status {
    Block block;
    block.samples = absl::MakeConstSpan(indices).subspan(k * block_samples, block_samples);
    block.batch_size = plan.batch_size;
    block.progress_begin = plan.progress_begin;
    block.progress_end = plan.progress_end;
    ASSIGN_OR_RETURN(results[k], trainers_[k]->Train(block));
    return absl::OkStatus();
  }));
  BlockResult sum;
  sum.steps = results[0].steps;
  for (const BlockResult& r : results) {
    sum.samples += r.samples;
    sum.loss += r.loss / static_cast<double>(results.size());
  }
  return sum;
}

absl::StatusOr<BlockResult> Trajectories::TrainAlone(const BlockPlan& plan) {
  const std::vector<uint32_t> indices = Slice(plan.seed, plan.total_samples, uint64_t{plan.steps} * plan.batch_size);
  Block block;
  block.samples = indices;
  block.batch_size = plan.batch_size;
  block.progress_begin = plan.progress_begin;
  block.progress_end = plan.progress_end;
  ASSIGN_OR_RETURN(const BlockResult result, trainers_[0]->Train(block));
  ModelState state = ModelState::For(manifest());
  RETURN_IF_ERROR(trainers_[0]->Store(&state));
  RETURN_IF_ERROR(Load(state));
  return result;
}

absl::Status Trajectories::Mean(ModelState* out) {
  std::vector<ModelState> locals(trainers_.size());
  RETURN_IF_ERROR(ForEach([&](size_t k) {
    locals[k] = ModelState::For(manifest());
    return trainers_[k]->Store(&locals[k]);
  }));
  std::vector<const float*> parts;
  std::vector<AlignedBuffer<uint8_t>> auxiliary;
  for (size_t k = 0; k < trainers_.size(); ++k) {
    parts.push_back(reducer_->reads_device_memory() ? trainers_[k]->device_parameters() : locals[k].bmuf.data());
    auxiliary.push_back(std::move(locals[k].auxiliary));
  }
  RETURN_IF_ERROR(reducer_->Mean(parts, out->bmuf.span()));
  return ReduceAuxiliary(manifest(), auxiliary, &out->auxiliary);
}

absl::Status Trajectories::ResetInnerState() {
  return ForEach([&](size_t k) { return trainers_[k]->ResetInnerState(); });
}

}  // namespace bmuf::worker
