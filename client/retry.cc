#include "client/retry.h"

#include <algorithm>
#include <cmath>

#include "client/constants.h"
#include "core/base/error.h"

namespace bmuf::client {

RetryDecision DecideRetry(const absl::Status& error, int attempt, double jitter) {
  RetryDecision decision;
  switch (ReasonOf(error)) {
    case v1::REASON_SESSION_NOT_FOUND:
    case v1::REASON_EPOCH_CHANGED:
    case v1::REASON_RECOVERING:
    case v1::REASON_DRAINING:
      decision.remedy = Remedy::kReattach;
      break;
    case v1::REASON_UPLOAD_BUDGET:
    case v1::REASON_DISK:
    case v1::REASON_TOO_MANY:
    case v1::REASON_JOB_PAUSED:
    case v1::REASON_TRANSFER_CANCELLED:
      decision.remedy = Remedy::kRetry;
      break;
    case v1::REASON_OFFSET_MISMATCH:
    case v1::REASON_CHECKSUM_MISMATCH:
    case v1::REASON_TOO_SLOW:
      if (attempt + 1 >= kRetryAttempts) return decision;
      decision.remedy = Remedy::kRetry;
      break;
    case v1::REASON_STALE_ROUND:
    case v1::REASON_VERSION_AHEAD:
    case v1::REASON_BASE_MISMATCH:
    case v1::REASON_NO_MODEL:
      decision.remedy = Remedy::kStale;
      return decision;
    case v1::REASON_UNSPECIFIED:
      // No answer of ours: the connection or a proxy. A deadline is one of our own, hence a silent peer.
      if (error.code() != absl::StatusCode::kUnavailable && error.code() != absl::StatusCode::kDeadlineExceeded) {
        return decision;
      }
      decision.remedy = Remedy::kRetry;
      break;
    default:
      return decision;
  }
  const absl::Duration cap = std::min(kBackoffCap, kBackoffFirst * std::pow(2.0, std::min(attempt, 16)));
  decision.delay = RetryDelayOf(error).value_or(absl::ZeroDuration()) + cap * jitter;
  return decision;
}

}  // namespace bmuf::client
