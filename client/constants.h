// Numbers of a client's behaviour; the same as in client/python/bmuf/constants.py.
#ifndef BMUF_CLIENT_CONSTANTS_H_
#define BMUF_CLIENT_CONSTANTS_H_

#include <cstddef>
#include <cstdint>

#include "absl/time/time.h"

namespace bmuf::client {

inline constexpr uint32_t kProtocolVersion = 1;
inline constexpr size_t kChunkBytes = size_t{1} << 20;
inline constexpr absl::Duration kUnaryTimeout = absl::Seconds(10);
// A transfer ends when nothing moved for this long, however long it takes in all.
inline constexpr absl::Duration kIdleTimeout = absl::Seconds(30);
inline constexpr absl::Duration kBackoffFirst = absl::Milliseconds(200);
inline constexpr absl::Duration kBackoffCap = absl::Seconds(10);
// Tries of a transfer that is damaged or too slow each time: what does not heal by then has a cause that stays.
inline constexpr int kRetryAttempts = 5;
inline constexpr absl::Duration kKeepaliveTime = absl::Seconds(30);
inline constexpr absl::Duration kKeepaliveTimeout = absl::Seconds(10);

}  // namespace bmuf::client

#endif  // BMUF_CLIENT_CONSTANTS_H_
