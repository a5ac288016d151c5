#include "server/service/call.h"

#include <grpc/support/time.h>

#include <utility>

#include "core/base/error.h"
#include "core/base/names.h"

namespace bmuf::service {
namespace {

// Texts of errors travel in trailers, which have a limit of 8 KiB in all.
constexpr size_t kMostMessageBytes = 1024;
constexpr size_t kMostDetailBytes = 4096;

absl::Duration Allowed(const grpc::CallbackServerContext& context) {
  const gpr_timespec deadline = gpr_convert_clock_type(context.raw_deadline(), GPR_CLOCK_MONOTONIC);
  if (gpr_time_cmp(deadline, gpr_inf_future(GPR_CLOCK_MONOTONIC)) == 0) return absl::InfiniteDuration();
  const gpr_timespec left = gpr_time_sub(deadline, gpr_now(GPR_CLOCK_MONOTONIC));
  return absl::Seconds(left.tv_sec) + absl::Nanoseconds(left.tv_nsec);
}

}  // namespace

grpc::Status ToGrpc(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  google::rpc::Status rpc = ToRpcStatus(status);
  if (rpc.message().size() > kMostMessageBytes) rpc.mutable_message()->resize(kMostMessageBytes);
  std::string details = rpc.SerializeAsString();
  if (details.size() > kMostDetailBytes) {
    rpc.mutable_message()->resize(std::min<size_t>(rpc.message().size(), 256));
    details = rpc.SerializeAsString();
  }
  return grpc::Status(static_cast<grpc::StatusCode>(rpc.code()), rpc.message(), details);
}

Call::Call(CallBook& book, const char* method, const grpc::CallbackServerContext& context)
    : book_(book),
      method_(method),
      ticket_(book.open_calls.Open({method, EscapeForLog(context.peer()), book.clock.Now(), Allowed(context)})) {}

grpc::Status Call::End(const absl::Status& status) { return End(ToGrpc(status)); }

grpc::Status Call::End(grpc::Status status) {
  book_.metrics.CountCall(method_, status.error_code());
  ticket_.reset();
  return status;
}

}  // namespace bmuf::service
