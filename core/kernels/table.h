// The table of loops, without anything else: all that a file compiled for one instruction set may include. Users
// include kernels.h.
#ifndef BMUF_CORE_KERNELS_TABLE_H_
#define BMUF_CORE_KERNELS_TABLE_H_

#include <cstddef>
#include <cstdint>

namespace bmuf {

// Elements of an int8 block that share one scale.
inline constexpr size_t kInt8BlockElements = 256;
// sum_of_squares adds over pieces of this many elements; callers may split only at its multiples.
inline constexpr size_t kNormPieceElements = 4096;

// Coefficients of one outer update, rounded to float once. Unused ones are ignored by the rule at hand.
struct OuterCoefficients {
  float zeta = 1;     // Gain on the mean delta: already times (1 - eta) and N where the rule says so.
  float eta = 0;      // Block momentum.
  float gain = 1;     // What the new v counts in the step: 1, or 1 + eta.
  float rescale = 1;  // v is multiplied by this first.
  float beta1 = 0;    // Adaptive rules: first moment, and 1 - beta1 below.
  float one_minus_beta1 = 1;
  float beta2 = 0;
  float one_minus_beta2 = 1;
  float tau = 1e-3f;
};

// Arrays of one outer update, all of the same length. `in` and `out` of one name may be the same array.
struct OuterArrays {
  const float* mean = nullptr;  // Weighted mean of the deltas.
  const float* model_in = nullptr;
  float* model_out = nullptr;   // W (Nesterov: without look-ahead).
  const float* v_in = nullptr;  // Block momentum, or first moment m.
  float* v_out = nullptr;
  const float* u_in = nullptr;  // Second moment (adaptive rules).
  float* u_out = nullptr;
  float* broadcast_out = nullptr;  // B (Nesterov); null where it equals the model.
};

// One implementation.
struct Kernels {
  const char* name;

  // sum[i] += round(weight * delta[i]), rounded to the nearest multiple of 2^-36, ties to even; products in double.
  // Exact, hence independent of the order of calls, while every |sum| stays below 2^17 and every |weight * delta[i]| is
  // at most 2^15: the caller checks both.
  void (*accumulate)(double* sum, const float* delta, double weight, size_t n);
  // out[i] = float(sum[i] / total_weight), division in double. The rounded mean is what the outer update sees and what
  // is stored.
  void (*mean)(float* out, const double* sum, double total_weight, size_t n);
  // Index of the first NaN or infinity, n if there is none.
  size_t (*first_non_finite)(const float* x, size_t n);
  // Largest |x[i]|, 0 for n = 0; NaN if x holds one.
  float (*max_abs)(const float* x, size_t n);
  // Sum of squares in double. Tree: within a piece of kNormPieceElements, lane j (0..7) adds elements j, j+8, ...;
  // lanes are added as ((0+1)+(2+3))+((4+5)+(6+7)); pieces are added from left to right.
  double (*sum_of_squares)(const float* x, size_t n);
  // out[i] = a[i] - b[i]; out may be a or b.
  void (*subtract)(float* out, const float* a, const float* b, size_t n);
  // out[i] = a[i] + b[i]; out may be a or b.
  void (*add)(float* out, const float* a, const float* b, size_t n);

  // The outer updates, float, in this order of operations:
  // momentum: v' = eta*(rescale*v) + zeta*mean; model' = model + gain*v'
  void (*outer_momentum)(const OuterArrays& a, const OuterCoefficients& c, size_t n);
  // nesterov: v' as above; model' = model + v'; broadcast = model' + eta*v'
  void (*outer_nesterov)(const OuterArrays& a, const OuterCoefficients& c, size_t n);
  // caffe2_nesterov: v' as above; model' = (model + v') - eta*(v' - v)
  void (*outer_caffe2_nesterov)(const OuterArrays& a, const OuterCoefficients& c, size_t n);
  // adaptive: v' = beta1*v + (1-beta1)*mean; s = mean*mean;
  //   adagrad u' = u + s; adam u' = beta2*u + (1-beta2)*s; yogi u' = u - ((1-beta2)*s)*sign(u - s);
  //   model' = model + (zeta*v') / (sqrt(u') + tau)
  void (*outer_adagrad)(const OuterArrays& a, const OuterCoefficients& c, size_t n);
  void (*outer_adam)(const OuterArrays& a, const OuterCoefficients& c, size_t n);
  void (*outer_yogi)(const OuterArrays& a, const OuterCoefficients& c, size_t n);

  // bfloat16 and binary16, round to nearest even; NaN stays a quiet NaN; too large becomes infinity.
  void (*bf16_encode)(uint16_t* out, const float* x, size_t n);
  void (*bf16_decode)(float* out, const uint16_t* x, size_t n);
  void (*fp16_encode)(uint16_t* out, const float* x, size_t n);
  void (*fp16_decode)(float* out, const uint16_t* x, size_t n);
  // Per block of kInt8BlockElements: scale = max|x| / 127; q = clamp(round(x / scale)), ties to even; a block of zeros
  // has scale 0. x is finite; the largest float itself decodes to infinity. `scales` has ceil(n / 256) elements.
  void (*int8_encode)(float* scales, int8_t* q, const float* x, size_t n);
  // out = scale * q.
  void (*int8_decode)(float* out, const float* scales, const int8_t* q, size_t n);
};

}  // namespace bmuf

#endif  // BMUF_CORE_KERNELS_TABLE_H_
