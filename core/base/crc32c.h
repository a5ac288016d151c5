// CRC32C (Castagnoli), as in iSCSI and RFC 3720 B.4: crc of "123456789" is 0xe3069283.
#ifndef BMUF_CORE_BASE_CRC32C_H_
#define BMUF_CORE_BASE_CRC32C_H_

#include <cstddef>
#include <cstdint>

namespace bmuf {

// The CRC of A followed by the `size` bytes at `data`, where `crc` is the CRC of A (0 for nothing).
uint32_t ExtendCrc32c(uint32_t crc, const void* data, size_t size);

inline uint32_t Crc32c(const void* data, size_t size) { return ExtendCrc32c(0, data, size); }

// The CRC of A followed by B from their CRCs and B's length, in O(log size_b).
uint32_t CombineCrc32c(uint32_t crc_a, uint32_t crc_b, uint64_t size_b);

}  // namespace bmuf

#endif  // BMUF_CORE_BASE_CRC32C_H_
