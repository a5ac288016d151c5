#include "server/model/accumulator.h"

#include <malloc.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "core/base/error.h"
#include "gtest/gtest.h"
#include "server/model/test_payload.h"

namespace bmuf {
namespace {

struct Contribution {
  std::unique_ptr<Staging> staging;
  Verified verified;
  double weight = 1;
  double scale = 1;
  uint32_t rank = 0;
};

class AccumulatorTest : public testing::Test {
 protected:
  Contribution Make(const std::shared_ptr<const Layout>& layout, v1::Codec codec, const std::vector<float>& delta,
                    const std::vector<uint8_t>& auxiliary, double weight, double scale, uint32_t rank) {
    Contribution c;
    c.staging = Received(layout, codec, PayloadOf(codec, delta, auxiliary));
    auto verified = c.staging->Verify(ScalarKernels(), pool_);
    EXPECT_TRUE(verified.ok()) << verified.status();
    c.verified = *verified;
    c.weight = weight;
    c.scale = scale;
    c.rank = rank;
    return c;
  }

  absl::Status Fold(Accumulator& sum, const Contribution& c, const Kernels& kernels = ScalarKernels()) {
    return sum.Fold(kernels, pool_, *c.staging, c.verified.max_abs, c.weight, c.scale, c.rank);
  }

  // All that comes out of a round, as bytes.
  std::string Outcome(const Accumulator& sum, const Layout& layout, const Kernels& kernels = ScalarKernels()) {
    const AlignedBuffer<float> mean = sum.Mean(kernels, pool_);
    const AlignedBuffer<uint8_t> auxiliary = sum.Auxiliary(AlignedBuffer<uint8_t>(layout.auxiliary_bytes()));
    const double weight = sum.total_weight();
    std::string bytes(reinterpret_cast<const char*>(&weight), sizeof(weight));
    bytes.append(reinterpret_cast<const char*>(mean.data()), mean.size_bytes());
    bytes.append(reinterpret_cast<const char*>(auxiliary.data()), auxiliary.size());
    return bytes;
  }

