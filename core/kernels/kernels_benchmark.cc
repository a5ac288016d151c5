// Kernels against the machine's memory: how close each loop comes to a STREAM triad of the same run.
//
// bazel run -c opt //core/kernels:kernels_benchmark -- --benchmark_repetitions=5 \
//     --benchmark_enable_random_interleaving=true --benchmark_report_aggregates_only=true
//
// bytes_per_second counts every byte a loop reads or writes once. Arrays are far larger than a cache. Each loop runs in
// every instruction set of the machine; the triad is a[i] = b[i] + s * c[i] on floats.
#include <benchmark/benchmark.h>

#include <cstdint>
#include <string>
#include <vector>

#include "core/base/aligned_buffer.h"
#include "core/kernels/kernels.h"

namespace bmuf {
namespace {

constexpr size_t kElements = size_t{1} << 23;

AlignedBuffer<float> Numbers(float scale) {
  AlignedBuffer<float> x = AlignedBuffer<float>::Uninitialized(kElements);
  for (size_t i = 0; i < kElements; ++i) x[i] = scale * (static_cast<float>(i % 1021) - 510.0f);
  return x;
}

void Count(benchmark::State& state, size_t bytes_per_element) {
  state.SetBytesProcessed(static_cast<int64_t>(state.iterations() * kElements * bytes_per_element));
}

__attribute__((optimize("O3"), target_clones("avx512f", "avx2", "default"))) void TriadLoop(float* __restrict a,
                                                                                            const float* __restrict b,
                                                                                            const float* __restrict c,
                                                                                            float s, size_t n) {
  for (size_t i = 0; i < n; ++i) a[i] = b[i] + s * c[i];
}

void Triad(benchmark::State& state) {
  AlignedBuffer<float> a(kElements);
  const AlignedBuffer<float> b = Numbers(1), c = Numbers(2);
  for (auto _ : state) {
    TriadLoop(a.data(), b.data(), c.data(), 0.5f, kElements);
    benchmark::ClobberMemory();
  }
  Count(state, 12);
}

void Accumulate(benchmark::State& state, const Kernels* kernels) {
  AlignedBuffer<double> sum(kElements);
  const AlignedBuffer<float> delta = Numbers(1e-5f);
  for (auto _ : state) {
    kernels->accumulate(sum.data(), delta.data(), 1e-3, kElements);
    benchmark::ClobberMemory();
  }
  Count(state, 20);
}

void Mean(benchmark::State& state, const Kernels* kernels) {
  const AlignedBuffer<double> sum(kElements);
  AlignedBuffer<float> out(kElements);
  for (auto _ : state) {
    kernels->mean(out.data(), sum.data(), 3.0, kElements);
    benchmark::ClobberMemory();
  }
  Count(state, 12);
}

// One block update; `passes` = arrays read or written.
void Outer(benchmark::State& state, void (*update)(const OuterArrays&, const OuterCoefficients&, size_t),
           size_t passes) {
  const AlignedBuffer<float> mean = Numbers(1e-5f), model = Numbers(1e-3f), v = Numbers(1e-4f);
  AlignedBuffer<float> u_in(kElements), model_out(kElements), v_out(kElements), u_out(kElements), broadcast(kElements);
  OuterArrays a;
  a.mean = mean.data();
  a.model_in = model.data();
  a.model_out = model_out.data();
  a.v_in = v.data();
  a.v_out = v_out.data();
  a.u_in = u_in.data();
  a.u_out = u_out.data();
  a.broadcast_out = broadcast.data();
  OuterCoefficients c;
  c.zeta = 0.7f;
  c.eta = 0.9f;
  for (auto _ : state) {
    update(a, c, kElements);
    benchmark::ClobberMemory();
  }
  Count(state, 4 * passes);
}

void Scan(benchmark::State& state, const Kernels* kernels) {
  const AlignedBuffer<float> x = Numbers(1e-3f);
  for (auto _ : state) benchmark::DoNotOptimize(kernels->first_non_finite(x.data(), kElements));
  Count(state, 4);
}

void SumOfSquares(benchmark::State& state, const Kernels* kernels) {
  const AlignedBuffer<float> x = Numbers(1e-3f);
  for (auto _ : state) benchmark::DoNotOptimize(kernels->sum_of_squares(x.data(), kElements));
  Count(state, 4);
}

void Half(benchmark::State& state, void (*encode)(uint16_t*, const float*, size_t)) {
  const AlignedBuffer<float> x = Numbers(1e-3f);
  AlignedBuffer<uint16_t> out(kElements);
  for (auto _ : state) {
    encode(out.data(), x.data(), kElements);
    benchmark::ClobberMemory();
  }
  Count(state, 6);
}

void FromHalf(benchmark::State& state, void (*decode)(float*, const uint16_t*, size_t)) {
  const AlignedBuffer<uint16_t> x(kElements);
  AlignedBuffer<float> out(kElements);
  for (auto _ : state) {
    decode(out.data(), x.data(), kElements);
    benchmark::ClobberMemory();
  }
  Count(state, 6);
}

void Int8Encode(benchmark::State& state, const Kernels* kernels) {
  const AlignedBuffer<float> x = Numbers(1e-3f);
  AlignedBuffer<float> scales(kElements / kInt8BlockElements);
  AlignedBuffer<int8_t> q(kElements);
  for (auto _ : state) {
    kernels->int8_encode(scales.data(), q.data(), x.data(), kElements);
    benchmark::ClobberMemory();
  }
  Count(state, 5);
}

void Int8Decode(benchmark::State& state, const Kernels* kernels) {
  const AlignedBuffer<float> scales(kElements / kInt8BlockElements);
  const AlignedBuffer<int8_t> q(kElements);
  AlignedBuffer<float> out(kElements);
  for (auto _ : state) {
    kernels->int8_decode(out.data(), scales.data(), q.data(), kElements);
    benchmark::ClobberMemory();
  }
  Count(state, 5);
}

void RegisterAll() {
  benchmark::RegisterBenchmark("triad", Triad);
  for (const Kernels* k : AvailableKernels()) {
    const auto add = [k](const char* what, auto body, auto... arguments) {
      benchmark::RegisterBenchmark((std::string(what) + "/" + k->name).c_str(),
                                   [=](benchmark::State& state) { body(state, arguments...); });
    };
    add("accumulate", Accumulate, k);
    add("mean", Mean, k);
    add("outer_momentum", Outer, k->outer_momentum, size_t{5});
    add("outer_nesterov", Outer, k->outer_nesterov, size_t{6});
    add("outer_adam", Outer, k->outer_adam, size_t{7});
    add("first_non_finite", Scan, k);
    add("sum_of_squares", SumOfSquares, k);
    add("bf16_encode", Half, k->bf16_encode);
    add("bf16_decode", FromHalf, k->bf16_decode);
    add("fp16_encode", Half, k->fp16_encode);
    add("fp16_decode", FromHalf, k->fp16_decode);
    add("int8_encode", Int8Encode, k);
    add("int8_decode", Int8Decode, k);
  }
}

}  // namespace
}  // namespace bmuf

int main(int argc, char** argv) {
  bmuf::RegisterAll();
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
