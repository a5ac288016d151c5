// A published model: immutable, shared by everyone who reads it, gone when the last reader is.
#ifndef BMUF_SERVER_MODEL_VERSION_H_
#define BMUF_SERVER_MODEL_VERSION_H_

#include <cstdint>
#include <map>
#include <memory>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "bmuf/v1/coordinator_service.pb.h"
#include "core/base/aligned_buffer.h"
#include "core/base/ids.h"
#include "core/base/thread_pool.h"
#include "core/kernels/kernels.h"
#include "core/layout/layout.h"

namespace bmuf {

// A payload as two runs of bytes, in order. Valid as long as the Version it came from.
struct PayloadView {
  absl::Span<const uint8_t> bmuf;
  absl::Span<const uint8_t> auxiliary;
  uint32_t digest = 0;  // CRC32C of both.

  uint64_t size() const { return bmuf.size() + auxiliary.size(); }
  // The longest contiguous bytes from `offset`, at most `most`. Requires offset < size().
  absl::Span<const uint8_t> At(uint64_t offset, uint64_t most) const {
    if (offset < bmuf.size()) return bmuf.subspan(offset, most);
    return auxiliary.subspan(offset - bmuf.size(), most);
  }
};

// Immutable but for a cache of encodings; thread-safe.
class Version {
 public:
  // `model` is empty where it equals `broadcast`.
  Version(ModelVersion id, std::shared_ptr<const Layout> layout, AlignedBuffer<float> broadcast,
          AlignedBuffer<float> model, AlignedBuffer<uint8_t> auxiliary, ThreadPool& pool);

  ModelVersion id() const { return id_; }
  const std::shared_ptr<const Layout>& layout() const { return layout_; }
  // What workers train from.
  const AlignedBuffer<float>& broadcast() const { return broadcast_; }
  // Without look-ahead and in full precision.
  const AlignedBuffer<float>& model() const { return model_.empty() ? broadcast_ : model_; }
  const AlignedBuffer<uint8_t>& auxiliary() const { return auxiliary_; }
  // CRC32C of the broadcast's FP32 payload.
  uint32_t digest() const { return digest_; }

  // The payload of a kind in a codec, encoded at the first call and shared from then on; the first call for a codec
  // that is not FP32 takes long for a large model. Errors: REASON_BAD_CODEC for a codec that is not FP32 or BF16.
  absl::StatusOr<PayloadView> Payload(v1::ModelKind kind, v1::Codec codec, const Kernels& kernels) const
      ABSL_LOCKS_EXCLUDED(mu_);

 private:
  struct Encoded {
    AlignedBuffer<uint8_t> bytes;  // Empty for FP32, which is read in place.
    PayloadView view;
  };

  const ModelVersion id_;
  const std::shared_ptr<const Layout> layout_;
  const AlignedBuffer<float> broadcast_;
  const AlignedBuffer<float> model_;
  const AlignedBuffer<uint8_t> auxiliary_;
  uint32_t digest_;  // Constant after construction.

  mutable absl::Mutex mu_;
  mutable std::map<std::pair<v1::ModelKind, v1::Codec>, Encoded> encoded_ ABSL_GUARDED_BY(mu_);
};

}  // namespace bmuf

#endif  // BMUF_SERVER_MODEL_VERSION_H_
