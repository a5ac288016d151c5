#include "core/kernels/kernels.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace bmuf {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

uint32_t Bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}
uint64_t Bits(double x) {
  uint64_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}
float FromBits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

// Equal bits; any NaN equals any other, for IEEE leaves open which operand's NaN comes out.
bool Same(float a, float b) { return Bits(a) == Bits(b) || (std::isnan(a) && std::isnan(b)); }
bool Same(double a, double b) { return Bits(a) == Bits(b) || (std::isnan(a) && std::isnan(b)); }
bool Same(uint16_t a, uint16_t b) { return a == b; }
bool Same(int8_t a, int8_t b) { return a == b; }

template <typename T>
testing::AssertionResult AllSame(const std::vector<T>& want, const std::vector<T>& got) {
  if (want.size() != got.size()) return testing::AssertionFailure() << "sizes differ";
  for (size_t i = 0; i < want.size(); ++i) {
    if (!Same(want[i], got[i])) {
      return testing::AssertionFailure() << "element " << i << " of " << want.size() << ": " << +want[i] << " is not "
                                         << +got[i];
    }
  }
  return testing::AssertionSuccess();
}

// Ordinary numbers of many magnitudes.
std::vector<float> Ordinary(size_t n, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> mantissa;
  std::uniform_int_distribution<int> exponent(-20, 4);
  std::vector<float> x(n);
  for (float& value : x) value = std::ldexp(mantissa(random), exponent(random));
  return x;
}

// Every kind of float: zeros, denormals, the largest, infinities, NaN of several payloads, and any bits at all.
std::vector<float> Wild(size_t n, uint32_t seed) {
  const float special[] = {0.0f,
                           -0.0f,
                           1.0f,
                           -1.0f,
                           FromBits(1),
                           FromBits(0x80000001u),
                           1e-40f,
                           -1e-40f,
                           kInfinity,
                           -kInfinity,
                           kNaN,
                           FromBits(0xffc00001u),
                           3.4e38f,
                           -3.4e38f,
                           65504.0f,
                           65519.9f,
                           65520.0f,
                           6.1e-5f,
                           5.96e-8f,
                           2.98e-8f,
                           1.17549e-38f,
                           FromBits(0x7f800001u),
                           FromBits(0x7fa00000u),
                           1e30f};
  std::mt19937 random(seed);
  std::vector<float> x(n);
  for (float& value : x) {
    value = random() % 3 == 0 ? FromBits(static_cast<uint32_t>(random())) : special[random() % std::size(special)];
  }
  return x;
}

const size_t kLengths[] = {0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 63, 65, 255, 256, 257, 1023, 4095, 4097, 8200};

// Lengths around every vector width, starts that no vector width divides, ordinary and wild numbers.
void ForEachInput(const std::function<void(size_t n, size_t shift, bool wild)>& body) {
  for (const size_t n : kLengths) {
    for (const size_t shift : {0, 1, 3}) {
      for (const bool wild : {false, true}) {
        SCOPED_TRACE(testing::Message() << "n=" << n << " shift=" << shift << (wild ? " wild" : " ordinary"));
        body(n, shift, wild);
      }
    }
  }
}

std::vector<float> Input(size_t n, bool wild, uint32_t seed) { return wild ? Wild(n, seed) : Ordinary(n, seed); }

class KernelsTest : public testing::TestWithParam<const Kernels*> {
 protected:
  const Kernels& scalar_ = ScalarKernels();
  const Kernels& kernels_ = *GetParam();
};

INSTANTIATE_TEST_SUITE_P(Available, KernelsTest, testing::ValuesIn(AvailableKernels()),
                         [](const auto& info) { return std::string(info.param->name); });

TEST(KernelChoice, NamesWhatTheMachineRuns) {
  for (const Kernels* kernels : AvailableKernels()) {
    const auto found = KernelsByName(kernels->name);
    ASSERT_TRUE(found.ok()) << found.status();
    EXPECT_EQ(*found, kernels);
  }
  EXPECT_STREQ(AvailableKernels().front()->name, "scalar");
  EXPECT_EQ(*KernelsByName("auto"), AvailableKernels().back());
  EXPECT_EQ(&ScalarKernels(), *KernelsByName("scalar"));
}

