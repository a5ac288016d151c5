#include "client/retry.h"

#include <vector>

#include "client/constants.h"
#include "core/base/error.h"
#include "gtest/gtest.h"

namespace bmuf::client {
namespace {

TEST(RetryTest, EveryReasonHasItsRemedy) {
  const std::vector<std::pair<v1::Reason, Remedy>> rows = {
      {v1::REASON_UNAUTHENTICATED, Remedy::kNone},
      {v1::REASON_WRONG_JOB, Remedy::kNone},
      {v1::REASON_WORKER_EVICTED, Remedy::kNone},
      {v1::REASON_JOB_NOT_FOUND, Remedy::kNone},
      {v1::REASON_SESSION_NOT_FOUND, Remedy::kReattach},
      {v1::REASON_NOT_KEPT, Remedy::kNone},
      {v1::REASON_INVALID_NAME, Remedy::kNone},
      {v1::REASON_INVALID_REQUEST, Remedy::kNone},
      {v1::REASON_MANIFEST_MISMATCH, Remedy::kNone},
      {v1::REASON_BAD_CHUNK, Remedy::kNone},
      {v1::REASON_SIZE_MISMATCH, Remedy::kNone},
      {v1::REASON_NON_FINITE_DELTA, Remedy::kNone},
      {v1::REASON_OUT_OF_RANGE_DELTA, Remedy::kNone},
      {v1::REASON_BAD_CODEC, Remedy::kNone},
      {v1::REASON_STALE_INCARNATION, Remedy::kNone},
      {v1::REASON_STALE_ROUND, Remedy::kStale},
      {v1::REASON_VERSION_AHEAD, Remedy::kStale},
      {v1::REASON_BASE_MISMATCH, Remedy::kStale},
      {v1::REASON_JOB_PAUSED, Remedy::kRetry},
      {v1::REASON_JOB_FAILED, Remedy::kNone},
      {v1::REASON_JOB_FINISHED, Remedy::kNone},
      {v1::REASON_NO_MODEL, Remedy::kStale},
      {v1::REASON_NOT_INITIALIZER, Remedy::kNone},
      {v1::REASON_DIGEST_MISMATCH, Remedy::kNone},
      {v1::REASON_OFFSET_MISMATCH, Remedy::kRetry},
      {v1::REASON_CHECKSUM_MISMATCH, Remedy::kRetry},
      {v1::REASON_UPLOAD_BUDGET, Remedy::kRetry},
      {v1::REASON_DISK, Remedy::kRetry},
      {v1::REASON_MAX_WORKERS, Remedy::kNone},
      {v1::REASON_MODEL_TOO_LARGE, Remedy::kNone},
      {v1::REASON_TOO_MANY, Remedy::kRetry},
      {v1::REASON_EPOCH_CHANGED, Remedy::kReattach},
      {v1::REASON_TRANSFER_CANCELLED, Remedy::kRetry},
      {v1::REASON_TOO_SLOW, Remedy::kRetry},
      {v1::REASON_RECOVERING, Remedy::kReattach},
      {v1::REASON_DRAINING, Remedy::kReattach},
      {v1::REASON_PROTOCOL_VERSION, Remedy::kNone},
      {v1::REASON_INTERNAL, Remedy::kNone},
  };
  for (const auto& [reason, remedy] : rows) {
    EXPECT_EQ(DecideRetry(Error(reason, "x"), 0, 0.5).remedy, remedy) << ReasonName(reason);
  }
}

TEST(RetryTest, WithoutAReasonOnlyALostOrSilentPeerIsTriedAgain) {
  EXPECT_EQ(DecideRetry(absl::UnavailableError("x"), 0, 0).remedy, Remedy::kRetry);
  EXPECT_EQ(DecideRetry(absl::DeadlineExceededError("x"), 0, 0).remedy, Remedy::kRetry);
  for (const absl::Status& status :
       {absl::CancelledError("x"), absl::InternalError("x"), absl::UnknownError("x"), absl::DataLossError("x"),
        absl::UnimplementedError("x"), absl::UnauthenticatedError("x"), absl::ResourceExhaustedError("x")}) {
    EXPECT_EQ(DecideRetry(status, 0, 0).remedy, Remedy::kNone) << status;
  }
}

TEST(RetryTest, DelaysGrowToTheCapWithFullJitter) {
  const absl::Status lost = absl::UnavailableError("x");
  EXPECT_EQ(DecideRetry(lost, 0, 0).delay, absl::ZeroDuration());
  EXPECT_EQ(DecideRetry(lost, 0, 0.5).delay, kBackoffFirst * 0.5);
  EXPECT_EQ(DecideRetry(lost, 3, 0.5).delay, kBackoffFirst * 4);
  EXPECT_EQ(DecideRetry(lost, 1'000'000, 0.5).delay, kBackoffCap * 0.5);
}

TEST(RetryTest, WhatTheServerAskedForComesOnTop) {
  const absl::Status busy = Error(v1::REASON_UPLOAD_BUDGET, "x").RetryAfter(absl::Seconds(3));
  EXPECT_EQ(DecideRetry(busy, 0, 0).delay, absl::Seconds(3));
  EXPECT_EQ(DecideRetry(busy, 0, 0.5).delay, absl::Seconds(3) + kBackoffFirst * 0.5);
}

TEST(RetryTest, AnErrorWithoutARemedyHasNoDelay) {
  EXPECT_EQ(DecideRetry(Error(v1::REASON_JOB_FAILED, "x"), 5, 0.9).delay, absl::ZeroDuration());
  EXPECT_EQ(DecideRetry(Error(v1::REASON_STALE_ROUND, "x"), 5, 0.9).delay, absl::ZeroDuration());
}

// What is damaged at every try is damaged at its source or by a machine on the way: a person must look.
TEST(RetryTest, DamageIsTriedAFewTimesOnly) {
  for (v1::Reason reason : {v1::REASON_CHECKSUM_MISMATCH, v1::REASON_OFFSET_MISMATCH, v1::REASON_TOO_SLOW}) {
    EXPECT_EQ(DecideRetry(Error(reason, "x"), 3, 0).remedy, Remedy::kRetry) << ReasonName(reason);
    EXPECT_EQ(DecideRetry(Error(reason, "x"), 4, 0).remedy, Remedy::kNone) << ReasonName(reason);
  }
  EXPECT_EQ(DecideRetry(Error(v1::REASON_JOB_PAUSED, "x"), 1000, 0).remedy, Remedy::kRetry);
}

}  // namespace
}  // namespace bmuf::client
