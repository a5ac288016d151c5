// The rules of the block filter in double, written down as the formulas stand in the papers and in the programs they
// come from: what the float filter is measured against. For tests; one element at a time, no thought of speed.
#ifndef BMUF_CORE_FILTER_REFERENCE_H_
#define BMUF_CORE_FILTER_REFERENCE_H_

#include <cmath>
#include <cstddef>
#include <vector>

#include "bmuf/v1/types.pb.h"

namespace bmuf {

// Broadcast model B, model W without look-ahead, block momentum v (or first moment), second moment u.
// Thread-compatible.
struct ReferenceFilter {
  ReferenceFilter(const v1::OuterOptimizer& rule, const std::vector<double>& model)
      : outer(rule), B(model), W(model), v(model.size(), 0.0), u(model.size(), rule.tau() * rule.tau()) {}

  // One round. `d` is the mean delta, `n` the trajectories, `rescale` what v is multiplied by first.
  void Step(const std::vector<double>& d, double n = 1, double rescale = 1) {
    const double zeta = outer.block_learning_rate(), eta = outer.block_momentum();
    const double b1 = outer.beta1(), b2 = outer.beta2();
    for (size_t i = 0; i < B.size(); ++i) {
      const double before = rescale * v[i];
      switch (outer.variant()) {
        case v1::VARIANT_AVERAGING:
          B[i] += d[i];
          break;
        case v1::VARIANT_CLASSICAL:
          v[i] = eta * before + zeta * d[i];
          B[i] += v[i];
          break;
        case v1::VARIANT_NESTEROV:  // The form of torch.optim.SGD(nesterov=True); W by its own definition.
          v[i] = eta * before + zeta * d[i];
          B[i] = W[i] + v[i] + eta * v[i];
          W[i] += v[i];
          continue;
        case v1::VARIANT_CAFFE2_NESTEROV:
          v[i] = eta * before + zeta * d[i];
          B[i] += v[i] - eta * (v[i] - before);
          break;
        case v1::VARIANT_FAIRSEQ_NESTEROV:
          v[i] = eta * before + zeta * d[i];
          B[i] += (1 + eta) * v[i];
          break;
        case v1::VARIANT_CNTK_CLASSICAL:
          v[i] = eta * before + (1 - eta) * zeta * n * d[i];
          B[i] += v[i];
          break;
        case v1::VARIANT_CNTK_NESTEROV:
          v[i] = eta * before + (1 - eta) * zeta * n * d[i];
          B[i] += (1 + eta) * v[i];
          break;
        case v1::VARIANT_PIKA:
          v[i] = eta * before + (1 - eta) * zeta * d[i];
          B[i] += (1 + eta) * v[i];
          break;
        case v1::VARIANT_FED_ADAGRAD:
        case v1::VARIANT_FED_ADAM:
        case v1::VARIANT_FED_YOGI: {
          const double square = d[i] * d[i];
          v[i] = b1 * v[i] + (1 - b1) * d[i];
          if (outer.variant() == v1::VARIANT_FED_ADAGRAD) {
            u[i] += square;
          } else if (outer.variant() == v1::VARIANT_FED_ADAM) {
            u[i] = b2 * u[i] + (1 - b2) * square;
          } else {
            const double sign = u[i] > square ? 1 : u[i] < square ? -1 : 0;
            u[i] -= (1 - b2) * square * sign;
          }
          B[i] += zeta * v[i] / (std::sqrt(u[i]) + outer.tau());
          break;
        }
        default:
          B[i] = W[i] = std::nan("");
      }
      W[i] = B[i];
    }
  }

  v1::OuterOptimizer outer;
  std::vector<double> B, W, v, u;
};

}  // namespace bmuf

#endif  // BMUF_CORE_FILTER_REFERENCE_H_