TEST(KernelChoice, RefusesAnUnknownName) {
  EXPECT_EQ(KernelsByName("sse9").status().code(), absl::StatusCode::kInvalidArgument);
  for (const char* name : {"avx2", "avx512"}) {
    const auto found = KernelsByName(name);
    if (!found.ok()) {
      EXPECT_EQ(found.status().code(), absl::StatusCode::kFailedPrecondition);
    }
  }
}

// ---------------------------------------------------------------------------------------------- the bits of the scalar

TEST_P(KernelsTest, AccumulateGivesTheScalarBits) {
  ForEachInput([&](size_t n, size_t shift, bool wild) {
    const std::vector<float> delta = Input(n + shift, wild, 1);
    std::vector<double> want(n + shift, 0.25), got = want;
    for (const double weight : {1.0, 0.3, 17.0}) {
      scalar_.accumulate(want.data() + shift, delta.data() + shift, weight, n);
      kernels_.accumulate(got.data() + shift, delta.data() + shift, weight, n);
    }
    EXPECT_TRUE(AllSame(want, got));
  });
}

TEST_P(KernelsTest, MeanGivesTheScalarBits) {
  ForEachInput([&](size_t n, size_t shift, bool wild) {
    const std::vector<float> numbers = Input(n + shift, wild, 2);
    const std::vector<double> sum(numbers.begin(), numbers.end());
    std::vector<float> want(n + shift), got(n + shift);
    for (const double weight : {1.0, 3.0, 0.7, 1e-300}) {
      scalar_.mean(want.data() + shift, sum.data() + shift, weight, n);
      kernels_.mean(got.data() + shift, sum.data() + shift, weight, n);
      EXPECT_TRUE(AllSame(want, got));
    }
  });
}

TEST_P(KernelsTest, ScansGiveTheScalarBits) {
  ForEachInput([&](size_t n, size_t shift, bool wild) {
    const std::vector<float> numbers = Input(n + shift, wild, 3);
    const float* x = numbers.data() + shift;
    EXPECT_EQ(scalar_.first_non_finite(x, n), kernels_.first_non_finite(x, n));
    EXPECT_TRUE(Same(scalar_.max_abs(x, n), kernels_.max_abs(x, n)));
    EXPECT_TRUE(Same(scalar_.sum_of_squares(x, n), kernels_.sum_of_squares(x, n)));
  });
}

TEST_P(KernelsTest, SumAndDifferenceGiveTheScalarBits) {
  ForEachInput([&](size_t n, size_t shift, bool wild) {
    const std::vector<float> a = Input(n + shift, wild, 4), b = Input(n + shift, wild, 5);
    std::vector<float> want(n + shift), got(n + shift);
    scalar_.add(want.data() + shift, a.data() + shift, b.data() + shift, n);
    kernels_.add(got.data() + shift, a.data() + shift, b.data() + shift, n);
    EXPECT_TRUE(AllSame(want, got));
    scalar_.subtract(want.data() + shift, a.data() + shift, b.data() + shift, n);
    kernels_.subtract(got.data() + shift, a.data() + shift, b.data() + shift, n);
    EXPECT_TRUE(AllSame(want, got));
    got = a;  // Onto itself.
    kernels_.subtract(got.data() + shift, got.data() + shift, b.data() + shift, n);
    EXPECT_TRUE(AllSame(std::vector<float>(want.begin() + shift, want.end()),
                        std::vector<float>(got.begin() + shift, got.end())));
  });
}

