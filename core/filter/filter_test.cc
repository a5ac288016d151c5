#include "core/filter/filter.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "core/filter/float_filter.h"
#include "core/filter/reference.h"
#include "gtest/gtest.h"

namespace bmuf {
namespace {

constexpr v1::Variant kAll[] = {
    v1::VARIANT_CLASSICAL,        v1::VARIANT_NESTEROV,       v1::VARIANT_AVERAGING,     v1::VARIANT_CAFFE2_NESTEROV,
    v1::VARIANT_FAIRSEQ_NESTEROV, v1::VARIANT_CNTK_CLASSICAL, v1::VARIANT_CNTK_NESTEROV, v1::VARIANT_PIKA,
    v1::VARIANT_FED_ADAGRAD,      v1::VARIANT_FED_ADAM,       v1::VARIANT_FED_YOGI,
};
// Those made of v alone, which differ in what they do with it.
constexpr v1::Variant kMomentum[] = {
    v1::VARIANT_CLASSICAL,        v1::VARIANT_NESTEROV,       v1::VARIANT_CAFFE2_NESTEROV,
    v1::VARIANT_FAIRSEQ_NESTEROV, v1::VARIANT_CNTK_CLASSICAL, v1::VARIANT_CNTK_NESTEROV,
};

v1::OuterOptimizer Outer(v1::Variant variant, double zeta = 0.7, double eta = 0.9) {
  v1::OuterOptimizer outer;
  outer.set_variant(variant);
  outer.set_block_learning_rate(zeta);
  outer.set_block_momentum(eta);
  outer.set_beta1(0.9);
  outer.set_beta2(0.99);
  outer.set_tau(1e-3);
  return outer;
}

std::vector<float> Random(size_t n, uint32_t seed, float scale) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, scale);
  std::vector<float> x(n);
  for (float& value : x) value = normal(random);
  return x;
}

testing::AssertionResult SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  if (a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0) {
    return testing::AssertionSuccess();
  }
  return testing::AssertionFailure() << "bits differ";
}

class VariantTest : public testing::TestWithParam<v1::Variant> {};

INSTANTIATE_TEST_SUITE_P(All, VariantTest, testing::ValuesIn(kAll),
                         [](const auto& info) { return v1::Variant_Name(info.param); });

TEST_P(VariantTest, StaysWithinRoundingOfTheReference) {
  constexpr size_t kN = 301;
  const std::vector<float> start = Random(kN, 1, 1.0f);
  ReferenceFilter reference(Outer(GetParam()), std::vector<double>(start.begin(), start.end()));
  FloatFilter filter(ScalarKernels(), Outer(GetParam()), start);
  for (uint32_t round = 0; round < 6; ++round) {
    const std::vector<float> mean = Random(kN, 10 + round, 0.05f);
    filter.Step(mean, 4, round == 3 ? 0.6 : 1.0);
    reference.Step(std::vector<double>(mean.begin(), mean.end()), 4, round == 3 ? 0.6 : 1.0);
    for (size_t i = 0; i < kN; ++i) {
      ASSERT_NEAR(filter.B[i], reference.B[i], 3e-6 * std::max(1.0, std::abs(reference.B[i]))) << round;
      ASSERT_NEAR(filter.W[i], reference.W[i], 3e-6 * std::max(1.0, std::abs(reference.W[i]))) << round;
      ASSERT_NEAR(filter.v[i], reference.v[i], 3e-6) << round;
    }
  }
}

TEST_P(VariantTest, GivesTheSameBitsHoweverTheModelIsSplitAndWhateverTheMachine) {
  constexpr size_t kN = 1003;
  const std::vector<float> start = Random(kN, 2, 1.0f);
  const std::vector<std::vector<float>> means = {Random(kN, 3, 0.1f), Random(kN, 4, 0.1f), Random(kN, 5, 0.1f)};
  FloatFilter whole(ScalarKernels(), Outer(GetParam()), start);
  for (const auto& mean : means) whole.Step(mean, 3, 0.9);
  for (const Kernels* kernels : AvailableKernels()) {
    for (const size_t piece : {size_t{0}, size_t{1}, size_t{37}, size_t{512}}) {
      SCOPED_TRACE(testing::Message() << kernels->name << " in pieces of " << piece);
      FloatFilter split(*kernels, Outer(GetParam()), start);
      for (const auto& mean : means) split.Step(mean, 3, 0.9, piece);
      EXPECT_TRUE(SameBits(whole.B, split.B));
      EXPECT_TRUE(SameBits(whole.W, split.W));
      EXPECT_TRUE(SameBits(whole.v, split.v));
      EXPECT_TRUE(SameBits(whole.u, split.u));
    }
  }
}

