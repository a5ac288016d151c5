// What every call has in common: it is listed while it is open, counted when it ends, and its status goes out in full.
#ifndef BMUF_SERVER_SERVICE_CALL_H_
#define BMUF_SERVER_SERVICE_CALL_H_

#include <grpcpp/grpcpp.h>

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "core/base/clock.h"
#include "server/ops/metrics.h"
#include "server/ops/open_calls.h"

namespace bmuf::service {

// `status` for the wire: code, text, and google.rpc.Status in the details.
grpc::Status ToGrpc(const absl::Status& status);

// The peer went away or gave up; nobody reads this.
inline grpc::Status Cancelled() { return grpc::Status(grpc::StatusCode::CANCELLED, "the caller is gone"); }

// Shared by all calls; thread-safe; outlives them.
struct CallBook {
  const Clock& clock;
  ops::OpenCalls& open_calls;
  ops::Metrics& metrics;
};

// One open call. Thread-compatible.
class Call {
 public:
  // `method` is a literal.
  Call(CallBook& book, const char* method, const grpc::CallbackServerContext& context);

  // Counts its end; returns `status` as it goes to the wire. Once.
  grpc::Status End(const absl::Status& status);
  grpc::Status End(grpc::Status status);

 private:
  CallBook& book_;
  const char* const method_;
  std::shared_ptr<ops::OpenCalls::Ticket> ticket_;
};

}  // namespace bmuf::service

#endif  // BMUF_SERVER_SERVICE_CALL_H_
