// One number that all buffers of model size are taken from, so that the daemon refuses work instead of dying of it.
#ifndef BMUF_SERVER_MODEL_MEMORY_BUDGET_H_
#define BMUF_SERVER_MODEL_MEMORY_BUDGET_H_

#include <cstdint>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "core/base/error.h"

namespace bmuf {

// Thread-safe.
class MemoryBudget {
 public:
  // A part of the budget, given back on destruction. Move-only. The budget outlives it.
  class Reservation {
   public:
    Reservation() = default;
    Reservation(Reservation&& other) noexcept
        : budget_(std::exchange(other.budget_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
    Reservation& operator=(Reservation&& other) noexcept {
      Release();
      budget_ = std::exchange(other.budget_, nullptr);
      bytes_ = std::exchange(other.bytes_, 0);
      return *this;
    }
    ~Reservation() { Release(); }
    uint64_t bytes() const { return bytes_; }

   private:
    friend class MemoryBudget;
    Reservation(MemoryBudget* budget, uint64_t bytes) : budget_(budget), bytes_(bytes) {}
    void Release() {
      if (budget_ != nullptr) budget_->Return(bytes_);
      budget_ = nullptr;
    }
    MemoryBudget* budget_ = nullptr;
    uint64_t bytes_ = 0;
  };

  explicit MemoryBudget(uint64_t limit_bytes) : limit_bytes_(limit_bytes) {}

  // Takes `bytes` for `what`. Errors: REASON_MODEL_TOO_LARGE with both numbers; nothing is taken then.
  absl::StatusOr<Reservation> Reserve(uint64_t bytes, absl::string_view what) ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    if (bytes > limit_bytes_ - used_bytes_) {
      return Error(v1::REASON_MODEL_TOO_LARGE,
                   absl::StrCat(what, " needs ", bytes, " bytes; of ", limit_bytes_, " bytes allowed, ",
                                limit_bytes_ - used_bytes_, " are free"))
          .With("required_bytes", bytes)
          .With("limit_bytes", limit_bytes_);
    }
    used_bytes_ += bytes;
    return Reservation(this, bytes);
  }

  uint64_t limit_bytes() const { return limit_bytes_; }
  uint64_t used_bytes() const ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    return used_bytes_;
  }

 private:
  void Return(uint64_t bytes) ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    used_bytes_ -= bytes;
  }

  const uint64_t limit_bytes_;
  mutable absl::Mutex mu_;
  uint64_t used_bytes_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace bmuf

#endif  // BMUF_SERVER_MODEL_MEMORY_BUDGET_H_