TEST_P(KernelsTest, OuterUpdatesGiveTheScalarBits) {
  using Update = void (*Kernels::*)(const OuterArrays&, const OuterCoefficients&, size_t);
  const Update updates[] = {&Kernels::outer_momentum, &Kernels::outer_nesterov, &Kernels::outer_caffe2_nesterov,
                            &Kernels::outer_adagrad,  &Kernels::outer_adam,     &Kernels::outer_yogi};
  OuterCoefficients c;
  c.zeta = 0.7f;
  c.eta = 0.9f;
  c.gain = 1.9f;
  c.rescale = 0.77f;
  c.beta1 = 0.9f;
  c.one_minus_beta1 = 0.1f;
  c.beta2 = 0.99f;
  c.one_minus_beta2 = 0.01f;
  ForEachInput([&](size_t n, size_t shift, bool wild) {
    const std::vector<float> mean = Input(n + shift, wild, 6), model = Input(n + shift, wild, 7),
                             v = Input(n + shift, wild, 8), u = Input(n + shift, wild, 9);
    for (const Update update : updates) {
      struct Result {
        std::vector<float> model, v, u, broadcast;
      };
      const auto run = [&](const Kernels& kernels, bool in_place) {
        Result r{model, v, u, std::vector<float>(n + shift)};
        const auto source = [&](const std::vector<float>& own, const std::vector<float>& result) {
          return (in_place ? result : own).data() + shift;
        };
        OuterArrays a;
        a.mean = mean.data() + shift;
        a.model_in = source(model, r.model);
        a.model_out = r.model.data() + shift;
        a.v_in = source(v, r.v);
        a.v_out = r.v.data() + shift;
        a.u_in = source(u, r.u);
        a.u_out = r.u.data() + shift;
        a.broadcast_out = r.broadcast.data() + shift;
        (kernels.*update)(a, c, n);
        return r;
      };
      const Result want = run(scalar_, false);
      for (const bool in_place : {false, true}) {
        const Result got = run(kernels_, in_place);
        EXPECT_TRUE(AllSame(want.model, got.model));
        EXPECT_TRUE(AllSame(want.v, got.v));
        EXPECT_TRUE(AllSame(want.u, got.u));
        EXPECT_TRUE(AllSame(want.broadcast, got.broadcast));
      }
    }
  });
}

TEST_P(KernelsTest, ConversionsGiveTheScalarBits) {
  ForEachInput([&](size_t n, size_t shift, bool wild) {
    const std::vector<float> numbers = Input(n + shift, wild, 10);
    const float* x = numbers.data() + shift;
    std::vector<uint16_t> want(n + shift), got(n + shift);
    std::vector<float> want_back(n + shift), got_back(n + shift);
    scalar_.bf16_encode(want.data() + shift, x, n);
    kernels_.bf16_encode(got.data() + shift, x, n);
    EXPECT_TRUE(AllSame(want, got));
    scalar_.bf16_decode(want_back.data() + shift, want.data() + shift, n);
    kernels_.bf16_decode(got_back.data() + shift, want.data() + shift, n);
    EXPECT_TRUE(AllSame(want_back, got_back));
    scalar_.fp16_encode(want.data() + shift, x, n);
    kernels_.fp16_encode(got.data() + shift, x, n);
    EXPECT_TRUE(AllSame(want, got));
    scalar_.fp16_decode(want_back.data() + shift, want.data() + shift, n);
    kernels_.fp16_decode(got_back.data() + shift, want.data() + shift, n);
    EXPECT_TRUE(AllSame(want_back, got_back));
  });
}

TEST_P(KernelsTest, Int8GivesTheScalarBits) {
  ForEachInput([&](size_t n, size_t shift, bool wild) {
    std::vector<float> numbers = Input(n + shift, wild, 11);
    for (float& value : numbers) {
      if (!std::isfinite(value)) value = 1e-42f;
    }
    const float* x = numbers.data() + shift;
    const size_t blocks = (n + kInt8BlockElements - 1) / kInt8BlockElements;
    std::vector<float> want_scales(blocks), got_scales(blocks), want_back(n + shift), got_back(n + shift);
    std::vector<int8_t> want(n + shift), got(n + shift);
    scalar_.int8_encode(want_scales.data(), want.data() + shift, x, n);
    kernels_.int8_encode(got_scales.data(), got.data() + shift, x, n);
    EXPECT_TRUE(AllSame(want_scales, got_scales));
    EXPECT_TRUE(AllSame(want, got));
    scalar_.int8_decode(want_back.data() + shift, want_scales.data(), want.data() + shift, n);
    kernels_.int8_decode(got_back.data() + shift, want_scales.data(), want.data() + shift, n);
    EXPECT_TRUE(AllSame(want_back, got_back));
  });
}

// ------------------------------------------------------------------------------------------- what the definition says

TEST_P(KernelsTest, AccumulateRoundsToTheGridTiesToEven) {
  const double grid = std::ldexp(1.0, -36);
  const std::vector<std::pair<double, double>> cases = {// In units of the grid.
                                                        {0, 0},
                                                        {0.25, 0},
                                                        {0.5, 0},
                                                        {0.75, 1},
                                                        {1, 1},
                                                        {1.5, 2},
                                                        {2.5, 2},
                                                        {-0.5, 0},
                                                        {-1.5, -2},
                                                        {-2.5, -2},
                                                        {-2.75, -3},
                                                        {1023, 1023},
                                                        {1e-9, 0},
                                                        {std::ldexp(1.0, 51), std::ldexp(1.0, 51)},
                                                        {-std::ldexp(1.0, 51), -std::ldexp(1.0, 51)}};
  for (const auto& [in, want] : cases) {
    // The weight carries the grid, so that the float holds the number exactly.
    const std::vector<float> delta(9, static_cast<float>(in));
    std::vector<double> sum(9, 0.0);
    kernels_.accumulate(sum.data(), delta.data(), grid, sum.size());
    for (const double got : sum) EXPECT_EQ(got, static_cast<double>(static_cast<float>(want)) * grid) << in;
  }
}

