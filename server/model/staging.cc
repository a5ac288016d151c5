#include "server/model/staging.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "core/base/crc32c.h"
#include "core/base/error.h"
#include "core/base/limits.h"
#include "core/base/status_macros.h"

namespace bmuf {
namespace {

// Pieces of one ParallelFor share: large enough that threads pay, small enough that a decoded piece stays in cache.
constexpr uint64_t kPieceElements = 16 * kNormPieceElements;
static_assert(kPieceElements % kInt8BlockElements == 0);

}  // namespace

absl::StatusOr<uint64_t> Staging::PayloadBytes(const Layout& layout, v1::Codec codec) {
  ASSIGN_OR_RETURN(const uint64_t bmuf_bytes, EncodedBytes(codec, layout.bmuf_elements()));
  return bmuf_bytes + layout.auxiliary_bytes();
}

absl::StatusOr<std::unique_ptr<Staging>> Staging::Create(std::shared_ptr<const Layout> layout, v1::Codec codec,
                                                         uint64_t declared_bytes) {
  ASSIGN_OR_RETURN(const uint64_t required, PayloadBytes(*layout, codec));
  if (declared_bytes != required) {
    return Error(v1::REASON_SIZE_MISMATCH, absl::StrCat("manifest and codec require a payload of ", required,
                                                        " bytes, the header declares ", declared_bytes))
        .With("declared_bytes", declared_bytes)
        .With("required_bytes", required);
  }
  const uint64_t bmuf_bytes = required - layout->auxiliary_bytes();
  return std::unique_ptr<Staging>(new Staging(std::move(layout), codec, bmuf_bytes, required));
}

Staging::Staging(std::shared_ptr<const Layout> layout, v1::Codec codec, uint64_t bmuf_bytes, uint64_t total_bytes)
    : layout_(std::move(layout)),
      codec_(codec),
      bmuf_bytes_(bmuf_bytes),
      payload_(AlignedBuffer<uint8_t>::Uninitialized(total_bytes)) {}

absl::Status Staging::Append(uint64_t offset, absl::Span<const uint8_t> data, uint32_t crc32c) {
  if (data.empty() || data.size() > limits::kMaxChunkBytes) {
    return Error(v1::REASON_BAD_CHUNK,
                 absl::StrCat("a chunk has 1 to ", limits::kMaxChunkBytes, " bytes, not ", data.size()));
  }
  if (offset != received_bytes_) {
    return Error(v1::REASON_OFFSET_MISMATCH,
                 absl::StrCat("the chunk starts at byte ", offset, ", byte ", received_bytes_, " comes next"))
        .With("offset", received_bytes_);
  }
  if (data.size() > payload_.size() - received_bytes_) {
    return Error(v1::REASON_BAD_CHUNK, absl::StrCat("the chunk ends beyond the payload's ", payload_.size(), " bytes"));
  }
  if (Crc32c(data.data(), data.size()) != crc32c) {
    return Error(v1::REASON_CHECKSUM_MISMATCH, absl::StrCat("the chunk at byte ", offset, " was damaged on its way"))
        .With("offset", received_bytes_);
  }
  std::memcpy(payload_.data() + offset, data.data(), data.size());
  crc32c_ = CombineCrc32c(crc32c_, crc32c, data.size());
  received_bytes_ += data.size();
  return absl::OkStatus();
}

absl::Status Staging::Finish(uint32_t digest) {
  if (received_bytes_ != payload_.size()) {
    return Error(v1::REASON_OFFSET_MISMATCH,
                 absl::StrCat("the end came after ", received_bytes_, " of ", payload_.size(), " bytes"))
        .With("offset", received_bytes_);
  }
  if (digest != crc32c_) {
    received_bytes_ = 0;
    crc32c_ = 0;
    return Error(v1::REASON_CHECKSUM_MISMATCH, "the payload's digest does not fit its bytes").With("offset", 0);
  }
  return absl::OkStatus();
}

absl::Status Staging::Walk(const Kernels& kernels, ThreadPool& pool,
                           const std::function<void(uint64_t, absl::Span<const float>)>& body) const {
  const uint64_t elements = layout_->bmuf_elements();
  const absl::Span<const uint8_t> section = payload_.span().subspan(0, bmuf_bytes_);
  absl::Mutex mu;
  absl::Status fault;
  pool.ParallelFor((elements + kPieceElements - 1) / kPieceElements, 1, [&](size_t begin_piece, size_t end_piece) {
    AlignedBuffer<float> decoded;
    for (uint64_t piece = begin_piece; piece < end_piece; ++piece) {
      const uint64_t begin = piece * kPieceElements;
      const uint64_t n = std::min(kPieceElements, elements - begin);
      if (codec_ == v1::CODEC_FP32) {
        body(begin, absl::MakeConstSpan(reinterpret_cast<const float*>(payload_.data()) + begin, n));
        continue;
      }
      if (decoded.empty()) decoded = AlignedBuffer<float>::Uninitialized(kPieceElements);
      const absl::Span<float> out = decoded.span().subspan(0, n);
      if (absl::Status status = DecodeRange(kernels, codec_, section, elements, begin, out); !status.ok()) {
        absl::MutexLock lock(&mu);
        fault.Update(status);
        return;
      }
      body(begin, out);
    }
  });
  return fault;
}

void Staging::ForEachPiece(const Kernels& kernels, ThreadPool& pool,
                           const std::function<void(uint64_t, absl::Span<const float>)>& body) const {
  Walk(kernels, pool, body).IgnoreError();  // Verify decoded the same bytes.
}

absl::StatusOr<Verified> Staging::Verify(const Kernels& kernels, ThreadPool& pool) const {
  const uint64_t elements = layout_->bmuf_elements();
  // Per piece, so that the sums below do not depend on which thread was faster.
  std::vector<double> squares((elements + kPieceElements - 1) / kPieceElements);
  std::vector<float> largest(squares.size());
  std::vector<uint64_t> first_bad(squares.size(), elements);
  RETURN_IF_ERROR(Walk(kernels, pool, [&](uint64_t begin, absl::Span<const float> values) {
    const uint64_t piece = begin / kPieceElements;
    const size_t bad = kernels.first_non_finite(values.data(), values.size());
    if (bad < values.size()) {
      first_bad[piece] = begin + bad;
      return;
    }
    largest[piece] = kernels.max_abs(values.data(), values.size());
    squares[piece] = kernels.sum_of_squares(values.data(), values.size());
  }));
  const auto non_finite = [](const std::string& where) {
    const size_t bracket = where.rfind('[');
    return Error(v1::REASON_NON_FINITE_DELTA, absl::StrCat(where, " is not finite"))
        .With("tensor", where.substr(0, bracket))
        .With("index", where.substr(bracket + 1, where.size() - bracket - 2))
        .Field(where.substr(0, bracket), "not finite");
  };
  for (uint64_t bad : first_bad) {
    if (bad < elements) return non_finite(layout_->NameOfElement(bad));
  }
  for (const Layout::Tensor& tensor : layout_->tensors()) {
    if (tensor.role == v1::TENSOR_ROLE_BMUF || tensor.role == v1::TENSOR_ROLE_LOCAL) continue;
    if (tensor.dtype != v1::DTYPE_F32) continue;
    for (uint64_t i = 0; i < tensor.elements; ++i) {
      float value;
      std::memcpy(&value, auxiliary().data() + tensor.offset + 4 * i, 4);
      if (!std::isfinite(value)) return non_finite(layout_->NameOfAuxiliaryByte(tensor.offset + 4 * i));
    }
  }
  Verified verified;
  verified.digest = crc32c_;
  double total = 0;
  for (double piece : squares) total += piece;
  verified.norm = std::sqrt(total);
  for (float piece : largest) verified.max_abs = std::max(verified.max_abs, piece);
  return verified;
}

}  // namespace bmuf