TEST_P(VariantTest, TouchesNothingOutsideItsRangeAndNeverItsInputs) {
  constexpr size_t kN = 64, kBegin = 5, kEnd = 50;
  const FilterStep step = ResolveStep(Outer(GetParam()), 2, 1);
  const FilterArrays used = ArraysOf(step.variant);
  const std::vector<float> mean = Random(kN, 6, 0.1f), model = Random(kN, 7, 1), v = Random(kN, 8, 0.1f);
  const std::vector<float> u(kN, 0.5f), untouched(kN, -77.0f);
  std::vector<float> mean_in = mean, model_in = model, v_in = v, u_in = u;
  std::vector<float> out[4] = {untouched, untouched, untouched, untouched};
  OuterArrays a;
  a.mean = mean_in.data();
  a.model_in = model_in.data();
  a.model_out = out[0].data();
  if (used.momentum) a.v_in = v_in.data(), a.v_out = out[1].data();
  if (used.second_moment) a.u_in = u_in.data(), a.u_out = out[2].data();
  if (used.look_ahead) a.broadcast_out = out[3].data();
  ApplyFilter(ScalarKernels(), step, a, kBegin, kEnd);
  ApplyFilter(ScalarKernels(), step, a, kEnd, kEnd);  // Nothing.
  EXPECT_TRUE(SameBits(mean, mean_in));
  EXPECT_TRUE(SameBits(model, model_in));
  EXPECT_TRUE(SameBits(v, v_in));
  EXPECT_TRUE(SameBits(u, u_in));
  const bool is_used[4] = {true, used.momentum, used.second_moment, used.look_ahead};
  for (size_t k = 0; k < 4; ++k) {
    for (size_t i = 0; i < kN; ++i) {
      EXPECT_EQ(out[k][i] == -77.0f, !is_used[k] || i < kBegin || i >= kEnd) << "array " << k << " element " << i;
    }
  }
}

TEST(Filter, RulesDifferFromTheSecondRoundOn) {
  std::vector<float> after;
  for (const v1::Variant variant : kMomentum) {
    FloatFilter filter(ScalarKernels(), Outer(variant, 0.7, 0.75), {1.0f});
    filter.Step({0.25f}, 3);
    filter.Step({0.5f}, 3);
    after.push_back(filter.B[0]);
  }
  std::sort(after.begin(), after.end());
  EXPECT_EQ(std::adjacent_find(after.begin(), after.end()), after.end());
}

TEST(Filter, WithoutMomentumTheRulesAgree) {
  for (const v1::Variant variant : {v1::VARIANT_CLASSICAL, v1::VARIANT_NESTEROV, v1::VARIANT_AVERAGING,
                                    v1::VARIANT_CAFFE2_NESTEROV, v1::VARIANT_FAIRSEQ_NESTEROV, v1::VARIANT_PIKA}) {
    FloatFilter filter(ScalarKernels(), Outer(variant, 1, 0), {1.0f});
    filter.Step({0.25f}, 4);
    filter.Step({-0.125f}, 4);
    EXPECT_EQ(filter.B[0], 1.125f) << v1::Variant_Name(variant);
    EXPECT_EQ(filter.W[0], 1.125f) << v1::Variant_Name(variant);
  }
}

// The two ways to write Nesterov: from W, and from B with the change of v.
TEST(Filter, NesterovIsTheFormWithTheChangeOfMomentum) {
  FloatFilter filter(ScalarKernels(), Outer(v1::VARIANT_NESTEROV, 0.7, 0.9), {2.0f});
  double b = 2, v = 0;
  for (const float mean : {0.5f, -0.25f, 0.125f, 1.0f, 0.0f}) {
    const double before = v;
    v = 0.9 * v + 0.7 * mean;
    b += v + 0.9 * (v - before);
    filter.Step({mean});
    EXPECT_NEAR(filter.B[0], b, 2e-6);
    EXPECT_NEAR(filter.B[0] - filter.W[0], 0.9 * v, 2e-6);
  }
}

TEST(Filter, AZeroMeanStillMovesTheModelByItsMomentum) {
  FloatFilter filter(ScalarKernels(), Outer(v1::VARIANT_CLASSICAL, 1, 0.5), {0.0f});
  filter.Step({1.0f});
  filter.Step({0.0f});
  EXPECT_EQ(filter.B[0], 1.5f);
  EXPECT_EQ(filter.v[0], 0.5f);
}

TEST(Filter, AWeightOfZeroContributesNothing) {
  FloatFilter filter(ScalarKernels(), Outer(v1::VARIANT_AVERAGING), {0.0f});
  EXPECT_EQ(filter.Mean({{1.0f}, {100.0f}, {4.0f}}, {1.0, 0.0, 2.0})[0], 3.0f);
}

