// Encodings of the BMUF section of a payload: bytes <-> float. FORMAT.md has the layouts.
//
// Problem: the wire is the cost, and what comes over it may be hostile.
// Idea: a codec is a pure function of a vector; its size follows from the number of elements alone, so a lying header
// is found before a byte is read. Lossy codecs are paired with error feedback on the sender.
#ifndef BMUF_CORE_CODEC_CODEC_H_
#define BMUF_CORE_CODEC_CODEC_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "bmuf/v1/types.pb.h"
#include "core/base/aligned_buffer.h"
#include "core/kernels/kernels.h"

namespace bmuf {

// Whether this build has `codec`.
bool IsKnownCodec(v1::Codec codec);

// Encoded size of `elements` numbers. Errors: REASON_BAD_CODEC for one this build does not have.
absl::StatusOr<uint64_t> EncodedBytes(v1::Codec codec, uint64_t elements);

// Encodes all of `x` (finite) into `out` of exactly EncodedBytes(codec, x.size()). Thread-safe. Errors: BAD_CODEC,
// SIZE_MISMATCH for a wrong size of `out`; `out` is then untouched.
absl::Status Encode(const Kernels& kernels, v1::Codec codec, absl::Span<const float> x, absl::Span<uint8_t> out);

// Decodes `bytes` into all of `out`; `bytes` has any alignment. Thread-safe. What comes out may hold NaN or infinities
// if the codec can express them: the caller scans. Errors: BAD_CODEC for an unknown codec or a scale that is negative,
// NaN or infinite (metadata `index`: its block), SIZE_MISMATCH; `out` is then unspecified.
absl::Status Decode(const Kernels& kernels, v1::Codec codec, absl::Span<const uint8_t> bytes, absl::Span<float> out);

// The same for the elements [begin, begin + out.size()) of a section of `elements` numbers. Requires that `begin` is a
// multiple of kInt8BlockElements and the range lies inside.
absl::Status DecodeRange(const Kernels& kernels, v1::Codec codec, absl::Span<const uint8_t> bytes, uint64_t elements,
                         uint64_t begin, absl::Span<float> out);

// What a lossy codec left out of the deltas sent so far, added to the next one (Seide et al. 2014).
//
// Usage per block: Apply(delta); Encode(delta); ... pushed and committed: Commit(). Refused for good: Drop() keeps the
// residual of before, so that the block is lost but nothing else.
// Thread-compatible.
class ErrorFeedback {
 public:
  // Adds the residual to `delta`. The size is that of the first call.
  void Apply(const Kernels& kernels, absl::Span<float> delta);
  // Notes what `sent` (the decoded encoding of `delta` after Apply) misses. In force after Commit().
  void Note(const Kernels& kernels, absl::Span<const float> delta, absl::Span<const float> sent);
  // Each without effect if nothing was noted since the last of them.
  void Commit();
  void Drop();
  // Forgets everything: after a rollback the residual belongs to another past.
  void Reset();

  // The residual in force; empty before the first Commit.
  absl::Span<const float> residual() const { return residual_.span(); }

 private:
  AlignedBuffer<float> residual_;
  AlignedBuffer<float> noted_;
  bool has_note_ = false;  // noted_ is of a block that is neither committed nor dropped.
};

}  // namespace bmuf

#endif  // BMUF_CORE_CODEC_CODEC_H_
