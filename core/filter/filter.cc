#include "core/filter/filter.h"

#include <cmath>

namespace bmuf {
namespace {

OuterArrays Slice(const OuterArrays& a, size_t begin) {
  const auto at = [begin](auto* p) { return p == nullptr ? p : p + begin; };
  OuterArrays s;
  s.mean = at(a.mean);
  s.model_in = at(a.model_in);
  s.model_out = at(a.model_out);
  s.v_in = at(a.v_in);
  s.v_out = at(a.v_out);
  s.u_in = at(a.u_in);
  s.u_out = at(a.u_out);
  s.broadcast_out = at(a.broadcast_out);
  return s;
}

// Whether `a` goes before `b` in an order in which no two different results tie, so that the order of merging is of no
// consequence: any number before NaN, the positive zero before the negative one.
bool IsLarger(float a, float b) {
  if (a == b) return std::signbit(b) && !std::signbit(a);
  return a > b || (std::isnan(b) && !std::isnan(a));
}
template <typename Integer>
bool IsLarger(Integer a, Integer b) {
  return a > b;
}

template <typename T>
void MergeLarger(absl::Span<T> merged, absl::Span<const T> value) {
  for (size_t i = 0; i < merged.size(); ++i) {
    if (IsLarger(value[i], merged[i])) merged[i] = value[i];
  }
}

}  // namespace

FilterArrays ArraysOf(v1::Variant variant) {
  FilterArrays arrays;
  switch (variant) {
    case v1::VARIANT_AVERAGING:
      break;
    case v1::VARIANT_FED_ADAGRAD:
    case v1::VARIANT_FED_ADAM:
    case v1::VARIANT_FED_YOGI:
      arrays.momentum = arrays.second_moment = true;
      break;
    case v1::VARIANT_NESTEROV:
    case v1::VARIANT_UNSPECIFIED:
      arrays.momentum = arrays.look_ahead = true;
      break;
    default:
      arrays.momentum = true;
  }
  return arrays;
}

float InitialSecondMoment(double tau) { return static_cast<float>(tau * tau); }

FilterStep ResolveStep(const v1::OuterOptimizer& outer, uint32_t trajectories, double rescale) {
  const double zeta = outer.block_learning_rate();
  const double eta = outer.block_momentum();
  double gain_on_mean = zeta;
  double gain = 1;
  switch (outer.variant()) {
    case v1::VARIANT_FAIRSEQ_NESTEROV:
      gain = 1 + eta;
      break;
    case v1::VARIANT_CNTK_CLASSICAL:
      gain_on_mean = (1 - eta) * zeta * trajectories;
      break;
    case v1::VARIANT_CNTK_NESTEROV:
      gain_on_mean = (1 - eta) * zeta * trajectories;
      gain = 1 + eta;
      break;
    case v1::VARIANT_PIKA:
      gain_on_mean = (1 - eta) * zeta;
      gain = 1 + eta;
      break;
    default:
      break;
  }
  FilterStep step;
  step.variant = outer.variant() == v1::VARIANT_UNSPECIFIED ? v1::VARIANT_NESTEROV : outer.variant();
  OuterCoefficients& c = step.coefficients;
  c.zeta = static_cast<float>(gain_on_mean);
  c.eta = static_cast<float>(eta);
  c.gain = static_cast<float>(gain);
  c.rescale = static_cast<float>(rescale);
  c.beta1 = static_cast<float>(outer.beta1());
  c.one_minus_beta1 = static_cast<float>(1 - outer.beta1());
  c.beta2 = static_cast<float>(outer.beta2());
  c.one_minus_beta2 = static_cast<float>(1 - outer.beta2());
  c.tau = static_cast<float>(outer.tau());
  return step;
}

void ApplyFilter(const Kernels& kernels, const FilterStep& step, const OuterArrays& arrays, size_t begin, size_t end) {
  const OuterArrays a = Slice(arrays, begin);
  const size_t n = end - begin;
  switch (step.variant) {
    case v1::VARIANT_AVERAGING:
      kernels.add(a.model_out, a.model_in, a.mean, n);
      break;
    case v1::VARIANT_NESTEROV:
      kernels.outer_nesterov(a, step.coefficients, n);
      break;
    case v1::VARIANT_CAFFE2_NESTEROV:
      kernels.outer_caffe2_nesterov(a, step.coefficients, n);
      break;
    case v1::VARIANT_FED_ADAGRAD:
      kernels.outer_adagrad(a, step.coefficients, n);
      break;
    case v1::VARIANT_FED_ADAM:
      kernels.outer_adam(a, step.coefficients, n);
      break;
    case v1::VARIANT_FED_YOGI:
      kernels.outer_yogi(a, step.coefficients, n);
      break;
    default:
      kernels.outer_momentum(a, step.coefficients, n);
  }
}

double AutoBlockMomentum(uint32_t trajectories) { return trajectories <= 1 ? 0.0 : 1.0 - 1.0 / trajectories; }

double MomentumRescale(double before, double after) {
  if (after <= 0) return 1;
  return (before / (1 - before)) / (after / (1 - after));
}

void MergeMax(absl::Span<float> merged, absl::Span<const float> value) { MergeLarger(merged, value); }
void MergeMax(absl::Span<int32_t> merged, absl::Span<const int32_t> value) { MergeLarger(merged, value); }
void MergeMax(absl::Span<int64_t> merged, absl::Span<const int64_t> value) { MergeLarger(merged, value); }

}  // namespace bmuf
