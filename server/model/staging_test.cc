#include "server/model/staging.h"

#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "gtest/gtest.h"
#include "server/model/test_payload.h"

namespace bmuf {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

absl::Status Append(Staging& staging, uint64_t offset, const std::vector<uint8_t>& data) {
  return staging.Append(offset, data, Crc32c(data.data(), data.size()));
}

class StagingTest : public testing::Test {
 protected:
  ThreadPool pool_{"test", 2};
};

TEST_F(StagingTest, TakesOnlyTheSizeThatLayoutAndCodecRequire) {
  const auto layout = PlainLayout(10);
  EXPECT_TRUE(Staging::Create(layout, v1::CODEC_FP32, 40).ok());
  EXPECT_TRUE(Staging::Create(layout, v1::CODEC_INT8, 14).ok());
  for (uint64_t declared : {uint64_t{0}, uint64_t{39}, uint64_t{41}, ~uint64_t{0}}) {
    const absl::Status status = Staging::Create(layout, v1::CODEC_FP32, declared).status();
    EXPECT_EQ(ReasonOf(status), v1::REASON_SIZE_MISMATCH);
    EXPECT_EQ(MetadataOf(status, "declared_bytes"), absl::StrCat(declared));
    EXPECT_EQ(MetadataOf(status, "required_bytes"), "40");
  }
  EXPECT_EQ(ReasonOf(Staging::Create(layout, v1::CODEC_INT4, 40).status()), v1::REASON_BAD_CODEC);
}

TEST_F(StagingTest, RefusedChunksChangeNothing) {
  auto staging = *Staging::Create(PlainLayout(4), v1::CODEC_FP32, 16);
  const std::vector<uint8_t> data(8, 1);
  ASSERT_TRUE(Append(*staging, 0, data).ok());
  const uint32_t crc = staging->crc32c();

  for (uint64_t offset : {uint64_t{0}, uint64_t{7}, uint64_t{9}, uint64_t{1} << 63, ~uint64_t{0}}) {
    const absl::Status gap = Append(*staging, offset, data);
    EXPECT_EQ(ReasonOf(gap), v1::REASON_OFFSET_MISMATCH) << offset;
    EXPECT_EQ(MetadataOf(gap, "offset"), "8");
  }
  EXPECT_EQ(ReasonOf(Append(*staging, 8, {})), v1::REASON_BAD_CHUNK) << "empty";
  EXPECT_EQ(ReasonOf(Append(*staging, 8, std::vector<uint8_t>(9, 1))), v1::REASON_BAD_CHUNK) << "beyond the end";
  EXPECT_EQ(ReasonOf(Append(*staging, 8, std::vector<uint8_t>(limits::kMaxChunkBytes + 1))), v1::REASON_BAD_CHUNK);
  const absl::Status damaged = staging->Append(8, data, Crc32c(data.data(), data.size()) ^ 1);
  EXPECT_EQ(ReasonOf(damaged), v1::REASON_CHECKSUM_MISMATCH);
  EXPECT_EQ(MetadataOf(damaged, "offset"), "8");

  EXPECT_EQ(staging->received_bytes(), 8u);
  EXPECT_EQ(staging->crc32c(), crc);
  EXPECT_TRUE(Append(*staging, 8, data).ok());
  EXPECT_EQ(ReasonOf(Append(*staging, 16, {1})), v1::REASON_BAD_CHUNK) << "one byte too many";
}

TEST_F(StagingTest, AnEarlyEndChangesNothingAndAWrongDigestEmptiesIt) {
  auto staging = *Staging::Create(PlainLayout(4), v1::CODEC_FP32, 16);
  const std::vector<uint8_t> payload = PayloadOf(v1::CODEC_FP32, {1, 2, 3, 4});
  const uint32_t digest = Crc32c(payload.data(), payload.size());
  ASSERT_TRUE(Append(*staging, 0, {payload.begin(), payload.begin() + 12}).ok());
  const absl::Status early = staging->Finish(digest);
  EXPECT_EQ(ReasonOf(early), v1::REASON_OFFSET_MISMATCH);
  EXPECT_EQ(MetadataOf(early, "offset"), "12");
  ASSERT_TRUE(Append(*staging, 12, {payload.begin() + 12, payload.end()}).ok());
  EXPECT_EQ(staging->crc32c(), digest);

  const absl::Status wrong = staging->Finish(digest ^ 1);
  EXPECT_EQ(ReasonOf(wrong), v1::REASON_CHECKSUM_MISMATCH);
  EXPECT_EQ(MetadataOf(wrong, "offset"), "0");
  EXPECT_EQ(staging->received_bytes(), 0u);
  ASSERT_TRUE(Append(*staging, 0, payload).ok());
  EXPECT_TRUE(staging->Finish(digest).ok());
}

TEST_F(StagingTest, ABrokenConnectionResumesWhereItStopped) {
  std::vector<float> numbers(300'000);
  for (size_t i = 0; i < numbers.size(); ++i) numbers[i] = static_cast<float>(i);
  const std::vector<uint8_t> payload = PayloadOf(v1::CODEC_FP32, numbers);
  auto staging = *Staging::Create(PlainLayout(numbers.size()), v1::CODEC_FP32, payload.size());
  std::mt19937 random(1);
  while (staging->received_bytes() < payload.size()) {
    // Each stream sends one chunk of any size, also within a number, and breaks.
    const uint64_t at = staging->received_bytes();
    const uint64_t n = std::min<uint64_t>(1 + random() % 200'000, payload.size() - at);
    ASSERT_TRUE(Append(*staging, at, {payload.begin() + at, payload.begin() + at + n}).ok());
    EXPECT_EQ(staging->crc32c(), Crc32c(payload.data(), at + n));
  }
  ASSERT_TRUE(staging->Finish(Crc32c(payload.data(), payload.size())).ok());
  std::vector<float> seen(numbers.size());
  ASSERT_TRUE(staging->Verify(ScalarKernels(), pool_).ok());
  staging->ForEachPiece(ScalarKernels(), pool_, [&](uint64_t begin, absl::Span<const float> values) {
    EXPECT_EQ(begin % kNormPieceElements, 0u);
    std::copy(values.begin(), values.end(), seen.begin() + begin);
  });
  EXPECT_EQ(seen, numbers);
}

TEST_F(StagingTest, VerifyTellsDigestNormAndLargestMagnitude) {
  const std::vector<uint8_t> payload = PayloadOf(v1::CODEC_FP32, {3, -4, 0, 0});
  auto staging = Received(PlainLayout(4), v1::CODEC_FP32, payload);
  const auto verified = staging->Verify(ScalarKernels(), pool_);
  ASSERT_TRUE(verified.ok());
  EXPECT_EQ(verified->digest, Crc32c(payload.data(), payload.size()));
  EXPECT_EQ(verified->norm, 5.0);
  EXPECT_EQ(verified->max_abs, 4.0f);
}

TEST_F(StagingTest, TheNormDoesNotDependOnThreadsOrKernels) {
  constexpr size_t kElements = 6'000'001;  // Several shares of the pool.
  std::vector<float> numbers(kElements);
  std::mt19937 random(2);
  for (float& number : numbers) number = static_cast<float>(random() % 2001) / 1000 - 1;
  auto staging = Received(PlainLayout(kElements), v1::CODEC_FP32, PayloadOf(v1::CODEC_FP32, numbers));
  ThreadPool one("one", 1), five("five", 5);
  const Verified expected = *staging->Verify(ScalarKernels(), one);
  for (const Kernels* kernels : AvailableKernels()) {
    for (ThreadPool* pool : {&one, &five}) {
      EXPECT_EQ(staging->Verify(*kernels, *pool)->norm, expected.norm) << kernels->name;
      EXPECT_EQ(staging->Verify(*kernels, *pool)->max_abs, expected.max_abs) << kernels->name;
    }
  }
}

TEST_F(StagingTest, NamesTheFirstNumberThatIsNotFinite) {
  v1::Manifest manifest;
  AddTensor(manifest, "a", {100'000});
  AddTensor(manifest, "b", {50, 2'000});
  const auto layout = LayoutOf(manifest);
  for (v1::Codec codec : {v1::CODEC_FP32, v1::CODEC_BF16, v1::CODEC_FP16}) {
    for (float bad : {kNan, kInfinity, -kInfinity}) {
      std::vector<float> numbers(200'000, 1.0f);
      numbers[100'123] = bad;
      numbers[190'000] = bad;
      auto staging = Received(layout, codec, PayloadOf(codec, numbers));
      const absl::Status status = staging->Verify(ScalarKernels(), pool_).status();
      EXPECT_EQ(ReasonOf(status), v1::REASON_NON_FINITE_DELTA) << v1::Codec_Name(codec);
      EXPECT_EQ(MetadataOf(status, "tensor"), "b");
      EXPECT_EQ(MetadataOf(status, "index"), "123");
    }
  }
}

TEST_F(StagingTest, AnInt8ProductThatOverflowsIsNotFinite) {
  const auto layout = PlainLayout(300);
  std::vector<uint8_t> payload = PayloadOf(v1::CODEC_INT8, std::vector<float>(300, 1.0f));
  const float scale = std::numeric_limits<float>::max();
  std::memcpy(payload.data() + sizeof(float), &scale, sizeof(scale));
  auto staging = Received(layout, v1::CODEC_INT8, payload);
  const absl::Status status = staging->Verify(ScalarKernels(), pool_).status();
  EXPECT_EQ(ReasonOf(status), v1::REASON_NON_FINITE_DELTA);
  EXPECT_EQ(MetadataOf(status, "tensor"), "w");
  EXPECT_EQ(MetadataOf(status, "index"), "256");

  std::memcpy(payload.data(), &kNan, sizeof(kNan));
  EXPECT_EQ(ReasonOf(Received(layout, v1::CODEC_INT8, payload)->Verify(ScalarKernels(), pool_).status()),
            v1::REASON_BAD_CODEC);
}

TEST_F(StagingTest, AuxiliaryFloatsMustBeFiniteAndIntegersMayBeAnything) {
  v1::Manifest manifest;
  AddTensor(manifest, "w", {3});
  AddTensor(manifest, "count", {1}, v1::DTYPE_I32, v1::TENSOR_ROLE_MAX);
  AddTensor(manifest, "mean", {2}, v1::DTYPE_F32, v1::TENSOR_ROLE_MEAN);
  const auto layout = LayoutOf(manifest);
  const auto verify = [&](float last) {
    std::vector<uint8_t> auxiliary;
    AppendValues<uint32_t>(auxiliary, {0x7fc00000u});  // NaN, were it a float.
    AppendValues<float>(auxiliary, {1, last});
    return Received(layout, v1::CODEC_FP32, PayloadOf(v1::CODEC_FP32, {1, 2, 3}, auxiliary))
        ->Verify(ScalarKernels(), pool_)
        .status();
  };
  EXPECT_TRUE(verify(2).ok());
  const absl::Status status = verify(kNan);
  EXPECT_EQ(ReasonOf(status), v1::REASON_NON_FINITE_DELTA);
  EXPECT_EQ(MetadataOf(status, "tensor"), "mean");
  EXPECT_EQ(MetadataOf(status, "index"), "1");
}

}  // namespace
}  // namespace bmuf
