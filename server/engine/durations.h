// google.protobuf.Duration to and from absl::Duration, and durations for people.
#ifndef BMUF_SERVER_ENGINE_DURATIONS_H_
#define BMUF_SERVER_ENGINE_DURATIONS_H_

#include <cstdint>
#include <string>

#include "absl/time/time.h"
#include "google/protobuf/duration.pb.h"

namespace bmuf::engine {

inline absl::Duration ToDuration(const google::protobuf::Duration& d) {
  return absl::Seconds(d.seconds()) + absl::Nanoseconds(d.nanos());
}

inline void SetDuration(absl::Duration d, google::protobuf::Duration* out) {
  const int64_t nanos = absl::ToInt64Nanoseconds(d);
  out->set_seconds(nanos / 1'000'000'000);
  out->set_nanos(static_cast<int32_t>(nanos % 1'000'000'000));
}

// Rounded up to whole seconds, below a second to milliseconds: "1m30s", "250ms".
inline std::string ForPeople(absl::Duration d) {
  if (d == absl::ZeroDuration()) return "0s";
  return absl::FormatDuration(absl::Ceil(d, d < absl::Seconds(1) ? absl::Milliseconds(1) : absl::Seconds(1)));
}

}  // namespace bmuf::engine

#endif  // BMUF_SERVER_ENGINE_DURATIONS_H_
