// The data port: gRPC with the limits that this coordinator's traffic has.
#ifndef BMUF_SERVER_SERVICE_GRPC_SERVER_H_
#define BMUF_SERVER_SERVICE_GRPC_SERVER_H_

#include <grpcpp/grpcpp.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace bmuf::service {

// Thread-compatible.
class GrpcServer {
 public:
  struct Options {
    std::string listen;       // "host:port"; port 0 picks one.
    bool reflection = false;  // Serve the reflection API.
    // gRPC's own buffers, beside the models: what all connections together may take.
    size_t buffer_bytes = size_t{256} << 20;
  };

  // Serves `services`, which outlive it, from now on. Errors: InvalidArgument for a malformed address; Unavailable
  // naming the address if it cannot be bound (in use, not ours, no right).
  static absl::StatusOr<std::unique_ptr<GrpcServer>> Start(const Options& options,
                                                           const std::vector<grpc::Service*>& services);
  // Shuts down at once if Shutdown was not called.
  ~GrpcServer();

  // "host:port" as bound.
  const std::string& address() const { return address_; }
  // What the health service answers.
  void SetServing(bool serving);
  // Takes no new calls, waits up to `grace` for the open ones, then cuts them. Blocking. The loop must go on meanwhile.
  void Shutdown(absl::Duration grace);

 private:
  GrpcServer(std::unique_ptr<grpc::Server> server, std::string address);

  const std::unique_ptr<grpc::Server> server_;
  const std::string address_;
  bool down_ = false;
};

}  // namespace bmuf::service

#endif  // BMUF_SERVER_SERVICE_GRPC_SERVER_H_
