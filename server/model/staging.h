// The payload of one push while it comes in, apart from everything until all of it was checked.
//
// Life: made with its final size -> Append chunk by chunk -> Finish -> Verify -> read by Accumulator or as the initial
// model. Dropping it at any point leaves nothing behind.
#ifndef BMUF_SERVER_MODEL_STAGING_H_
#define BMUF_SERVER_MODEL_STAGING_H_

#include <cstdint>
#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "core/base/aligned_buffer.h"
#include "core/base/thread_pool.h"
#include "core/codec/codec.h"
#include "core/kernels/kernels.h"
#include "core/layout/layout.h"

namespace bmuf {

// What Verify found.
struct Verified {
  uint32_t digest = 0;  // CRC32C of the payload as received.
  double norm = 0;      // L2 of the decoded BMUF section.
  float max_abs = 0;    // Largest magnitude of the decoded BMUF section.
};

// Thread-compatible: one thread at a time, handed over with the usual synchronisation.
class Staging {
 public:
  // Size of a payload. Errors: REASON_BAD_CODEC.
  static absl::StatusOr<uint64_t> PayloadBytes(const Layout& layout, v1::Codec codec);

  // Errors: REASON_BAD_CODEC; REASON_SIZE_MISMATCH if `declared_bytes` is not what layout and codec require.
  static absl::StatusOr<std::unique_ptr<Staging>> Create(std::shared_ptr<const Layout> layout, v1::Codec codec,
                                                         uint64_t declared_bytes);

  // Adds the next bytes. Errors, each leaving what was received before in place: REASON_OFFSET_MISMATCH (metadata
  // `offset`: where to go on), REASON_BAD_CHUNK (empty, longer than a chunk or than the payload),
  // REASON_CHECKSUM_MISMATCH.
  absl::Status Append(uint64_t offset, absl::Span<const uint8_t> data, uint32_t crc32c);

  // Errors: REASON_OFFSET_MISMATCH if bytes are missing; REASON_CHECKSUM_MISMATCH if `digest` is not that of the bytes:
  // then everything received is forgotten, since nobody knows which part is wrong.
  absl::Status Finish(uint32_t digest);

  // Decodes and scans everything; long for a large model, so called on a compute thread. Errors:
  // REASON_NON_FINITE_DELTA naming tensor and index, REASON_BAD_CODEC. Requires that Finish succeeded.
  absl::StatusOr<Verified> Verify(const Kernels& kernels, ThreadPool& pool) const;

  // Calls `body(begin, values)` for consecutive ranges of the decoded BMUF section, in parallel, splits at multiples of
  // kNormPieceElements. Requires that Verify succeeded, so that decoding cannot fail.
  void ForEachPiece(const Kernels& kernels, ThreadPool& pool,
                    const std::function<void(uint64_t begin, absl::Span<const float> values)>& body) const;

  // Forgets what was received.
  void Restart() {
    received_bytes_ = 0;
    crc32c_ = 0;
  }

  const Layout& layout() const { return *layout_; }
  v1::Codec codec() const { return codec_; }
  uint64_t received_bytes() const { return received_bytes_; }
  uint64_t total_bytes() const { return payload_.size(); }
  uint32_t crc32c() const { return crc32c_; }
  // The auxiliary section.
  absl::Span<const uint8_t> auxiliary() const { return payload_.span().subspan(bmuf_bytes_); }

 private:
  Staging(std::shared_ptr<const Layout> layout, v1::Codec codec, uint64_t bmuf_bytes, uint64_t total_bytes);
  absl::Status Walk(const Kernels& kernels, ThreadPool& pool,
                    const std::function<void(uint64_t begin, absl::Span<const float> values)>& body) const;

  const std::shared_ptr<const Layout> layout_;
  const v1::Codec codec_;
  const uint64_t bmuf_bytes_;
  AlignedBuffer<uint8_t> payload_;
  uint64_t received_bytes_ = 0;
  uint32_t crc32c_ = 0;
};

}  // namespace bmuf

#endif  // BMUF_SERVER_MODEL_STAGING_H_