TEST_P(KernelsTest, AccumulateDoesNotDependOnTheOrder) {
  constexpr size_t kN = 67;
  const double weights[] = {1.0, 0.37, 12.5, 3e-3};
  std::vector<std::vector<float>> deltas;
  for (uint32_t k = 0; k < 4; ++k) deltas.push_back(Ordinary(kN, 20 + k));
  std::vector<size_t> order = {0, 1, 2, 3};
  std::vector<double> first;
  do {
    std::vector<double> sum(kN, 0.0);
    for (const size_t k : order) kernels_.accumulate(sum.data(), deltas[k].data(), weights[k], kN);
    if (first.empty()) first = sum;
    ASSERT_TRUE(AllSame(first, sum));
  } while (std::next_permutation(order.begin(), order.end()));
  for (size_t i = 0; i < kN; ++i) {
    long double exact = 0;
    for (size_t k = 0; k < 4; ++k) exact += static_cast<long double>(weights[k]) * deltas[k][i];
    EXPECT_NEAR(first[i], static_cast<double>(exact), 4 * std::ldexp(0.5, -36));
  }
}

TEST_P(KernelsTest, AccumulateIsExactUpToItsLimits) {
  // Contributions of the largest size that is allowed, one grid step each way, up to a sum just below 2^17.
  const double grid = std::ldexp(1.0, -36), largest = 32768.0;
  std::vector<double> sum = {largest + grid, 131072.0 - largest - grid, -(131072.0 - largest - grid)};
  const std::vector<float> delta = {32768.0f, 32768.0f, -32768.0f};
  kernels_.accumulate(sum.data(), delta.data(), 1.0, 3);
  EXPECT_EQ(sum[0], 65536.0 + grid);
  EXPECT_EQ(sum[1], 131072.0 - grid);
  EXPECT_EQ(sum[2], -(131072.0 - grid));
  // A weighted contribution near the limit lands on the grid.
  std::vector<double> one = {0.0};
  const float near_limit = 32767.998f;
  const double weight = 1.0 - 1e-10;
  kernels_.accumulate(one.data(), &near_limit, weight, 1);
  EXPECT_EQ(std::nearbyint(one[0] / grid), one[0] / grid);
  EXPECT_NEAR(one[0], weight * near_limit, grid / 2);
}

TEST_P(KernelsTest, MeanIsTheRoundedQuotient) {
  const std::vector<double> sum = {1.0, -2.0, 0.0, 1e-20, 10.0};
  std::vector<float> mean(sum.size());
  kernels_.mean(mean.data(), sum.data(), 3.0, sum.size());
  for (size_t i = 0; i < sum.size(); ++i) EXPECT_EQ(mean[i], static_cast<float>(sum[i] / 3.0));
}

TEST_P(KernelsTest, FindsTheFirstNonFiniteWhereverItIs) {
  for (const size_t n : {size_t{1}, size_t{17}, size_t{1024}, size_t{2500}}) {
    std::vector<float> x(n, std::numeric_limits<float>::max());
    EXPECT_EQ(kernels_.first_non_finite(x.data(), n), n);
    for (const float bad : {kNaN, -kInfinity, kInfinity}) {
      for (size_t at = 0; at < n; ++at) {
        std::vector<float> y = x;
        y[at] = bad;
        y[n - 1] = kNaN;
        EXPECT_EQ(kernels_.first_non_finite(y.data(), n), at);
      }
    }
  }
}

TEST_P(KernelsTest, MaxAbsIsTheLargestMagnitude) {
  EXPECT_EQ(kernels_.max_abs(nullptr, 0), 0.0f);
  std::vector<float> x = Ordinary(1000, 30);
  x[777] = -1e6f;
  EXPECT_EQ(kernels_.max_abs(x.data(), x.size()), 1e6f);
  x[3] = kNaN;
  EXPECT_TRUE(std::isnan(kernels_.max_abs(x.data(), x.size())));
}

