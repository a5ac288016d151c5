// Names that come from outside: of jobs and workers, and free text that ends up in a log.
#ifndef BMUF_CORE_BASE_NAMES_H_
#define BMUF_CORE_BASE_NAMES_H_

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace bmuf {

// OK if `name` matches [A-Za-z0-9]([A-Za-z0-9._-]{0,62}[A-Za-z0-9])? and contains no "..": safe as a path element, a
// metric label and in a log line. Otherwise REASON_INVALID_NAME naming `field`; the text of the error shows the name
// escaped.
absl::Status ValidateName(absl::string_view field, absl::string_view name);

// `text` cut to kMaxPeerTextBytes, with control characters (C0, C1, DEL), bidirectional marks and invalid UTF-8 shown
// as \xNN.
std::string EscapeForLog(absl::string_view text);

}  // namespace bmuf

#endif  // BMUF_CORE_BASE_NAMES_H_
