// The block filter: how a round's mean delta moves the global model. Also called the outer optimizer.
//
// Problem: half a dozen systems call half a dozen different rules "block momentum with Nesterov".
// Idea: every rule under its own name, each as one fused pass over the model; all arithmetic in float, element by
// element, in the order that core/kernels/table.h writes down, so that a commit can be repeated bit for bit.
//
// Notation: d = mean delta (ascent sign), v = block momentum, z = block learning rate, h = block momentum coefficient,
// N = trajectories, W = model, B = broadcast model (what workers train from); B = W unless a rule says otherwise.
//   CLASSICAL         v' = h v + z d          W' = W + v'                 Chen and Huo, ICASSP 2016
//   NESTEROV          v' = h v + z d          W' = W + v', B' = W' + h v'  equals torch.optim.SGD(nesterov=True) on -d;
//                                                                         DiLoCo (Douillard et al. 2023): z 0.7, h 0.9
//   AVERAGING                                 W' = W + d
//   CAFFE2_NESTEROV   v' = h v + z d          W' = W + v' - h (v' - v)    a look-behind; unstable once a block closes
//                                                                         more than 1/(N-1) of the way to an optimum
//   FAIRSEQ_NESTEROV  v' = h v + z d          W' = W + (1 + h) v'
//   CNTK_CLASSICAL    v' = h v + (1-h) z N d  W' = W + v'
//   CNTK_NESTEROV     v' = h v + (1-h) z N d  W' = W + (1 + h) v'
//   PIKA              v' = h v + (1-h) z d    W' = W + (1 + h) v'
//   FED_ADAGRAD, FED_ADAM, FED_YOGI           Reddi et al. 2021, algorithm 2, without bias correction
#ifndef BMUF_CORE_FILTER_FILTER_H_
#define BMUF_CORE_FILTER_FILTER_H_

#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"
#include "bmuf/v1/types.pb.h"
#include "core/kernels/kernels.h"

namespace bmuf {

// Arrays that a rule keeps between rounds, beside the model.
struct FilterArrays {
  bool momentum = false;       // v, or the first moment m; starts at 0.
  bool second_moment = false;  // u; starts at tau^2.
  bool look_ahead = false;     // B differs from W: both are kept.
};
FilterArrays ArraysOf(v1::Variant variant);

// What u starts with.
float InitialSecondMoment(double tau);

// One round's rule with everything resolved.
struct FilterStep {
  v1::Variant variant = v1::VARIANT_AVERAGING;
  OuterCoefficients coefficients;
};

// `outer` is resolved (every field set). `trajectories`: N of the CNTK rules. `rescale` multiplies v first.
FilterStep ResolveStep(const v1::OuterOptimizer& outer, uint32_t trajectories, double rescale);

// Applies `step` to the elements [begin, end) of the arrays. Thread-safe for disjoint ranges; the result does not
// depend on how a model is split. Arrays that ArraysOf(step.variant) does not name may be null. An AVERAGING step in a
// job of another rule (warm-up) leaves v alone; its caller keeps v and sets B = W.
void ApplyFilter(const Kernels& kernels, const FilterStep& step, const OuterArrays& arrays, size_t begin, size_t end);

// 1 - 1/N: the block momentum that keeps N workers' progress per block at that of one (Chen and Huo). 0 for N <= 1.
double AutoBlockMomentum(uint32_t trajectories);

// The factor for v when h changes from `before` to `after`, so that what past blocks have still to deliver,
// v h/(1-h), stays the same. 0 if `before` is 0 (all was delivered); 1 if `after` is 0 (nothing of v will be, whatever
// it is multiplied by). Both in [0, 1).
double MomentumRescale(double before, double after);

// Merges `value` into `merged` (same size) element by element: the larger one. For tensor role MAX. A number wins over
// NaN and +0 over -0, so that the order of merging does not show.
void MergeMax(absl::Span<float> merged, absl::Span<const float> value);
void MergeMax(absl::Span<int32_t> merged, absl::Span<const int32_t> value);
void MergeMax(absl::Span<int64_t> merged, absl::Span<const int64_t> value);

}  // namespace bmuf

#endif  // BMUF_CORE_FILTER_FILTER_H_