  ThreadPool pool_{"test", 2};
};

TEST_F(AccumulatorTest, TwentyFourOrdersGiveTheSameBits) {
  v1::Manifest manifest;
  AddTensor(manifest, "w", {3'000});
  AddTensor(manifest, "mean", {3}, v1::DTYPE_F32, v1::TENSOR_ROLE_MEAN);
  AddTensor(manifest, "max_f32", {2}, v1::DTYPE_F32, v1::TENSOR_ROLE_MAX);
  AddTensor(manifest, "max_i64", {1}, v1::DTYPE_I64, v1::TENSOR_ROLE_MAX);
  AddTensor(manifest, "first", {1}, v1::DTYPE_I32, v1::TENSOR_ROLE_FIRST);
  const auto layout = LayoutOf(manifest);
  const v1::Codec codecs[] = {v1::CODEC_FP32, v1::CODEC_BF16, v1::CODEC_FP16, v1::CODEC_INT8};
  const double weights[] = {0.1, 0.7, 0.3, 1.9};  // Their sum in double depends on the order.
  const float zeros[] = {0.0f, -0.0f, -0.0f, 0.0f};
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<Contribution> contributions;
  for (uint32_t k = 0; k < 4; ++k) {
    std::vector<float> delta(3'000);
    for (float& d : delta) d = std::ldexp(normal(random), static_cast<int>(random() % 20) - 15);
    std::vector<uint8_t> auxiliary;
    AppendValues<float>(auxiliary, {normal(random), normal(random) * 1e-5f, normal(random) * 100});
    AppendValues<float>(auxiliary, {zeros[k], normal(random)});
    AppendValues<int64_t>(auxiliary, {static_cast<int64_t>(random()) << 20});
    AppendValues<int32_t>(auxiliary, {static_cast<int32_t>(100 + k)});
    contributions.push_back(Make(layout, codecs[k], delta, auxiliary, weights[k], k == 1 ? 0.37 : 1.0, k));
  }
  std::vector<int> order(4);
  std::iota(order.begin(), order.end(), 0);
  std::string expected;
  int orders = 0;
  Accumulator sum(layout);
  do {
    sum.Reset();
    for (int k : order) ASSERT_TRUE(Fold(sum, contributions[k]).ok());
    const std::string outcome = Outcome(sum, *layout);
    if (expected.empty()) expected = outcome;
    EXPECT_TRUE(outcome == expected) << "order " << testing::PrintToString(order);
    ++orders;
  } while (std::next_permutation(order.begin(), order.end()));
  EXPECT_EQ(orders, 24);
  for (const Kernels* kernels : AvailableKernels()) {
    sum.Reset();
    for (int k : {2, 0, 3, 1}) ASSERT_TRUE(Fold(sum, contributions[k], *kernels).ok());
    EXPECT_TRUE(Outcome(sum, *layout, *kernels) == expected) << kernels->name;
  }
}

TEST_F(AccumulatorTest, MemoryDoesNotGrowWithTheNumberOfContributions) {
  const auto live_bytes = [] {
    const auto info = mallinfo2();
    return info.uordblks + info.hblkhd;
  };
  if (live_bytes() == 0) GTEST_SKIP() << "this allocator does not count (a sanitizer's)";
  constexpr size_t kElements = 250'000;
  const auto layout = PlainLayout(kElements);
  const Contribution c = Make(layout, v1::CODEC_INT8, std::vector<float>(kElements, 0.5f), {}, 1, 1, 0);
  Accumulator sum(layout);
  const auto fold = [&](uint32_t rank) {
    ASSERT_TRUE(sum.Fold(ScalarKernels(), pool_, *c.staging, c.verified.max_abs, c.weight, c.scale, rank).ok());
  };
  for (uint32_t rank = 0; rank < 4; ++rank) fold(rank);
  const size_t few = live_bytes();
  for (uint32_t rank = 4; rank < 256; ++rank) fold(rank);
  EXPECT_LT(live_bytes(), few + 64 * 1024) << "one delta has " << kElements * 4 << " bytes";
}

TEST_F(AccumulatorTest, WeightsAndScalesCountWhereTheyShould) {
  v1::Manifest manifest;
  AddTensor(manifest, "w", {2});
  AddTensor(manifest, "mean", {1}, v1::DTYPE_F32, v1::TENSOR_ROLE_MEAN);
  const auto layout = LayoutOf(manifest);
  const auto values = [](float mean) {
    std::vector<uint8_t> bytes;
    AppendValues<float>(bytes, {mean});
    return bytes;
  };
  Accumulator sum(layout);
  // The guard's scale shrinks the delta, not its weight, and not the statistics.
  ASSERT_TRUE(Fold(sum, Make(layout, v1::CODEC_FP32, {1, 2}, values(4), 1, 1, 0)).ok());
  ASSERT_TRUE(Fold(sum, Make(layout, v1::CODEC_FP32, {8, 16}, values(8), 3, 0.5, 1)).ok());
  EXPECT_EQ(sum.total_weight(), 4);
  const AlignedBuffer<float> mean = sum.Mean(ScalarKernels(), pool_);
  EXPECT_EQ(mean[0], (1 + 3 * 4) / 4.0f);
  EXPECT_EQ(mean[1], (2 + 3 * 8) / 4.0f);
  const AlignedBuffer<uint8_t> auxiliary = sum.Auxiliary(AlignedBuffer<uint8_t>(4));
  float statistic;
  std::memcpy(&statistic, auxiliary.data(), 4);
  EXPECT_EQ(statistic, (4 + 3 * 8) / 4.0f);
}

TEST_F(AccumulatorTest, MaxTakesTheLargestAndFirstTheLowestRank) {
  v1::Manifest manifest;
  AddTensor(manifest, "w", {1});
  AddTensor(manifest, "big", {2}, v1::DTYPE_I64, v1::TENSOR_ROLE_MAX);
  AddTensor(manifest, "first", {1}, v1::DTYPE_F32, v1::TENSOR_ROLE_FIRST);
  const auto layout = LayoutOf(manifest);
  const int64_t exact = (int64_t{1} << 53) + 1;  // Not a double, not a float.
  const auto values = [](int64_t a, int64_t b, float first) {
    std::vector<uint8_t> bytes;
    AppendValues<int64_t>(bytes, {a, b});
    AppendValues<float>(bytes, {first});
    return bytes;
  };
  Accumulator sum(layout);
  ASSERT_TRUE(Fold(sum, Make(layout, v1::CODEC_FP32, {0}, values(exact - 1, -9, 5), 1, 1, 7)).ok());
  ASSERT_TRUE(Fold(sum, Make(layout, v1::CODEC_FP32, {0}, values(exact, -3, 6), 1, 1, 2)).ok());
  ASSERT_TRUE(Fold(sum, Make(layout, v1::CODEC_FP32, {0}, values(0, -5, 7), 1, 1, 4)).ok());
  const AlignedBuffer<uint8_t> auxiliary = sum.Auxiliary(AlignedBuffer<uint8_t>(20));
  int64_t big[2];
  float first;
  std::memcpy(big, auxiliary.data(), 16);
  std::memcpy(&first, auxiliary.data() + 16, 4);
  EXPECT_EQ(big[0], exact);
  EXPECT_EQ(big[1], -3) << "the first contribution counts, not a zero from before";
  EXPECT_EQ(first, 6);
}

TEST_F(AccumulatorTest, WhatLeavesTheExactRangeIsRefusedAndChangesNothing) {
  const auto layout = PlainLayout(2);
  Accumulator sum(layout);
  ASSERT_TRUE(Fold(sum, Make(layout, v1::CODEC_FP32, {1, 2}, {}, 1, 1, 0)).ok());
  const std::string before = Outcome(sum, *layout);
  EXPECT_EQ(ReasonOf(Fold(sum, Make(layout, v1::CODEC_FP32, {1, 32768}, {}, 1, 1, 1))), v1::REASON_OUT_OF_RANGE_DELTA);
  EXPECT_EQ(ReasonOf(Fold(sum, Make(layout, v1::CODEC_FP32, {1, -1}, {}, 40000, 1, 1))), v1::REASON_OUT_OF_RANGE_DELTA);
  EXPECT_EQ(ReasonOf(Fold(sum, Make(layout, v1::CODEC_FP32, {1, 3e38f}, {}, 1e300, 1, 1))),
            v1::REASON_OUT_OF_RANGE_DELTA);
  EXPECT_TRUE(Outcome(sum, *layout) == before);
  // Each alone is in range, all together are not.
  int folded = 0;
  for (uint32_t rank = 1; rank < 8; ++rank) {
    const Contribution c = Make(layout, v1::CODEC_FP32, {30000, -30000}, {}, 1, 1, rank);
    if (Fold(sum, c).ok()) ++folded;
  }
  EXPECT_EQ(folded, 4) << "2^17 = 131072";
  EXPECT_EQ(sum.total_weight(), 5);
}

TEST_F(AccumulatorTest, ResetForgetsAndTheLimitsStartAnew) {
  const auto layout = PlainLayout(1);
  Accumulator sum(layout);
  for (int attempt = 0; attempt < 8; ++attempt) {
    sum.Reset();
    EXPECT_EQ(sum.total_weight(), 0);
    ASSERT_TRUE(Fold(sum, Make(layout, v1::CODEC_FP32, {30000}, {}, 1, 1, 0)).ok()) << attempt;
    EXPECT_EQ(sum.Mean(ScalarKernels(), pool_)[0], 30000);
  }
}

}  // namespace
}  // namespace bmuf
