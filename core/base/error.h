// Typed errors: an absl::Status that carries a reason every client can act on.
//
// Problem: a status code alone does not tell a client what to do next, and texts are not an interface.
// Idea: each refusal has a Reason (proto/bmuf/v1/errors.proto); one table maps it to its status code. The reason
// travels as google.rpc.ErrorInfo (domain "bmuf.v1") inside the status, over gRPC and back, together with optional
// RetryInfo and BadRequest.
// Usage:  return Error(v1::REASON_STALE_ROUND, "round 7 is closed; send round 8 from version 7")
//             .With("round", 8).With("version", 7);
#ifndef BMUF_CORE_BASE_ERROR_H_
#define BMUF_CORE_BASE_ERROR_H_

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "bmuf/v1/errors.pb.h"
#include "google/rpc/status.pb.h"

namespace bmuf {

// `domain` of every ErrorInfo that this project sends.
inline constexpr absl::string_view kErrorDomain = "bmuf.v1";

// Builds a typed error; converts to absl::Status. Value type; thread-compatible.
class Error {
 public:
  Error(v1::Reason reason, absl::string_view message) : reason_(reason), message_(message) {}

  // Adds a fact for programs (at most a few; key in lower_snake_case). Returns *this for chaining.
  template <typename T>
  Error& With(absl::string_view key, const T& value) & {
    metadata_[std::string(key)] = absl::StrCat(value);
    return *this;
  }
  template <typename T>
  Error&& With(absl::string_view key, const T& value) && {
    return std::move(With(key, value));
  }
  // Names the wrong field (path) or tensor.
  Error&& Field(absl::string_view field, absl::string_view description) && {
    violations_.emplace_back(field, description);
    return std::move(*this);
  }
  // Tells the client that a retry after `delay` may succeed.
  Error&& RetryAfter(absl::Duration delay) && {
    retry_delay_ = delay;
    return std::move(*this);
  }

  operator absl::Status() const;  // NOLINT: conversion is the purpose.
  template <typename T>
  operator absl::StatusOr<T>() const {  // NOLINT
    return absl::StatusOr<T>(absl::Status(*this));
  }

 private:
  v1::Reason reason_;
  std::string message_;
  std::map<std::string, std::string> metadata_;
  std::vector<std::pair<std::string, std::string>> violations_;
  std::optional<absl::Duration> retry_delay_;
};

// The status code of `reason`, from the one table.
absl::StatusCode CodeOf(v1::Reason reason);

// "STALE_ROUND" for REASON_STALE_ROUND.
std::string ReasonName(v1::Reason reason);

// The reason inside `status`, or REASON_UNSPECIFIED if it carries none of this domain.
v1::Reason ReasonOf(const absl::Status& status);

// The fact `key` inside `status`, or "" if absent.
std::string MetadataOf(const absl::Status& status, absl::string_view key);

// The retry delay inside `status`, if it carries one.
std::optional<absl::Duration> RetryDelayOf(const absl::Status& status);

// Both directions of the wire form. FromRpcStatus keeps details it does not know; a code outside gRPC's range becomes
// UNKNOWN.
google::rpc::Status ToRpcStatus(const absl::Status& status);
absl::Status FromRpcStatus(const google::rpc::Status& status);

}  // namespace bmuf

#endif  // BMUF_CORE_BASE_ERROR_H_
