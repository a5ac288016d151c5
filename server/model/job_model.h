// The numbers of one job: its published versions, its optimizer state and the sum of the open round.
//
// Life of a round: BeginAttempt -> Fold for each contribution -> Prepare (the outer update, into new arrays) -> made
// durable elsewhere -> Publish (a swap that cannot fail). Dropping a prepared commit leaves the model as it was.
#ifndef BMUF_SERVER_MODEL_JOB_MODEL_H_
#define BMUF_SERVER_MODEL_JOB_MODEL_H_

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "bmuf/v1/types.pb.h"
#include "core/base/aligned_buffer.h"
#include "core/base/ids.h"
#include "core/base/thread_pool.h"
#include "core/filter/filter.h"
#include "core/kernels/kernels.h"
#include "core/layout/layout.h"
#include "server/model/accumulator.h"
#include "server/model/memory_budget.h"
#include "server/model/staging.h"
#include "server/model/version.h"

namespace bmuf {

// What a job's buffers take, all known when its manifest is.
struct MemoryPlan {
  uint64_t versions_bytes = 0;     // Two published versions and the one being made.
  uint64_t state_bytes = 0;        // Optimizer state, twice.
  uint64_t accumulator_bytes = 0;  // And the mean.
  uint64_t staging_bytes = 0;      // All slots in the largest codec.
  uint64_t total_bytes() const { return versions_bytes + state_bytes + accumulator_bytes + staging_bytes; }
};
MemoryPlan PlanMemory(const Layout& layout, const v1::JobConfig& config);

// One round's outcome before it is published.
struct PreparedCommit {
  RoundId round;
  std::shared_ptr<const Version> version;
  AlignedBuffer<float> mean;  // What a replay needs: the mean delta of the BMUF section.
  AlignedBuffer<float> momentum;
  AlignedBuffer<float> second_moment;
  double mean_norm = 0;
};

// Newest() and Get() are thread-safe. All else is called by one party at a time, in the order of a round; Fold and
// Prepare take long and run on compute threads.
class JobModel {
 public:
  // Takes the plan's bytes from `budget`. Errors: REASON_MODEL_TOO_LARGE. `config` decides variant and pull codec.
  static absl::StatusOr<std::unique_ptr<JobModel>> Create(std::shared_ptr<const Layout> layout,
                                                          const v1::JobConfig& config, MemoryBudget& budget,
                                                          const Kernels& kernels, ThreadPool& pool);

  const std::shared_ptr<const Layout>& layout() const { return layout_; }
  const MemoryPlan& plan() const { return plan_; }

  // Makes a verified FP32 payload version 0 and clears the optimizer state.
  std::shared_ptr<const Version> SetInitialModel(const Staging& staging);

  // An empty sum.
  void BeginAttempt() { accumulator_.Reset(); }

  // Adds a verified delta. Errors: REASON_OUT_OF_RANGE_DELTA; nothing is changed then.
  absl::Status Fold(const Staging& staging, float max_abs, double weight, double scale, uint32_t rank);

  // Computes the next version from the sum. `outer` is this round's resolved rule. Errors: REASON_INTERNAL if the
  // result is not finite or the total weight is 0; nothing is changed then.
  absl::StatusOr<PreparedCommit> Prepare(RoundId round, const v1::OuterOptimizer& outer, uint32_t trajectories,
                                         double momentum_rescale);

  // Makes a prepared commit the newest version. Cannot fail.
  void Publish(PreparedCommit commit);

  // Null before the initial model.
  std::shared_ptr<const Version> Newest() const ABSL_LOCKS_EXCLUDED(mu_);
  // A kept version (the newest two, and nothing older). Errors: REASON_NO_MODEL, REASON_NOT_KEPT (metadata `version`).
  absl::StatusOr<std::shared_ptr<const Version>> Get(std::optional<ModelVersion> version) const
      ABSL_LOCKS_EXCLUDED(mu_);

 private:
  JobModel(std::shared_ptr<const Layout> layout, const v1::JobConfig& config, MemoryPlan plan,
           MemoryBudget::Reservation memory, const Kernels& kernels, ThreadPool& pool);

  const std::shared_ptr<const Layout> layout_;
  const FilterArrays arrays_;
  const double tau_;
  const bool rounded_broadcast_;  // Pull codec BF16: the broadcast is what BF16 can say, the model stays exact.
  const MemoryPlan plan_;
  const MemoryBudget::Reservation memory_;
  const Kernels& kernels_;
  ThreadPool& pool_;

  Accumulator accumulator_;
  AlignedBuffer<float> momentum_;
  AlignedBuffer<float> second_moment_;

  mutable absl::Mutex mu_;
  std::deque<std::shared_ptr<const Version>> versions_ ABSL_GUARDED_BY(mu_);  // Oldest first, at most two.
};

}  // namespace bmuf

#endif  // BMUF_SERVER_MODEL_JOB_MODEL_H_
