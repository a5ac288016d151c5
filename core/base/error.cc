#include "core/base/error.h"

#include "absl/strings/cord.h"
#include "absl/strings/match.h"
#include "absl/strings/strip.h"
#include "google/rpc/error_details.pb.h"

namespace bmuf {
namespace {

constexpr absl::string_view kTypePrefix = "type.googleapis.com/";
constexpr absl::string_view kErrorInfoUrl = "type.googleapis.com/google.rpc.ErrorInfo";
constexpr absl::string_view kRetryInfoUrl = "type.googleapis.com/google.rpc.RetryInfo";
constexpr absl::string_view kBadRequestUrl = "type.googleapis.com/google.rpc.BadRequest";

template <typename Message>
std::optional<Message> PayloadOf(const absl::Status& status, absl::string_view url) {
  absl::optional<absl::Cord> payload = status.GetPayload(url);
  Message message;
  if (!payload.has_value() || !message.ParseFromString(std::string(*payload))) return std::nullopt;
  return message;
}

}  // namespace

absl::StatusCode CodeOf(v1::Reason reason) {
  const auto* value = v1::Reason_descriptor()->FindValueByNumber(reason);
  if (value == nullptr) return absl::StatusCode::kUnknown;
  return static_cast<absl::StatusCode>(value->options().GetExtension(v1::status_code));
}

std::string ReasonName(v1::Reason reason) { return std::string(absl::StripPrefix(v1::Reason_Name(reason), "REASON_")); }

Error::operator absl::Status() const {
  absl::Status status(CodeOf(reason_), message_);
  google::rpc::ErrorInfo info;
  info.set_reason(ReasonName(reason_));
  info.set_domain(std::string(kErrorDomain));
  for (const auto& [key, value] : metadata_) (*info.mutable_metadata())[key] = value;
  status.SetPayload(kErrorInfoUrl, absl::Cord(info.SerializeAsString()));
  if (retry_delay_.has_value()) {
    google::rpc::RetryInfo retry;
    const int64_t nanos = absl::ToInt64Nanoseconds(*retry_delay_);
    retry.mutable_retry_delay()->set_seconds(nanos / 1'000'000'000);
    retry.mutable_retry_delay()->set_nanos(static_cast<int32_t>(nanos % 1'000'000'000));
    status.SetPayload(kRetryInfoUrl, absl::Cord(retry.SerializeAsString()));
  }
  if (!violations_.empty()) {
    google::rpc::BadRequest bad;
    for (const auto& [field, description] : violations_) {
      auto* violation = bad.add_field_violations();
      violation->set_field(field);
      violation->set_description(description);
    }
    status.SetPayload(kBadRequestUrl, absl::Cord(bad.SerializeAsString()));
  }
  return status;
}

v1::Reason ReasonOf(const absl::Status& status) {
  auto info = PayloadOf<google::rpc::ErrorInfo>(status, kErrorInfoUrl);
  v1::Reason reason = v1::REASON_UNSPECIFIED;
  if (!info.has_value() || info->domain() != kErrorDomain) return reason;
  if (!v1::Reason_Parse(absl::StrCat("REASON_", info->reason()), &reason)) return v1::REASON_UNSPECIFIED;
  return reason;
}

std::string MetadataOf(const absl::Status& status, absl::string_view key) {
  auto info = PayloadOf<google::rpc::ErrorInfo>(status, kErrorInfoUrl);
  if (!info.has_value()) return "";
  auto it = info->metadata().find(std::string(key));
  return it == info->metadata().end() ? "" : it->second;
}

std::optional<absl::Duration> RetryDelayOf(const absl::Status& status) {
  auto retry = PayloadOf<google::rpc::RetryInfo>(status, kRetryInfoUrl);
  if (!retry.has_value()) return std::nullopt;
  return absl::Seconds(retry->retry_delay().seconds()) + absl::Nanoseconds(retry->retry_delay().nanos());
}

google::rpc::Status ToRpcStatus(const absl::Status& status) {
  google::rpc::Status rpc;
  rpc.set_code(static_cast<int>(status.code()));
  rpc.set_message(std::string(status.message()));
  status.ForEachPayload([&](absl::string_view url, const absl::Cord& payload) {
    auto* any = rpc.add_details();
    any->set_type_url(std::string(url));
    any->set_value(std::string(payload));
  });
  return rpc;
}

absl::Status FromRpcStatus(const google::rpc::Status& rpc) {
  if (rpc.code() == 0) return absl::OkStatus();
  const bool known = rpc.code() >= 1 && rpc.code() <= 16;
  absl::Status status(known ? static_cast<absl::StatusCode>(rpc.code()) : absl::StatusCode::kUnknown, rpc.message());
  for (const auto& detail : rpc.details()) {
    if (absl::StartsWith(detail.type_url(), kTypePrefix)) {
      status.SetPayload(detail.type_url(), absl::Cord(detail.value()));
    }
  }
  return status;
}

}  // namespace bmuf
