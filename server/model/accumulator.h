// The exact sum of one attempt's contributions.
//
// Problem: a sum of floats depends on the order of arrival, and keeping every delta costs memory per worker.
// Idea: each weighted value is rounded once to a grid of 2^-36 and added in double. While the sum stays below 2^17
// every addition is exact, so the order does not matter and the memory does not depend on the number of workers.
#ifndef BMUF_SERVER_MODEL_ACCUMULATOR_H_
#define BMUF_SERVER_MODEL_ACCUMULATOR_H_

#include <cstdint>
#include <limits>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "core/base/aligned_buffer.h"
#include "core/base/thread_pool.h"
#include "core/kernels/kernels.h"
#include "core/layout/layout.h"
#include "server/model/staging.h"

namespace bmuf {

// Thread-compatible: Fold and the readers are called one at a time.
class Accumulator {
 public:
  explicit Accumulator(std::shared_ptr<const Layout> layout);

  // Empties it.
  void Reset();

  // Adds weight * scale * delta and merges the auxiliary tensors (MEAN with `weight`). `rank` decides role FIRST. Runs
  // on the caller's and the pool's threads. Errors: REASON_OUT_OF_RANGE_DELTA if a weighted value or the sum could
  // leave the exact range; nothing is changed then. Requires a verified staging of the same layout. A weight of 0 adds
  // nothing.
  absl::Status Fold(const Kernels& kernels, ThreadPool& pool, const Staging& staging, float max_abs, double weight,
                    double scale, uint32_t rank);

  // Added up in the order of ranks, so that it does not depend on the order of arrival either.
  double total_weight() const;

  // The weighted mean of the deltas, rounded to float. Requires total_weight() > 0.
  AlignedBuffer<float> Mean(const Kernels& kernels, ThreadPool& pool) const;
  // The auxiliary section after the attempt, where `before` is the section the attempt started from. Requires
  // total_weight() > 0.
  AlignedBuffer<uint8_t> Auxiliary(const AlignedBuffer<uint8_t>& before) const;

 private:
  const std::shared_ptr<const Layout> layout_;
  AlignedBuffer<double> sum_;
  std::vector<double> auxiliary_sum_;                   // Of the MEAN tensors, one after the other.
  AlignedBuffer<uint8_t> auxiliary_;                    // MAX and FIRST as merged so far, in their place.
  std::multiset<std::pair<uint32_t, double>> weights_;  // (rank, weight) of each contribution: a few words each.
  double bound_ = 0;  // Of |sum|: the largest weighted magnitudes added up, which is conservative.
  uint32_t first_rank_ = std::numeric_limits<uint32_t>::max();
  bool empty_ = true;
};

}  // namespace bmuf

#endif  // BMUF_SERVER_MODEL_ACCUMULATOR_H_
