// Versions of the wire protocol that this build speaks.
#ifndef BMUF_SERVER_COORDINATOR_PROTOCOL_H_
#define BMUF_SERVER_COORDINATOR_PROTOCOL_H_

#include <cstdint>

namespace bmuf::coordinator {

inline constexpr uint32_t kProtocolVersion = 1;
inline constexpr uint32_t kOldestProtocolVersion = 1;

}  // namespace bmuf::coordinator

#endif  // BMUF_SERVER_COORDINATOR_PROTOCOL_H_
