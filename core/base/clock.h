// Time as an injected dependency.
//
// Decisions use only MonotonicTime; wall time appears in logs, records for people and file metadata, and never steers
// anything, so that a clock step cannot expire a worker.
#ifndef BMUF_CORE_BASE_CLOCK_H_
#define BMUF_CORE_BASE_CLOCK_H_

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace bmuf {

// An instant on a clock that never goes back and has no meaning outside this process.
class MonotonicTime {
 public:
  constexpr MonotonicTime() = default;  // The clock's origin.
  static constexpr MonotonicTime FromOrigin(absl::Duration d) { return MonotonicTime(d); }
  static MonotonicTime InfiniteFuture() { return MonotonicTime(absl::InfiniteDuration()); }

  constexpr absl::Duration since_origin() const { return since_origin_; }
  bool is_infinite_future() const { return since_origin_ == absl::InfiniteDuration(); }

  friend MonotonicTime operator+(MonotonicTime t, absl::Duration d) { return MonotonicTime(t.since_origin_ + d); }
  friend MonotonicTime operator-(MonotonicTime t, absl::Duration d) { return MonotonicTime(t.since_origin_ - d); }
  friend absl::Duration operator-(MonotonicTime a, MonotonicTime b) { return a.since_origin_ - b.since_origin_; }
  friend bool operator==(MonotonicTime a, MonotonicTime b) { return a.since_origin_ == b.since_origin_; }
  friend bool operator!=(MonotonicTime a, MonotonicTime b) { return a.since_origin_ != b.since_origin_; }
  friend bool operator<(MonotonicTime a, MonotonicTime b) { return a.since_origin_ < b.since_origin_; }
  friend bool operator<=(MonotonicTime a, MonotonicTime b) { return a.since_origin_ <= b.since_origin_; }
  friend bool operator>(MonotonicTime a, MonotonicTime b) { return a.since_origin_ > b.since_origin_; }
  friend bool operator>=(MonotonicTime a, MonotonicTime b) { return a.since_origin_ >= b.since_origin_; }

 private:
  constexpr explicit MonotonicTime(absl::Duration d) : since_origin_(d) {}
  absl::Duration since_origin_ = absl::ZeroDuration();
};

// Thread-safe.
class Clock {
 public:
  virtual ~Clock() = default;
  virtual MonotonicTime Now() const = 0;
  // For people and file metadata only.
  virtual absl::Time WallNow() const = 0;

  // CLOCK_MONOTONIC and the system's wall clock. Never destroyed.
  static const Clock& Real();
};

// A clock that moves only when told. Thread-safe.
class ManualClock : public Clock {
 public:
  explicit ManualClock(absl::Time wall_start = absl::UnixEpoch()) : wall_(wall_start) {}

  MonotonicTime Now() const override {
    absl::MutexLock lock(&mu_);
    return now_;
  }
  absl::Time WallNow() const override {
    absl::MutexLock lock(&mu_);
    return wall_;
  }
  // Moves both clocks forward. Requires d >= 0.
  void Advance(absl::Duration d) {
    absl::MutexLock lock(&mu_);
    now_ = now_ + d;
    wall_ += d;
  }
  // Steps the wall clock alone, as NTP does.
  void StepWall(absl::Duration d) {
    absl::MutexLock lock(&mu_);
    wall_ += d;
  }

 private:
  mutable absl::Mutex mu_;
  MonotonicTime now_ ABSL_GUARDED_BY(mu_);
  absl::Time wall_ ABSL_GUARDED_BY(mu_);
};

}  // namespace bmuf

#endif  // BMUF_CORE_BASE_CLOCK_H_
