#include "core/base/clock.h"

#include <ctime>

namespace bmuf {
namespace {

class RealClock : public Clock {
 public:
  MonotonicTime Now() const override {
    timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return MonotonicTime::FromOrigin(absl::DurationFromTimespec(ts));
  }
  absl::Time WallNow() const override { return absl::Now(); }
};

}  // namespace

const Clock& Clock::Real() {
  static const RealClock* const kClock = new RealClock();
  return *kClock;
}

}  // namespace bmuf
