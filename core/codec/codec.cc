#include "core/codec/codec.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"

namespace bmuf {
namespace {

uint64_t Int8Blocks(uint64_t elements) {
  return elements / kInt8BlockElements + (elements % kInt8BlockElements != 0 ? 1 : 0);
}

absl::Status UnknownCodec(v1::Codec codec) {
  return Error(v1::REASON_BAD_CODEC,
               absl::StrCat("codec ", static_cast<int>(codec), " is not in this build; it has FP32, BF16, FP16, INT8"));
}

absl::Status CheckSize(uint64_t got, v1::Codec codec, uint64_t elements) {
  absl::StatusOr<uint64_t> want = EncodedBytes(codec, elements);
  if (!want.ok()) return want.status();
  if (got == *want) return absl::OkStatus();
  return Error(v1::REASON_SIZE_MISMATCH, absl::StrCat(elements, " elements take ", *want, " bytes, not ", got))
      .With("declared_bytes", got)
      .With("required_bytes", *want);
}

// Conversions run over pieces that stay in cache; bytes from the wire have no alignment, and arrays of the wider types
// are reached by copying a piece.
constexpr size_t kPiece = 2048;

}  // namespace

bool IsKnownCodec(v1::Codec codec) {
  return codec == v1::CODEC_FP32 || codec == v1::CODEC_BF16 || codec == v1::CODEC_FP16 || codec == v1::CODEC_INT8;
}

absl::StatusOr<uint64_t> EncodedBytes(v1::Codec codec, uint64_t elements) {
  switch (codec) {
    case v1::CODEC_FP32:
      return 4 * elements;
    case v1::CODEC_BF16:
    case v1::CODEC_FP16:
      return 2 * elements;
    case v1::CODEC_INT8:
      return sizeof(float) * Int8Blocks(elements) + elements;
    default:
      return UnknownCodec(codec);
  }
}

absl::Status Encode(const Kernels& kernels, v1::Codec codec, absl::Span<const float> x, absl::Span<uint8_t> out) {
  if (absl::Status size = CheckSize(out.size(), codec, x.size()); !size.ok()) return size;
  if (x.empty()) return absl::OkStatus();
  if (codec == v1::CODEC_FP32) {
    std::memcpy(out.data(), x.data(), out.size());
    return absl::OkStatus();
  }
  uint8_t* const quantised = out.data() + sizeof(float) * Int8Blocks(x.size());
  for (size_t begin = 0; begin < x.size(); begin += kPiece) {
    const size_t n = std::min(kPiece, x.size() - begin);
    if (codec == v1::CODEC_INT8) {
      float scales[kPiece / kInt8BlockElements];
      kernels.int8_encode(scales, reinterpret_cast<int8_t*>(quantised + begin), x.data() + begin, n);
      std::memcpy(out.data() + sizeof(float) * (begin / kInt8BlockElements), scales, sizeof(float) * Int8Blocks(n));
    } else {
      uint16_t halves[kPiece];
      (codec == v1::CODEC_BF16 ? kernels.bf16_encode : kernels.fp16_encode)(halves, x.data() + begin, n);
      std::memcpy(out.data() + 2 * begin, halves, 2 * n);
    }
  }
  return absl::OkStatus();
}

absl::Status Decode(const Kernels& kernels, v1::Codec codec, absl::Span<const uint8_t> bytes, absl::Span<float> out) {
  return DecodeRange(kernels, codec, bytes, out.size(), 0, out);
}

absl::Status DecodeRange(const Kernels& kernels, v1::Codec codec, absl::Span<const uint8_t> bytes, uint64_t elements,
                         uint64_t begin, absl::Span<float> out) {
  if (absl::Status size = CheckSize(bytes.size(), codec, elements); !size.ok()) return size;
  if (out.empty()) return absl::OkStatus();
  if (codec == v1::CODEC_FP32) {
    std::memcpy(out.data(), bytes.data() + sizeof(float) * begin, sizeof(float) * out.size());
    return absl::OkStatus();
  }
  const uint8_t* const quantised = bytes.data() + sizeof(float) * Int8Blocks(elements);
  const uint64_t end = begin + out.size();
  for (uint64_t at = begin; at < end; at += kPiece) {
    const size_t n = std::min<uint64_t>(kPiece, end - at);
    float* const to = out.data() + (at - begin);
    if (codec == v1::CODEC_INT8) {
      float scales[kPiece / kInt8BlockElements];
      const uint64_t first = at / kInt8BlockElements;
      std::memcpy(scales, bytes.data() + sizeof(float) * first, sizeof(float) * Int8Blocks(n));
      for (size_t i = 0; i < Int8Blocks(n); ++i) {
        if (std::isfinite(scales[i]) && !std::signbit(scales[i])) continue;
        return Error(v1::REASON_BAD_CODEC, absl::StrCat("the scale of block ", first + i, " is ", scales[i],
                                                        "; a scale is finite and not negative"))
            .With("index", first + i);
      }
      kernels.int8_decode(to, scales, reinterpret_cast<const int8_t*>(quantised + at), n);
    } else {
      uint16_t halves[kPiece];
      std::memcpy(halves, bytes.data() + 2 * at, 2 * n);
      (codec == v1::CODEC_BF16 ? kernels.bf16_decode : kernels.fp16_decode)(to, halves, n);
    }
  }
  return absl::OkStatus();
}

void ErrorFeedback::Apply(const Kernels& kernels, absl::Span<float> delta) {
  if (residual_.empty()) return;
  kernels.add(delta.data(), delta.data(), residual_.data(), delta.size());
}

void ErrorFeedback::Note(const Kernels& kernels, absl::Span<const float> delta, absl::Span<const float> sent) {
  if (noted_.size() != delta.size()) noted_ = AlignedBuffer<float>::Uninitialized(delta.size());
  kernels.subtract(noted_.data(), delta.data(), sent.data(), delta.size());
  has_note_ = true;
}

void ErrorFeedback::Commit() {
  if (!has_note_) return;
  std::swap(residual_, noted_);  // The old residual's memory takes the next note.
  has_note_ = false;
}

void ErrorFeedback::Drop() { has_note_ = false; }

void ErrorFeedback::Reset() {
  residual_ = AlignedBuffer<float>();
  noted_ = AlignedBuffer<float>();
  has_note_ = false;
}

}  // namespace bmuf
