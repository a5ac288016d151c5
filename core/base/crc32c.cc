#include "core/base/crc32c.h"

#include <isa-l.h>

#include <algorithm>
#include <array>

namespace bmuf {
namespace {

constexpr uint32_t kReflectedPolynomial = 0x82f63b78u;

// Polynomial product a * b modulo the CRC's, bit-reflected: x^0 is the top bit.
uint32_t Multiply(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (uint32_t bit = 0x80000000u; bit != 0; bit >>= 1) {
    if (a & bit) product ^= b;
    b = (b & 1) ? (b >> 1) ^ kReflectedPolynomial : b >> 1;
  }
  return product;
}

// x^(8 * bytes) modulo the CRC's polynomial.
uint32_t PowerOfXBytes(uint64_t bytes) {
  uint32_t result = 0x80000000u;  // x^0
  uint32_t square = 0x00800000u;  // x^8
  for (; bytes != 0; bytes >>= 1) {
    if (bytes & 1) result = Multiply(result, square);
    square = Multiply(square, square);
  }
  return result;
}

}  // namespace

uint32_t ExtendCrc32c(uint32_t crc, const void* data, size_t size) {
  // The library takes an int length and leaves both inversions to the caller.
  constexpr size_t kMaxPiece = size_t{1} << 30;
  auto* p = static_cast<unsigned char*>(const_cast<void*>(data));
  uint32_t state = ~crc;
  while (size > 0) {
    size_t piece = std::min(size, kMaxPiece);
    state = crc32_iscsi(p, static_cast<int>(piece), state);
    p += piece;
    size -= piece;
  }
  return ~state;
}

uint32_t CombineCrc32c(uint32_t crc_a, uint32_t crc_b, uint64_t size_b) {
  return Multiply(crc_a, PowerOfXBytes(size_b)) ^ crc_b;
}

}  // namespace bmuf
