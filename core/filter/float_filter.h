// The block filter with the arrays it needs, for tests: what a job's model does, without versions and threads.
#ifndef BMUF_CORE_FILTER_FLOAT_FILTER_H_
#define BMUF_CORE_FILTER_FLOAT_FILTER_H_

#include <cstdint>
#include <vector>

#include "core/filter/filter.h"

namespace bmuf {

// Thread-compatible.
struct FloatFilter {
  FloatFilter(const Kernels& use, const v1::OuterOptimizer& rule, const std::vector<float>& model)
      : kernels(use),
        outer(rule),
        B(model),
        W(model),
        v(model.size(), 0.0f),
        u(model.size(), InitialSecondMoment(rule.tau())) {}

  // The mean of `deltas` with `weights` (empty: all 1), by the exact accumulator. At least one weight is above 0.
  std::vector<float> Mean(const std::vector<std::vector<float>>& deltas,
                          const std::vector<double>& weights = {}) const {
    std::vector<double> sum(B.size(), 0.0);
    double total = 0;
    for (size_t k = 0; k < deltas.size(); ++k) {
      const double weight = weights.empty() ? 1.0 : weights[k];
      kernels.accumulate(sum.data(), deltas[k].data(), weight, sum.size());
      total += weight;
    }
    std::vector<float> mean(B.size());
    kernels.mean(mean.data(), sum.data(), total, mean.size());
    return mean;
  }

  // One round, in pieces of `piece` elements (0: in one).
  void Step(const std::vector<float>& mean, uint32_t trajectories = 1, double rescale = 1, size_t piece = 0) {
    const FilterStep step = ResolveStep(outer, trajectories, rescale);
    const FilterArrays used = ArraysOf(step.variant);
    const size_t n = B.size();
    std::vector<float> new_model(n), new_broadcast(n), new_v(n), new_u(n);
    OuterArrays a;  // Only what the rule says it uses.
    a.mean = mean.data();
    a.model_in = W.data();
    a.model_out = new_model.data();
    if (used.momentum) {
      a.v_in = v.data();
      a.v_out = new_v.data();
    }
    if (used.second_moment) {
      a.u_in = u.data();
      a.u_out = new_u.data();
    }
    if (used.look_ahead) a.broadcast_out = new_broadcast.data();
    if (piece == 0) piece = n;
    for (size_t begin = 0; begin < n; begin += piece) {
      ApplyFilter(kernels, step, a, begin, begin + piece < n ? begin + piece : n);
    }
    W = new_model;
    B = used.look_ahead ? new_broadcast : new_model;
    if (used.momentum) v = new_v;
    if (used.second_moment) u = new_u;
  }

  const Kernels& kernels;
  v1::OuterOptimizer outer;
  std::vector<float> B, W, v, u;
};

}  // namespace bmuf

#endif  // BMUF_CORE_FILTER_FLOAT_FILTER_H_
