// Early return on errors, under the names upstream Abseil users know.
#ifndef BMUF_CORE_BASE_STATUS_MACROS_H_
#define BMUF_CORE_BASE_STATUS_MACROS_H_

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#define BMUF_CONCAT_INNER_(a, b) a##b
#define BMUF_CONCAT_(a, b) BMUF_CONCAT_INNER_(a, b)

// Returns the status of `expr` from the enclosing function unless it is OK.
#define RETURN_IF_ERROR(expr)                           \
  do {                                                  \
    if (absl::Status status_ = (expr); !status_.ok()) { \
      return status_;                                   \
    }                                                   \
  } while (false)

// Evaluates `expr` (an absl::StatusOr), returns its status on error, else moves its value into `lhs`.
#define ASSIGN_OR_RETURN(lhs, expr) ASSIGN_OR_RETURN_IMPL_(BMUF_CONCAT_(status_or_, __LINE__), lhs, expr)
#define ASSIGN_OR_RETURN_IMPL_(result, lhs, expr) \
  auto result = (expr);                           \
  if (!result.ok()) return result.status();       \
  lhs = std::move(result).value()

#endif  // BMUF_CORE_BASE_STATUS_MACROS_H_