TEST(Filter, WarmUpByAveragingLeavesMomentumAlone) {
  FloatFilter filter(ScalarKernels(), Outer(v1::VARIANT_AVERAGING), {1.0f});
  filter.v = {5.0f};
  filter.Step({0.5f});
  EXPECT_EQ(filter.B[0], 1.5f);
  EXPECT_EQ(filter.v[0], 5.0f);
}

TEST(Filter, AnUnspecifiedVariantIsNesterov) {
  EXPECT_EQ(ResolveStep(Outer(v1::VARIANT_UNSPECIFIED), 1, 1).variant, v1::VARIANT_NESTEROV);
  EXPECT_TRUE(ArraysOf(v1::VARIANT_UNSPECIFIED).look_ahead);
}

TEST(Filter, CoefficientsAreRoundedOnce) {
  const OuterCoefficients c = ResolveStep(Outer(v1::VARIANT_CNTK_NESTEROV, 0.7, 0.9), 3, 0.25).coefficients;
  EXPECT_EQ(c.zeta, static_cast<float>((1 - 0.9) * 0.7 * 3));
  EXPECT_EQ(c.eta, 0.9f);
  EXPECT_EQ(c.gain, 1.9f);
  EXPECT_EQ(c.rescale, 0.25f);
  EXPECT_EQ(c.one_minus_beta2, static_cast<float>(1 - 0.99));
  EXPECT_EQ(InitialSecondMoment(1e-3), 1e-6f);
}

TEST(Filter, ANonFiniteMeanShowsInTheResult) {
  for (const v1::Variant variant : kAll) {
    FloatFilter filter(ScalarKernels(), Outer(variant), {1.0f, 1.0f});
    filter.Step({0.5f, std::numeric_limits<float>::quiet_NaN()});
    EXPECT_TRUE(std::isfinite(filter.B[0])) << v1::Variant_Name(variant);
    EXPECT_FALSE(std::isfinite(filter.B[1])) << v1::Variant_Name(variant);
  }
}

TEST(MomentumPolicy, AutoIsOneMinusOneOverN) {
  EXPECT_EQ(AutoBlockMomentum(0), 0.0);
  EXPECT_EQ(AutoBlockMomentum(1), 0.0);
  EXPECT_EQ(AutoBlockMomentum(2), 0.5);
  EXPECT_EQ(AutoBlockMomentum(4), 0.75);
  EXPECT_DOUBLE_EQ(AutoBlockMomentum(3), 2.0 / 3.0);
}

TEST(MomentumPolicy, RescalingKeepsWhatIsStillToBeDelivered) {
  for (const double before : {0.3, 0.5, 0.875}) {
    for (const double after : {0.3, 0.5, 0.875}) {
      // With no more deltas, v delivers v h/(1-h) in all.
      const double v = 1.25 * MomentumRescale(before, after);
      EXPECT_NEAR(v * after / (1 - after), 1.25 * before / (1 - before), 1e-12);
    }
  }
  EXPECT_EQ(MomentumRescale(0.75, 0.75), 1.0);
  EXPECT_EQ(MomentumRescale(0.0, 0.5), 0.0);
  EXPECT_EQ(MomentumRescale(0.5, 0.0), 1.0);
}

TEST(MergeMax, KeepsTheLargerOfEachElement) {
  std::vector<float> f = {1, -2, 3};
  MergeMax(absl::MakeSpan(f), {0.5f, -1.0f, 4.0f});
  EXPECT_EQ(f, (std::vector<float>{1, -1, 4}));
  std::vector<int32_t> i32 = {1, std::numeric_limits<int32_t>::min()};
  MergeMax(absl::MakeSpan(i32), {2, std::numeric_limits<int32_t>::max()});
  EXPECT_EQ(i32, (std::vector<int32_t>{2, std::numeric_limits<int32_t>::max()}));
  // Counters beyond what a float or a double holds.
  std::vector<int64_t> i64 = {(int64_t{1} << 62) + 1};
  MergeMax(absl::MakeSpan(i64), {int64_t{1} << 62});
  EXPECT_EQ(i64[0], (int64_t{1} << 62) + 1);
}

TEST(MergeMax, DoesNotDependOnTheOrder) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  std::vector<float> values = {-1.0f, -0.0f, 0.0f, nan};
  std::sort(values.begin(), values.end(), [](float a, float b) { return std::memcmp(&a, &b, 4) < 0; });
  do {
    std::vector<float> merged = {values[0]};
    for (size_t i = 1; i < values.size(); ++i) MergeMax(absl::MakeSpan(merged), {values[i]});
    EXPECT_EQ(merged[0], 0.0f);
    EXPECT_FALSE(std::signbit(merged[0]));
  } while (
      std::next_permutation(values.begin(), values.end(), [](float a, float b) { return std::memcmp(&a, &b, 4) < 0; }));
}

}  // namespace
}  // namespace bmuf