TEST_P(KernelsTest, SumOfSquaresFollowsTheWrittenTree) {
  for (const size_t n : kLengths) {
    const std::vector<float> x = Ordinary(n, 31);
    double want = 0;
    for (size_t piece = 0; piece < n; piece += kNormPieceElements) {
      double lane[8] = {};
      for (size_t i = piece; i < std::min(n, piece + kNormPieceElements); ++i) {
        lane[(i - piece) % 8] += static_cast<double>(x[i]) * static_cast<double>(x[i]);
      }
      want += ((lane[0] + lane[1]) + (lane[2] + lane[3])) + ((lane[4] + lane[5]) + (lane[6] + lane[7]));
    }
    EXPECT_EQ(Bits(kernels_.sum_of_squares(x.data(), n)), Bits(want)) << n;
  }
}

TEST_P(KernelsTest, SumOfSquaresMayBeSplitAtPieces) {
  const size_t n = 3 * kNormPieceElements + 1234;
  const std::vector<float> x = Ordinary(n, 32);
  double split = 0;
  for (size_t begin = 0; begin < n; begin += kNormPieceElements) {
    split += kernels_.sum_of_squares(x.data() + begin, std::min(kNormPieceElements, n - begin));
  }
  EXPECT_EQ(Bits(split), Bits(kernels_.sum_of_squares(x.data(), n)));
}

TEST_P(KernelsTest, SubtractNamesTheOrder) {
  const float a = 3, b = 1;
  float out = 0;
  kernels_.subtract(&out, &a, &b, 1);
  EXPECT_EQ(out, 2);
}

TEST_P(KernelsTest, EveryBfloat16SurvivesTheRoundTrip) {
  std::vector<uint16_t> all(65536), back(65536);
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
  std::vector<float> x(all.size());
  kernels_.bf16_decode(x.data(), all.data(), all.size());
  kernels_.bf16_encode(back.data(), x.data(), x.size());
  for (size_t i = 0; i < all.size(); ++i) {
    EXPECT_EQ(Bits(x[i]), static_cast<uint32_t>(i) << 16);
    EXPECT_EQ(back[i], std::isnan(x[i]) ? (all[i] | 0x40) : all[i]);  // NaN comes back quiet.
  }
}

TEST_P(KernelsTest, Bfloat16RoundsToNearestEven) {
  const std::vector<std::pair<uint32_t, uint16_t>> cases = {
      {0x3f800000, 0x3f80}, {0x3f807fff, 0x3f80}, {0x3f808000, 0x3f80}, {0x3f808001, 0x3f81}, {0x3f818000, 0x3f82},
      {0xbf818000, 0xbf82}, {0x7f7fffff, 0x7f80}, {0x7f800000, 0x7f80}, {0x00000001, 0x0000}, {0x80008001, 0x8001},
      {0x7f800001, 0x7fc0}, {0xffffffff, 0xffff}, {0x80000000, 0x8000}};
  for (const auto& [in, want] : cases) {
    const std::vector<float> x(19, FromBits(in));
    std::vector<uint16_t> out(19);
    kernels_.bf16_encode(out.data(), x.data(), x.size());
    for (const uint16_t got : out) EXPECT_EQ(got, want) << std::hex << in;
  }
}

TEST_P(KernelsTest, EveryHalfDecodesAsTheFormatSays) {
  std::vector<uint16_t> all(65536), back(65536);
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
  std::vector<float> x(all.size());
  kernels_.fp16_decode(x.data(), all.data(), all.size());
  kernels_.fp16_encode(back.data(), x.data(), x.size());
  for (size_t i = 0; i < all.size(); ++i) {
    const int exponent = (i >> 10) & 31, mantissa = i & 1023;
    const double sign = i & 0x8000 ? -1.0 : 1.0;
    if (exponent == 31 && mantissa != 0) {
      EXPECT_TRUE(std::isnan(x[i]));
      EXPECT_EQ(back[i], all[i] | 0x200);
      continue;
    }
    const double want = exponent == 31  ? static_cast<double>(kInfinity)
                        : exponent == 0 ? std::ldexp(mantissa, -24)
                                        : std::ldexp(1024 + mantissa, exponent - 25);
    EXPECT_EQ(static_cast<double>(x[i]), sign * want) << i;
    EXPECT_EQ(std::signbit(x[i]), i >= 0x8000);
    EXPECT_EQ(back[i], all[i]);
  }
}

