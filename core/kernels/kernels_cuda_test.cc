// The device's bits against the scalar kernels'. Skips, saying why, where there is no device or no toolkit.
#include "gtest/gtest.h"

#ifndef BMUF_HAVE_CUDA

TEST(KernelsCuda, NeedsTheToolkit) { GTEST_SKIP() << "SKIPPED: built without the CUDA toolkit"; }

#else

#include <cuda_runtime.h>

#include <cmath>
#include <cstring>
#include <iterator>
#include <limits>
#include <random>
#include <vector>

#include "core/kernels/kernels.h"
#include "core/kernels/kernels_cuda.h"

namespace bmuf {
namespace {

// A device array; thread-compatible. Allocation and copies fail the test that runs.
template <typename T>
class DeviceArray {
 public:
  explicit DeviceArray(const std::vector<T>& host) : size_(host.size()) {
    EXPECT_EQ(cudaMalloc(reinterpret_cast<void**>(&data_), (size_ + 1) * sizeof(T)), cudaSuccess);
    EXPECT_EQ(cudaMemcpy(data_, host.data(), size_ * sizeof(T), cudaMemcpyHostToDevice), cudaSuccess);
  }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  ~DeviceArray() { cudaFree(data_); }

  T* data() { return data_; }
  std::vector<T> ToHost() const {
    std::vector<T> host(size_);
    EXPECT_EQ(cudaMemcpy(host.data(), data_, size_ * sizeof(T), cudaMemcpyDeviceToHost), cudaSuccess);
    return host;
  }

