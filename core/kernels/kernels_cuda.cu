#include <cuda_runtime.h>

#include "core/kernels/kernels_cuda.h"

namespace bmuf::cuda {
namespace {

constexpr unsigned kThreads = 256;
// Enough blocks to fill any device; each thread then walks with the grid's stride.
constexpr size_t kMaxBlocks = 32768;

// Runs body(i) for every element. Bodies are plain structs: what they capture is what the device gets.
template <typename Body>
__global__ void ForEach(Body body, size_t n) {
  const size_t stride = static_cast<size_t>(gridDim.x) * blockDim.x;
  for (size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += stride) body(i);
}

template <typename Body>
int Launch(const Body& body, size_t n, void* stream) {
  if (n == 0) return 0;
  const size_t blocks = (n + kThreads - 1) / kThreads;
  ForEach<<<static_cast<unsigned>(blocks < kMaxBlocks ? blocks : kMaxBlocks), kThreads, 0,
            static_cast<cudaStream_t>(stream)>>>(body, n);
  return static_cast<int>(cudaGetLastError());
}

struct AccumulateBody {
  double* sum;
  const float* delta;
  double weight;
  __device__ void operator()(size_t i) const {
    constexpr double kMagic = 98304.0;  // 1.5 * 2^16, see loops.inc.
    const double p = weight * static_cast<double>(delta[i]);
    sum[i] += (p + kMagic) - kMagic;
  }
};

struct MeanBody {
  float* out;
  const double* sum;
  double total_weight;
  __device__ void operator()(size_t i) const { out[i] = static_cast<float>(sum[i] / total_weight); }
};

struct SubtractBody {
  float* out;
  const float* a;
  const float* b;
  __device__ void operator()(size_t i) const { out[i] = a[i] - b[i]; }
};

struct AddBody {
  float* out;
  const float* a;
  const float* b;
  __device__ void operator()(size_t i) const { out[i] = a[i] + b[i]; }
};

struct MomentumBody {
  OuterArrays a;
  OuterCoefficients c;
  __device__ void operator()(size_t i) const {
    const float v = c.eta * (c.rescale * a.v_in[i]) + c.zeta * a.mean[i];
    a.v_out[i] = v;
    a.model_out[i] = a.model_in[i] + c.gain * v;
  }
};

struct NesterovBody {
  OuterArrays a;
  OuterCoefficients c;
  __device__ void operator()(size_t i) const {
    const float v = c.eta * (c.rescale * a.v_in[i]) + c.zeta * a.mean[i];
    const float model = a.model_in[i] + v;
    a.v_out[i] = v;
    a.model_out[i] = model;
    a.broadcast_out[i] = model + c.eta * v;
  }
};

struct Caffe2NesterovBody {
  OuterArrays a;
  OuterCoefficients c;
  __device__ void operator()(size_t i) const {
    const float before = c.rescale * a.v_in[i];
    const float v = c.eta * before + c.zeta * a.mean[i];
    a.v_out[i] = v;
    a.model_out[i] = (a.model_in[i] + v) - c.eta * (v - before);
  }
};

struct AdagradMoment {
  static __device__ float Next(const OuterCoefficients&, float u, float square) { return u + square; }
};
struct AdamMoment {
  static __device__ float Next(const OuterCoefficients& c, float u, float square) {
    return c.beta2 * u + c.one_minus_beta2 * square;
  }
};
struct YogiMoment {
  static __device__ float Next(const OuterCoefficients& c, float u, float square) {
    const float difference = u - square;
    const float sign = difference > 0 ? 1.0f : difference < 0 ? -1.0f : 0.0f;
    return u - (c.one_minus_beta2 * square) * sign;
  }
};

template <typename Moment>
struct AdaptiveBody {
  OuterArrays a;
  OuterCoefficients c;
  __device__ void operator()(size_t i) const {
    const float d = a.mean[i];
    const float m = c.beta1 * a.v_in[i] + c.one_minus_beta1 * d;
    const float u = Moment::Next(c, a.u_in[i], d * d);
    a.v_out[i] = m;
    a.u_out[i] = u;
    a.model_out[i] = a.model_in[i] + (c.zeta * m) / (sqrtf(u) + c.tau);
  }
};

struct Bf16EncodeBody {
  uint16_t* out;
  const float* x;
  __device__ void operator()(size_t i) const {
    const uint32_t bits = __float_as_uint(x[i]);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const uint32_t quiet = (bits >> 16) | 0x40u;
    out[i] = static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
  }
};

struct Bf16DecodeBody {
  float* out;
  const uint16_t* x;
  __device__ void operator()(size_t i) const { out[i] = __uint_as_float(static_cast<uint32_t>(x[i]) << 16); }
};

}  // namespace

const char* WhyUnusable() {
  int count = 0;
  const cudaError_t code = cudaGetDeviceCount(&count);
  if (code != cudaSuccess) return cudaGetErrorString(code);
  return count > 0 ? nullptr : cudaGetErrorString(cudaErrorNoDevice);
}

const char* ErrorText(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }

int Accumulate(double* sum, const float* delta, double weight, size_t n, void* stream) {
  return Launch(AccumulateBody{sum, delta, weight}, n, stream);
}
int Mean(float* out, const double* sum, double total_weight, size_t n, void* stream) {
  return Launch(MeanBody{out, sum, total_weight}, n, stream);
}
int Subtract(float* out, const float* a, const float* b, size_t n, void* stream) {
  return Launch(SubtractBody{out, a, b}, n, stream);
}
int Add(float* out, const float* a, const float* b, size_t n, void* stream) {
  return Launch(AddBody{out, a, b}, n, stream);
}
int OuterMomentum(const OuterArrays& a, const OuterCoefficients& c, size_t n, void* stream) {
  return Launch(MomentumBody{a, c}, n, stream);
}
int OuterNesterov(const OuterArrays& a, const OuterCoefficients& c, size_t n, void* stream) {
  return Launch(NesterovBody{a, c}, n, stream);
}
int OuterCaffe2Nesterov(const OuterArrays& a, const OuterCoefficients& c, size_t n, void* stream) {
  return Launch(Caffe2NesterovBody{a, c}, n, stream);
}
int OuterAdagrad(const OuterArrays& a, const OuterCoefficients& c, size_t n, void* stream) {
  return Launch(AdaptiveBody<AdagradMoment>{a, c}, n, stream);
}
int OuterAdam(const OuterArrays& a, const OuterCoefficients& c, size_t n, void* stream) {
  return Launch(AdaptiveBody<AdamMoment>{a, c}, n, stream);
}
int OuterYogi(const OuterArrays& a, const OuterCoefficients& c, size_t n, void* stream) {
  return Launch(AdaptiveBody<YogiMoment>{a, c}, n, stream);
}
int Bf16Encode(uint16_t* out, const float* x, size_t n, void* stream) {
  return Launch(Bf16EncodeBody{out, x}, n, stream);
}
int Bf16Decode(float* out, const uint16_t* x, size_t n, void* stream) {
  return Launch(Bf16DecodeBody{out, x}, n, stream);
}

}  // namespace bmuf::cuda
