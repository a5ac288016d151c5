#include "core/codec/codec.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "gtest/gtest.h"

namespace bmuf {
namespace {

using Bytes = std::vector<uint8_t>;

std::string NameOf(v1::Codec codec) { return v1::Codec_Name(codec).substr(6); }

Bytes Encoded(const Kernels& kernels, v1::Codec codec, const std::vector<float>& x) {
  Bytes bytes(*EncodedBytes(codec, x.size()));
  EXPECT_TRUE(Encode(kernels, codec, x, absl::MakeSpan(bytes)).ok());
  return bytes;
}

std::vector<float> Decoded(const Kernels& kernels, v1::Codec codec, absl::Span<const uint8_t> bytes, size_t elements) {
  std::vector<float> x(elements);
  const absl::Status status = Decode(kernels, codec, bytes, absl::MakeSpan(x));
  EXPECT_TRUE(status.ok()) << status;
  return x;
}

// Numbers of many magnitudes, as deltas have them, with zeros of both signs among them.
std::vector<float> Numbers(size_t n, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> x(n);
  for (size_t i = 0; i < n; ++i) {
    x[i] = std::ldexp(normal(random), static_cast<int>(random() % 24) - 20);
    if (random() % 16 == 0) x[i] = random() % 2 == 0 ? 0.0f : -0.0f;
  }
  return x;
}

// What FORMAT.md promises of the error of element i.
float ErrorBound(v1::Codec codec, const std::vector<float>& x, size_t i) {
  const float magnitude = std::abs(x[i]);
  switch (codec) {
    case v1::CODEC_BF16:
      return magnitude / 256;
    case v1::CODEC_FP16:
      return std::max(magnitude / 2048, 0x1p-25f);
    case v1::CODEC_INT8: {
      const size_t begin = i / kInt8BlockElements * kInt8BlockElements;
      float largest = 0;
      for (size_t j = begin; j < std::min(begin + kInt8BlockElements, x.size()); ++j) {
        largest = std::max(largest, std::abs(x[j]));
      }
      return largest / 127 * 0.5001f;
    }
    default:
      return 0;
  }
}

TEST(CodecFormatTest, BytesOfTheWorkedExample) {
  const std::vector<float> x = {1.0f, -2.5f, 0.25f, 127.0f};
  const std::vector<std::pair<v1::Codec, Bytes>> golden = {
      {v1::CODEC_FP32, {0, 0, 0x80, 0x3f, 0, 0, 0x20, 0xc0, 0, 0, 0x80, 0x3e, 0, 0, 0xfe, 0x42}},
      {v1::CODEC_BF16, {0x80, 0x3f, 0x20, 0xc0, 0x80, 0x3e, 0xfe, 0x42}},
      {v1::CODEC_FP16, {0x00, 0x3c, 0x00, 0xc1, 0x00, 0x34, 0xf0, 0x57}},
      {v1::CODEC_INT8, {0, 0, 0x80, 0x3f, 0x01, 0xfe, 0x00, 0x7f}},
  };
  for (const Kernels* kernels : AvailableKernels()) {
    for (const auto& [codec, bytes] : golden) {
      EXPECT_EQ(Encoded(*kernels, codec, x), bytes) << NameOf(codec) << " " << kernels->name;
    }
    EXPECT_EQ(Decoded(*kernels, v1::CODEC_INT8, golden[3].second, 4), (std::vector<float>{1, -2, 0, 127}));
  }
}

TEST(CodecFormatTest, TiesGoToEven) {
  const Kernels& kernels = ScalarKernels();
  EXPECT_EQ(Encoded(kernels, v1::CODEC_BF16, {0x1.01p0f}), (Bytes{0x80, 0x3f}));
  EXPECT_EQ(Encoded(kernels, v1::CODEC_BF16, {0x1.03p0f}), (Bytes{0x82, 0x3f}));
  EXPECT_EQ(Encoded(kernels, v1::CODEC_FP16, {0x1.002p0f}), (Bytes{0x00, 0x3c}));
  EXPECT_EQ(Encoded(kernels, v1::CODEC_FP16, {0x1.006p0f}), (Bytes{0x02, 0x3c}));
}

TEST(CodecFormatTest, ScalesOfAllBlocksComeFirst) {
  std::vector<float> x(300, 0.0f);
  x[0] = 127.0f;
  x[256] = 254.0f;
  const Bytes bytes = Encoded(ScalarKernels(), v1::CODEC_INT8, x);
  ASSERT_EQ(bytes.size(), 8u + 300u);
  float scales[2];
  std::memcpy(scales, bytes.data(), sizeof(scales));
  EXPECT_EQ(scales[0], 1.0f);
  EXPECT_EQ(scales[1], 2.0f);
  EXPECT_EQ(bytes[8], 127);
  EXPECT_EQ(bytes[8 + 256], 127);
}

TEST(CodecFormatTest, SizesFollowFromTheNumberOfElements) {
  EXPECT_EQ(*EncodedBytes(v1::CODEC_FP32, 257), 1028u);
  EXPECT_EQ(*EncodedBytes(v1::CODEC_BF16, 257), 514u);
  EXPECT_EQ(*EncodedBytes(v1::CODEC_FP16, 257), 514u);
  EXPECT_EQ(*EncodedBytes(v1::CODEC_INT8, 256), 260u);
  EXPECT_EQ(*EncodedBytes(v1::CODEC_INT8, 257), 265u);
  EXPECT_EQ(*EncodedBytes(v1::CODEC_INT8, 0), 0u);
}

TEST(CodecFormatTest, RefusesCodecsThatAreNotInThisBuild) {
  float number = 0;
  uint8_t byte = 0;
  for (v1::Codec codec : {v1::CODEC_UNSPECIFIED, v1::CODEC_INT4, v1::CODEC_TOP_K, static_cast<v1::Codec>(77)}) {
    EXPECT_FALSE(IsKnownCodec(codec));
    const absl::Status size = EncodedBytes(codec, 1).status();
    EXPECT_EQ(ReasonOf(size), v1::REASON_BAD_CODEC);
    EXPECT_NE(size.message().find("not in this build"), absl::string_view::npos) << size;
    EXPECT_EQ(ReasonOf(Encode(ScalarKernels(), codec, {&number, 1}, {&byte, 1})), v1::REASON_BAD_CODEC);
    EXPECT_EQ(ReasonOf(Decode(ScalarKernels(), codec, {&byte, 1}, {&number, 1})), v1::REASON_BAD_CODEC);
  }
}

// ------------------------------------------------------------------------------- what every codec must do

class CodecConformanceTest : public testing::TestWithParam<v1::Codec> {
 protected:
  static constexpr size_t kSizes[] = {0, 1, 2, 255, 256, 257, 511, 2047, 2048, 2049, 5000};
};

TEST_P(CodecConformanceTest, RoundTripStaysWithinTheBound) {
  for (size_t n : kSizes) {
    const std::vector<float> x = Numbers(n, static_cast<uint32_t>(n));
    const std::vector<float> y = Decoded(ScalarKernels(), GetParam(), Encoded(ScalarKernels(), GetParam(), x), n);
    for (size_t i = 0; i < n; ++i) ASSERT_LE(std::abs(x[i] - y[i]), ErrorBound(GetParam(), x, i)) << i << " of " << n;
  }
}

TEST_P(CodecConformanceTest, AllKernelsGiveTheSameBytesAndNumbers) {
  for (size_t n : kSizes) {
    const std::vector<float> x = Numbers(n, static_cast<uint32_t>(n) + 1);
    const Bytes bytes = Encoded(ScalarKernels(), GetParam(), x);
    const std::vector<float> y = Decoded(ScalarKernels(), GetParam(), bytes, n);
    for (const Kernels* kernels : AvailableKernels()) {
      EXPECT_EQ(Encoded(*kernels, GetParam(), x), bytes) << kernels->name << " " << n;
      const std::vector<float> other = Decoded(*kernels, GetParam(), bytes, n);
      EXPECT_TRUE(n == 0 || std::memcmp(other.data(), y.data(), n * sizeof(float)) == 0) << kernels->name << " " << n;
    }
  }
}

TEST_P(CodecConformanceTest, AnyAlignmentOfBytesWillDo) {
  constexpr size_t kElements = 1000;
  const std::vector<float> x = Numbers(kElements, 3);
  const Bytes bytes = Encoded(ScalarKernels(), GetParam(), x);
  const std::vector<float> y = Decoded(ScalarKernels(), GetParam(), bytes, kElements);
  for (size_t shift = 1; shift < 8; ++shift) {
    Bytes moved(bytes.size() + shift);
    const absl::Span<uint8_t> place = absl::MakeSpan(moved).subspan(shift);
    ASSERT_TRUE(Encode(ScalarKernels(), GetParam(), x, place).ok());
    EXPECT_TRUE(std::equal(bytes.begin(), bytes.end(), place.begin()));
    EXPECT_EQ(Decoded(ScalarKernels(), GetParam(), place, kElements), y);
  }
}

TEST_P(CodecConformanceTest, ARangeDecodesAsItDoesInTheWhole) {
  constexpr size_t kElements = 5000;
  const Bytes bytes = Encoded(ScalarKernels(), GetParam(), Numbers(kElements, 4));
  const std::vector<float> whole = Decoded(ScalarKernels(), GetParam(), bytes, kElements);
  for (size_t begin : {0, 256, 2048, 4864}) {
    for (size_t count : {1, 136, 256, 3000}) {
      if (begin + count > kElements) continue;
      std::vector<float> part(count);
      ASSERT_TRUE(DecodeRange(ScalarKernels(), GetParam(), bytes, kElements, begin, absl::MakeSpan(part)).ok());
      EXPECT_TRUE(std::equal(part.begin(), part.end(), whole.begin() + begin)) << begin << "+" << count;
    }
  }
}

TEST_P(CodecConformanceTest, WhatWasRoundedOnceStaysAsItIs) {
  const std::vector<float> x = Numbers(3000, 5);
  const std::vector<float> once = Decoded(ScalarKernels(), GetParam(), Encoded(ScalarKernels(), GetParam(), x), 3000);
  const std::vector<float> twice =
      Decoded(ScalarKernels(), GetParam(), Encoded(ScalarKernels(), GetParam(), once), 3000);
  for (size_t i = 0; i < once.size(); ++i) {
    // The scale of INT8 is computed anew and may differ in its last bit.
    const float slack = GetParam() == v1::CODEC_INT8 ? std::abs(once[i]) * 0x1p-22f : 0.0f;
    ASSERT_LE(std::abs(once[i] - twice[i]), slack) << i;
  }
}

TEST_P(CodecConformanceTest, RefusesBytesOfAnotherLength) {
  for (size_t n : {1, 256, 1000}) {
    const uint64_t right = *EncodedBytes(GetParam(), n);
    std::vector<float> x(n);
    for (uint64_t size : {right - 1, right + 1, right * 2, uint64_t{0}}) {
      Bytes bytes(size);
      const absl::Status decode = Decode(ScalarKernels(), GetParam(), bytes, absl::MakeSpan(x));
      EXPECT_EQ(ReasonOf(decode), v1::REASON_SIZE_MISMATCH) << n << " " << size;
      EXPECT_EQ(MetadataOf(decode, "declared_bytes"), absl::StrCat(size));
      EXPECT_EQ(MetadataOf(decode, "required_bytes"), absl::StrCat(right));
      EXPECT_EQ(ReasonOf(Encode(ScalarKernels(), GetParam(), x, absl::MakeSpan(bytes))), v1::REASON_SIZE_MISMATCH);
      EXPECT_EQ(bytes, Bytes(size)) << "untouched";
    }
  }
}

TEST_P(CodecConformanceTest, ArbitraryBytesGiveNumbersOrATypedError) {
  constexpr size_t kElements = 700;
  std::mt19937 random(6);
  std::vector<float> x(kElements);
  Bytes bytes(*EncodedBytes(GetParam(), kElements));
  for (int attempt = 0; attempt < 300; ++attempt) {
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
    const absl::Status status = Decode(ScalarKernels(), GetParam(), bytes, absl::MakeSpan(x));
    EXPECT_TRUE(status.ok() || ReasonOf(status) == v1::REASON_BAD_CODEC) << status;
  }
}

INSTANTIATE_TEST_SUITE_P(AllCodecs, CodecConformanceTest,
                         testing::Values(v1::CODEC_FP32, v1::CODEC_BF16, v1::CODEC_FP16, v1::CODEC_INT8),
                         [](const auto& info) { return NameOf(info.param); });

TEST(Int8Test, RefusesScalesThatNoSenderMakes) {
  constexpr size_t kElements = 600;
  const Bytes good = Encoded(ScalarKernels(), v1::CODEC_INT8, Numbers(kElements, 7));
  std::vector<float> x(kElements);
  for (float scale : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                      -std::numeric_limits<float>::infinity(), -1.0f, -0.0f}) {
    Bytes bytes = good;
    std::memcpy(bytes.data() + 2 * sizeof(float), &scale, sizeof(scale));
    const absl::Status status = Decode(ScalarKernels(), v1::CODEC_INT8, bytes, absl::MakeSpan(x));
    EXPECT_EQ(ReasonOf(status), v1::REASON_BAD_CODEC) << scale;
    EXPECT_EQ(MetadataOf(status, "index"), "2") << "the block";
  }
}

TEST(Int8Test, ZerosAndTinyNumbersEncodeAsZeros) {
  for (float value : {0.0f, -0.0f, std::numeric_limits<float>::denorm_min()}) {
    const Bytes bytes = Encoded(ScalarKernels(), v1::CODEC_INT8, std::vector<float>(300, value));
    for (float y : Decoded(ScalarKernels(), v1::CODEC_INT8, bytes, 300)) EXPECT_EQ(y, 0.0f);
  }
}

// ------------------------------------------------------------------------------------------ error feedback

// One block as a sender does it; returns what the reader sees.
std::vector<float> Send(ErrorFeedback& feedback, v1::Codec codec, std::vector<float> delta) {
  const Kernels& kernels = ScalarKernels();
  feedback.Apply(kernels, absl::MakeSpan(delta));
  const std::vector<float> sent = Decoded(kernels, codec, Encoded(kernels, codec, delta), delta.size());
  feedback.Note(kernels, delta, sent);
  return sent;
}

std::vector<float> ResidualOf(const ErrorFeedback& feedback) {
  return std::vector<float>(feedback.residual().begin(), feedback.residual().end());
}

TEST(ErrorFeedbackTest, NothingIsLostOverManyBlocks) {
  constexpr size_t kElements = 500;
  constexpr int kBlocks = 200;
  // Each block's numbers are far below half a step of the block's largest: alone they would all be rounded away.
  std::vector<float> delta(kElements, 0.001f);
  delta[0] = delta[256] = 1.0f;
  ErrorFeedback feedback;
  std::vector<double> received(kElements), alone(kElements);
  for (int block = 0; block < kBlocks; ++block) {
    const std::vector<float> sent = Send(feedback, v1::CODEC_INT8, delta);
    feedback.Commit();
    for (size_t i = 0; i < kElements; ++i) received[i] += sent[i];
    ErrorFeedback none;
    const std::vector<float> plain = Send(none, v1::CODEC_INT8, delta);
    for (size_t i = 0; i < kElements; ++i) alone[i] += plain[i];
  }
  const double one_step = 1.0 / 127;
  for (size_t i = 0; i < kElements; ++i) {
    EXPECT_NEAR(received[i], kBlocks * static_cast<double>(delta[i]), one_step) << i;
  }
  EXPECT_EQ(alone[1], 0) << "without feedback the small ones would never arrive";
}

TEST(ErrorFeedbackTest, ALostBlockLeavesTheResidualOfBefore) {
  ErrorFeedback feedback;
  Send(feedback, v1::CODEC_BF16, Numbers(100, 8));
  feedback.Commit();
  const std::vector<float> before = ResidualOf(feedback);
  ASSERT_EQ(before.size(), 100u);
  Send(feedback, v1::CODEC_BF16, Numbers(100, 9));
  EXPECT_EQ(ResidualOf(feedback), before) << "not in force before the commit";
  feedback.Drop();
  EXPECT_EQ(ResidualOf(feedback), before);
  feedback.Commit();
  EXPECT_EQ(ResidualOf(feedback), before) << "there is nothing to commit after a drop";
}

TEST(ErrorFeedbackTest, ASecondCommitOfOneBlockChangesNothing) {
  ErrorFeedback feedback;
  Send(feedback, v1::CODEC_BF16, Numbers(100, 10));
  feedback.Commit();
  Send(feedback, v1::CODEC_BF16, Numbers(100, 11));
  feedback.Commit();
  const std::vector<float> after = ResidualOf(feedback);
  feedback.Commit();
  EXPECT_EQ(ResidualOf(feedback), after);
}

TEST(ErrorFeedbackTest, ResetForgetsEverything) {
  ErrorFeedback feedback;
  Send(feedback, v1::CODEC_BF16, Numbers(100, 12));
  feedback.Commit();
  feedback.Reset();
  EXPECT_TRUE(feedback.residual().empty());
  feedback.Commit();
  EXPECT_TRUE(feedback.residual().empty());
}

}  // namespace
}  // namespace bmuf
