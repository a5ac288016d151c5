#include "server/coordinator/push.h"

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "core/base/error.h"

namespace bmuf::coordinator {

void Push::Conclude(Ending ending) {
  if (concluded_) return;
  concluded_ = true;
  ended_(std::move(ending));
}

bool Push::Append(const v1::Chunk& chunk) {
  if (concluded_) return false;
  absl::Status status;
  {
    absl::MutexLock lock(&mu_);
    if (closed_ || staging_ == nullptr) return false;
    const std::string& data = chunk.data();
    status = staging_->Append(chunk.offset(),
                              absl::MakeConstSpan(reinterpret_cast<const uint8_t*>(data.data()), data.size()),
                              chunk.crc32c());
    received_bytes_.store(staging_->received_bytes(), std::memory_order_relaxed);
  }
  if (status.ok()) return true;
  // After a damaged chunk the sound bytes before it need not be sent again.
  Conclude({status, ReasonOf(status) == v1::REASON_CHECKSUM_MISMATCH});
  return false;
}

void Push::End(uint32_t digest) {
  if (concluded_) return;
  absl::Status status;
  {
    absl::MutexLock lock(&mu_);
    if (closed_ || staging_ == nullptr) return;
    if (staging_->received_bytes() != staging_->total_bytes()) {
      status = Error(v1::REASON_BAD_CHUNK, absl::StrCat("the end came after ", staging_->received_bytes(), " of ",
                                                        staging_->total_bytes(), " bytes"));
    } else {
      status = staging_->Finish(digest);
    }
  }
  Conclude({status, false});
}

void Push::Fail(const absl::Status& status, bool resumable) { Conclude({status, resumable}); }

void Push::Admit(std::shared_ptr<Staging> staging) {
  received_bytes_.store(staging->received_bytes(), std::memory_order_relaxed);
  {
    absl::MutexLock lock(&mu_);
    staging_ = std::move(staging);
  }
  callbacks_.admitted();
}

std::shared_ptr<Staging> Push::Close() {
  absl::MutexLock lock(&mu_);
  closed_ = true;
  return std::move(staging_);
}

std::shared_ptr<Staging> Push::staging() const {
  absl::MutexLock lock(&mu_);
  return staging_;
}

void Push::Answer(absl::StatusOr<v1::PushDeltaResponse> answer) {
  Callbacks callbacks = std::move(callbacks_);
  callbacks.done(std::move(answer));
}

}  // namespace bmuf::coordinator
