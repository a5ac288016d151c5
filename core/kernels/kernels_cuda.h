// The kernels of table.h on an NVIDIA device, for workers whose model never leaves it.
//
// Problem: a node with GPUs should fold, average and encode where the numbers are.
// Idea: one thread per element does the same IEEE operations in the same order as the scalar loop (compiled without
// contraction; division and square root are correctly rounded on the device), so the bits are the same.
// Usage: if (const int code = cuda::Accumulate(sum, delta, weight, n, stream)) return cuda::ErrorText(code);
//
// All functions: pointers are device memory aligned for their element type; contracts as in table.h. They enqueue on
// `stream` (a cudaStream_t, null for the default one) and do not wait; inputs and outputs belong to the caller until
// the stream has passed them. Thread-safe for distinct arrays. They return 0 or the runtime's error code, after which
// outputs are unspecified; faults of the device itself show at the stream's next synchronisation.
// Without a CUDA toolkit this library is empty: guard its use with BMUF_HAVE_CUDA.
#ifndef BMUF_CORE_KERNELS_KERNELS_CUDA_H_
#define BMUF_CORE_KERNELS_KERNELS_CUDA_H_

#include <cstddef>
#include <cstdint>

#include "core/kernels/table.h"

namespace bmuf::cuda {

// Why no device can be used ("no CUDA-capable device is detected", ...), null if one can. Static text. May take a
// second on the first call (the driver starts).
const char* WhyUnusable();
// The runtime's text for a code that a function below returned. Static text.
const char* ErrorText(int code);

int Accumulate(double* sum, const float* delta, double weight, size_t n, void* stream);
int Mean(float* out, const double* sum, double total_weight, size_t n, void* stream);
int Subtract(float* out, const float* a, const float* b, size_t n, void* stream);
// Also the averaging update: model' = model + mean.
int Add(float* out, const float* a, const float* b, size_t n, void* stream);

int OuterMomentum(const OuterArrays& a, const OuterCoefficients& c, size_t n, void* stream);
int OuterNesterov(const OuterArrays& a, const OuterCoefficients& c, size_t n, void* stream);
int OuterCaffe2Nesterov(const OuterArrays& a, const OuterCoefficients& c, size_t n, void* stream);
int OuterAdagrad(const OuterArrays& a, const OuterCoefficients& c, size_t n, void* stream);
int OuterAdam(const OuterArrays& a, const OuterCoefficients& c, size_t n, void* stream);
int OuterYogi(const OuterArrays& a, const OuterCoefficients& c, size_t n, void* stream);

int Bf16Encode(uint16_t* out, const float* x, size_t n, void* stream);
int Bf16Decode(float* out, const uint16_t* x, size_t n, void* stream);

}  // namespace bmuf::cuda

#endif  // BMUF_CORE_KERNELS_KERNELS_CUDA_H_
