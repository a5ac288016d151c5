#include "core/base/names.h"

#include <cstdint>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "core/base/error.h"
#include "core/base/limits.h"

namespace bmuf {
namespace {

// Length of the valid UTF-8 sequence at the start of `s` (1 to 4) and its code point, or 0.
size_t DecodeUtf8(absl::string_view s, uint32_t* code_point) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(s[i]); };
  const unsigned char b = byte(0);
  const size_t length = b < 0x80 ? 1 : (b >> 5) == 6 ? 2 : (b >> 4) == 14 ? 3 : (b >> 3) == 30 ? 4 : 0;
  if (length == 0 || length > s.size()) return 0;
  uint32_t value = length == 1 ? b : b & (0x7f >> length);
  for (size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return 0;
    value = value << 6 | (byte(i) & 0x3f);
  }
  constexpr uint32_t kLeast[] = {0, 0, 0x80, 0x800, 0x10000};
  if (value < kLeast[length] || value > 0x10ffff || (value >= 0xd800 && value <= 0xdfff)) return 0;
  *code_point = value;
  return length;
}

bool IsHarmless(uint32_t c) {
  if (c < 0x20 || (c >= 0x7f && c < 0xa0)) return false;
  // Marks that turn or hide text: bidirectional controls, zero-width characters, separators, byte order mark.
  if ((c >= 0x200b && c <= 0x200f) || (c >= 0x2028 && c <= 0x202e) || (c >= 0x2060 && c <= 0x206f)) return false;
  return c != 0xfeff && c != 0x061c;
}

}  // namespace

absl::Status ValidateName(absl::string_view field, absl::string_view name) {
  bool ok = !name.empty() && name.size() <= limits::kMaxNameBytes && absl::ascii_isalnum(name.front()) &&
            absl::ascii_isalnum(name.back()) && name.find("..") == absl::string_view::npos;
  for (char c : name) ok = ok && (absl::ascii_isalnum(c) || c == '.' || c == '_' || c == '-');
  if (ok) return absl::OkStatus();
  constexpr absl::string_view kRule =
      "must be 1 to 64 characters of A-Z a-z 0-9 . _ -, start and end with a letter or digit, and not contain \"..\"";
  return Error(v1::REASON_INVALID_NAME, absl::StrCat(field, " \"", EscapeForLog(name), "\" ", kRule))
      .Field(field, kRule);
}

std::string EscapeForLog(absl::string_view text) {
  std::string out;
  bool cut = text.size() > limits::kMaxPeerTextBytes;
  text = text.substr(0, limits::kMaxPeerTextBytes);
  while (!text.empty()) {
    uint32_t code_point = 0;
    size_t length = DecodeUtf8(text, &code_point);
    if (length > 0 && IsHarmless(code_point)) {
      absl::StrAppend(&out, text.substr(0, length));
    } else {
      if (length == 0) length = 1;
      for (char c : text.substr(0, length)) absl::StrAppendFormat(&out, "\\x%02x", static_cast<unsigned char>(c));
    }
    text.remove_prefix(length);
  }
  if (cut) out += "...";
  return out;
}

}  // namespace bmuf
