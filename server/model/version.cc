#include "server/model/version.h"

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/crc32c.h"
#include "core/base/error.h"
#include "core/base/status_macros.h"
#include "core/codec/codec.h"

namespace bmuf {
namespace {

absl::Span<const uint8_t> Bytes(const AlignedBuffer<float>& x) {
  return absl::MakeConstSpan(reinterpret_cast<const uint8_t*>(x.data()), x.size_bytes());
}

// CRC of a long run of bytes, pieces in parallel.
uint32_t ParallelCrc32c(absl::Span<const uint8_t> bytes, ThreadPool& pool) {
  constexpr size_t kPieceBytes = size_t{4} << 20;
  const size_t pieces = (bytes.size() + kPieceBytes - 1) / kPieceBytes;
  std::vector<uint32_t> crcs(pieces);
  const size_t share = std::max<size_t>(1, pieces / (pool.thread_count() + 1));
  const size_t shares = pieces == 0 ? 0 : (pieces + share - 1) / share;
  // ParallelFor splits at multiples of 64; a share is one step of it.
  pool.ParallelFor(64 * shares, 64, [&](size_t begin, size_t end) {
    for (size_t piece = begin / 64 * share; piece < std::min(pieces, end / 64 * share); ++piece) {
      const size_t from = piece * kPieceBytes;
      crcs[piece] = Crc32c(bytes.data() + from, std::min(kPieceBytes, bytes.size() - from));
    }
  });
  uint32_t crc = 0;
  for (size_t piece = 0; piece < pieces; ++piece) {
    crc = CombineCrc32c(crc, crcs[piece], std::min(kPieceBytes, bytes.size() - piece * kPieceBytes));
  }
  return crc;
}

}  // namespace

Version::Version(ModelVersion id, std::shared_ptr<const Layout> layout, AlignedBuffer<float> broadcast,
                 AlignedBuffer<float> model, AlignedBuffer<uint8_t> auxiliary, ThreadPool& pool)
    : id_(id),
      layout_(std::move(layout)),
      broadcast_(std::move(broadcast)),
      model_(std::move(model)),
      auxiliary_(std::move(auxiliary)) {
  digest_ = ExtendCrc32c(ParallelCrc32c(Bytes(broadcast_), pool), auxiliary_.data(), auxiliary_.size());
}

absl::StatusOr<PayloadView> Version::Payload(v1::ModelKind kind, v1::Codec codec, const Kernels& kernels) const {
  if (codec != v1::CODEC_FP32 && codec != v1::CODEC_BF16) {
    return Error(v1::REASON_BAD_CODEC,
                 absl::StrCat("a model is sent as FP32 or BF16, not as codec ", static_cast<int>(codec)));
  }
  if (kind == v1::MODEL_KIND_UNSPECIFIED) kind = v1::MODEL_KIND_BROADCAST;
  if (kind == v1::MODEL_KIND_MODEL && model_.empty()) kind = v1::MODEL_KIND_BROADCAST;
  absl::MutexLock lock(&mu_);
  const auto [it, is_new] = encoded_.try_emplace({kind, codec});
  Encoded& encoded = it->second;
  if (is_new) {
    const AlignedBuffer<float>& source = kind == v1::MODEL_KIND_MODEL ? model_ : broadcast_;
    encoded.view.auxiliary = auxiliary_.span();
    if (codec == v1::CODEC_FP32) {
      encoded.view.bmuf = Bytes(source);
    } else {
      encoded.bytes = AlignedBuffer<uint8_t>::Uninitialized(*EncodedBytes(codec, source.size()));
      RETURN_IF_ERROR(Encode(kernels, codec, source.span(), encoded.bytes.span()));
      encoded.view.bmuf = static_cast<const AlignedBuffer<uint8_t>&>(encoded.bytes).span();
    }
    if (codec == v1::CODEC_FP32 && kind == v1::MODEL_KIND_BROADCAST) {
      encoded.view.digest = digest_;
    } else {
      encoded.view.digest = ExtendCrc32c(Crc32c(encoded.view.bmuf.data(), encoded.view.bmuf.size()), auxiliary_.data(),
                                         auxiliary_.size());
    }
  }
  return encoded.view;
}

}  // namespace bmuf