 private:
  T* data_ = nullptr;
  size_t size_;
};

// Equal bytes, any NaN equal to any other.
template <typename T>
void ExpectSame(const std::vector<T>& want, const std::vector<T>& got) {
  ASSERT_EQ(want.size(), got.size());
  for (size_t i = 0; i < want.size(); ++i) {
    if (want[i] != want[i] && got[i] != got[i]) continue;
    ASSERT_EQ(std::memcmp(&want[i], &got[i], sizeof(T)), 0)
        << "element " << i << ": " << want[i] << " is not " << got[i];
  }
}

std::vector<float> Numbers(size_t n, uint32_t seed) {
  const float special[] = {0.0f,
                           -0.0f,
                           1e-42f,
                           -1e-40f,
                           3.4e38f,
                           std::numeric_limits<float>::infinity(),
                           -std::numeric_limits<float>::infinity(),
                           std::numeric_limits<float>::quiet_NaN()};
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> x(n);
  for (float& value : x) {
    value = random() % 8 == 0 ? special[random() % std::size(special)]
                              : std::ldexp(normal(random), static_cast<int>(random() % 24) - 20);
  }
  return x;
}

class KernelsCudaTest : public testing::TestWithParam<size_t> {
 protected:
  void SetUp() override {
    if (const char* why = cuda::WhyUnusable()) GTEST_SKIP() << "SKIPPED: no usable CUDA device: " << why;
  }
  const Kernels& scalar_ = ScalarKernels();
  const size_t n_ = GetParam();
};

INSTANTIATE_TEST_SUITE_P(Lengths, KernelsCudaTest, testing::Values(0, 1, 255, 257, 100003, (size_t{1} << 24) + 5));

TEST_P(KernelsCudaTest, AccumulateAndMeanGiveTheScalarBits) {
  const std::vector<float> delta = Numbers(n_, 1);
  std::vector<double> want(n_, 0.125);
  DeviceArray<double> sum(want);
  DeviceArray<float> device_delta(delta);
  for (const double weight : {1.0, 0.37}) {
    scalar_.accumulate(want.data(), delta.data(), weight, n_);
    ASSERT_EQ(cuda::Accumulate(sum.data(), device_delta.data(), weight, n_, nullptr), 0);
  }
  ExpectSame(want, sum.ToHost());
  std::vector<float> want_mean(n_);
  DeviceArray<float> mean(want_mean);
  scalar_.mean(want_mean.data(), want.data(), 1.37, n_);
  ASSERT_EQ(cuda::Mean(mean.data(), sum.data(), 1.37, n_, nullptr), 0);
  ExpectSame(want_mean, mean.ToHost());
}

TEST_P(KernelsCudaTest, SumAndDifferenceGiveTheScalarBits) {
  const std::vector<float> a = Numbers(n_, 2), b = Numbers(n_, 3);
  std::vector<float> want(n_);
  DeviceArray<float> device_a(a), device_b(b), out(want);
  scalar_.add(want.data(), a.data(), b.data(), n_);
  ASSERT_EQ(cuda::Add(out.data(), device_a.data(), device_b.data(), n_, nullptr), 0);
  ExpectSame(want, out.ToHost());
  scalar_.subtract(want.data(), a.data(), b.data(), n_);
  ASSERT_EQ(cuda::Subtract(out.data(), device_a.data(), device_b.data(), n_, nullptr), 0);
  ExpectSame(want, out.ToHost());
}

TEST_P(KernelsCudaTest, OuterUpdatesGiveTheScalarBits) {
  using Host = void (*)(const OuterArrays&, const OuterCoefficients&, size_t);
  using Device = int (*)(const OuterArrays&, const OuterCoefficients&, size_t, void*);
  const std::pair<Host, Device> updates[] = {{scalar_.outer_momentum, cuda::OuterMomentum},
                                             {scalar_.outer_nesterov, cuda::OuterNesterov},
                                             {scalar_.outer_caffe2_nesterov, cuda::OuterCaffe2Nesterov},
                                             {scalar_.outer_adagrad, cuda::OuterAdagrad},
                                             {scalar_.outer_adam, cuda::OuterAdam},
                                             {scalar_.outer_yogi, cuda::OuterYogi}};
  OuterCoefficients c;
  c.zeta = 0.7f;
  c.eta = 0.9f;
  c.gain = 1.9f;
  c.rescale = 0.77f;
  c.beta1 = 0.9f;
  c.one_minus_beta1 = 0.1f;
  c.beta2 = 0.99f;
  c.one_minus_beta2 = 0.01f;
  std::vector<float> mean = Numbers(n_, 4), model = Numbers(n_, 5), v = Numbers(n_, 6), u = Numbers(n_, 7);
  DeviceArray<float> device_mean(mean), device_model(model), device_v(v), device_u(u);
  for (const auto& [host, device] : updates) {
    std::vector<float> model_out(n_), v_out(n_), u_out(n_), broadcast(n_);
    DeviceArray<float> device_model_out(model_out), device_v_out(v_out), device_u_out(u_out),
        device_broadcast(broadcast);
    host(
        {mean.data(), model.data(), model_out.data(), v.data(), v_out.data(), u.data(), u_out.data(), broadcast.data()},
        c, n_);
    ASSERT_EQ(device({device_mean.data(), device_model.data(), device_model_out.data(), device_v.data(),
                      device_v_out.data(), device_u.data(), device_u_out.data(), device_broadcast.data()},
                     c, n_, nullptr),
              0);
    ExpectSame(model_out, device_model_out.ToHost());
    ExpectSame(v_out, device_v_out.ToHost());
    ExpectSame(u_out, device_u_out.ToHost());
    ExpectSame(broadcast, device_broadcast.ToHost());
  }
}

TEST_P(KernelsCudaTest, Bfloat16GivesTheScalarBits) {
  const std::vector<float> x = Numbers(n_, 8);
  std::vector<uint16_t> want(n_);
  std::vector<float> want_back(n_);
  DeviceArray<float> device_x(x), back(want_back);
  DeviceArray<uint16_t> out(want);
  scalar_.bf16_encode(want.data(), x.data(), n_);
  ASSERT_EQ(cuda::Bf16Encode(out.data(), device_x.data(), n_, nullptr), 0);
  ExpectSame(want, out.ToHost());
  scalar_.bf16_decode(want_back.data(), want.data(), n_);
  ASSERT_EQ(cuda::Bf16Decode(back.data(), out.data(), n_, nullptr), 0);
  ExpectSame(want_back, back.ToHost());
}

}  // namespace
}  // namespace bmuf

#endif  // BMUF_HAVE_CUDA
