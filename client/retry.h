// What a client does with an error: a pure function, so that every case is a row of a test.
#ifndef BMUF_CLIENT_RETRY_H_
#define BMUF_CLIENT_RETRY_H_

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace bmuf::client {

enum class Remedy {
  kNone,      // Permanent: the user is told.
  kRetry,     // The same call again after the delay.
  kReattach,  // Join again after the delay, then go on.
  kStale,     // This block does not count: pull, go on with the round the error names.
};

struct RetryDecision {
  Remedy remedy = Remedy::kNone;
  absl::Duration delay;
};

// `attempt`: failures of this call so far, from 0. `jitter` in [0, 1): drawn by the caller. Full jitter: the delay is
// jitter * min(cap, first * 2^attempt), plus what the server asked for.
RetryDecision DecideRetry(const absl::Status& error, int attempt, double jitter);

}  // namespace bmuf::client

#endif  // BMUF_CLIENT_RETRY_H_