TEST_P(KernelsTest, HalfRoundsToNearestEvenEverywhere) {
  // Between two neighbouring halves: the midpoint goes to the even one, a float to either side of it to the nearer.
  std::vector<float> x;
  std::vector<uint16_t> want;
  for (uint32_t h = 0; h < 0x7c00; ++h) {
    const uint16_t pair[] = {static_cast<uint16_t>(h), static_cast<uint16_t>(h + 1)};
    float ends[2];
    scalar_.fp16_decode(ends, pair, 2);
    if (h + 1 == 0x7c00) ends[1] = 65536.0f;  // Where the next half would be if the exponent went on.
    const float middle = static_cast<float>((static_cast<double>(ends[0]) + ends[1]) / 2);
    const float below = FromBits(Bits(middle) - 1), above = FromBits(Bits(middle) + 1);
    for (const float sign : {1.0f, -1.0f}) {
      const uint16_t sign_bit = sign < 0 ? 0x8000 : 0;
      x.insert(x.end(), {sign * below, sign * middle, sign * above});
      want.push_back(static_cast<uint16_t>(sign_bit | h));
      want.push_back(static_cast<uint16_t>(sign_bit | (h % 2 == 0 ? h : h + 1)));
      want.push_back(static_cast<uint16_t>(sign_bit | (h + 1)));
    }
  }
  std::vector<uint16_t> got(x.size());
  kernels_.fp16_encode(got.data(), x.data(), x.size());
  EXPECT_TRUE(AllSame(want, got));
}

TEST_P(KernelsTest, Int8KeepsWithinHalfAStepOfItsBlock) {
  const size_t n = 5 * kInt8BlockElements + 77;
  std::vector<float> x = Ordinary(n, 40);
  std::fill(x.begin() + kInt8BlockElements, x.begin() + 2 * kInt8BlockElements, 0.0f);
  std::vector<float> scales(6), back(n);
  std::vector<int8_t> q(n);
  kernels_.int8_encode(scales.data(), q.data(), x.data(), n);
  kernels_.int8_decode(back.data(), scales.data(), q.data(), n);
  EXPECT_EQ(scales[1], 0.0f);
  for (size_t i = 0; i < n; ++i) {
    const float scale = scales[i / kInt8BlockElements];
    EXPECT_LE(std::abs(back[i] - x[i]), scale * 0.5001f);
    EXPECT_GE(q[i], -127);
  }
  for (size_t block = 0; block < scales.size(); ++block) {
    const size_t begin = block * kInt8BlockElements;
    EXPECT_EQ(scales[block], scalar_.max_abs(x.data() + begin, std::min(kInt8BlockElements, n - begin)) / 127.0f);
  }
}

TEST_P(KernelsTest, Int8RoundsTiesToEven) {
  // 127 makes the scale 1.
  const std::vector<float> x = {127.0f, 0.5f, 1.5f, 2.5f, -0.5f, -1.5f, -2.5f, 0.51f, -126.5f, -127.0f};
  const std::vector<int8_t> want = {127, 0, 2, 2, 0, -2, -2, 1, -126, -127};
  std::vector<float> scales(1);
  std::vector<int8_t> got(x.size());
  kernels_.int8_encode(scales.data(), got.data(), x.data(), x.size());
  EXPECT_EQ(scales[0], 1.0f);
  EXPECT_TRUE(AllSame(want, got));
}

TEST_P(KernelsTest, Int8HandlesTheSmallestAndTheLargestNumbers) {
  const float smallest = FromBits(1), largest = FromBits(0x7f7fff00);
  for (const float magnitude : {smallest, 100 * smallest, 190 * smallest, 1e-38f, largest}) {
    const std::vector<float> x = {magnitude, -magnitude, 0.0f};
    std::vector<float> scales(1), back(3);
    std::vector<int8_t> q(3);
    kernels_.int8_encode(scales.data(), q.data(), x.data(), 3);
    kernels_.int8_decode(back.data(), scales.data(), q.data(), 3);
    EXPECT_EQ(q[0], -q[1]);
    EXPECT_EQ(q[2], 0);
    EXPECT_TRUE(std::isfinite(back[0])) << magnitude;
    // A scale among the denormals is coarse.
    EXPECT_LE(std::abs(back[0] / magnitude), 1.0001f) << magnitude;
  }
}

}  // namespace
}  // namespace bmuf
