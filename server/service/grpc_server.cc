#include "server/service/grpc_server.h"

#include <grpc/grpc.h>
#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/impl/server_builder_option.h>
#include <grpcpp/resource_quota.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/limits.h"
#include "server/ops/http.h"

namespace bmuf::service {
namespace {

// Beyond the largest request there is only the message's own framing.
constexpr int kMostMessageBytes = static_cast<int>(limits::kMaxRequestBytes) + 64 * 1024;
// Credentials and tracing headers; far below what a flood of them would cost.
constexpr int kMostMetadataBytes = 16 * 1024;
constexpr int kMostThreads = 64;

// The library registers its reflection service for every server of a program that is linked with it.
class WithoutReflection : public grpc::ServerBuilderOption {
 public:
  void UpdateArguments(grpc::ChannelArguments*) override {}
  void UpdatePlugins(std::vector<std::unique_ptr<grpc::ServerBuilderPlugin>>* plugins) override {
    const std::string name = grpc::reflection::ProtoServerReflectionPlugin().name();
    plugins->erase(
        std::remove_if(plugins->begin(), plugins->end(), [&](const auto& plugin) { return plugin->name() == name; }),
        plugins->end());
  }
};

}  // namespace

absl::StatusOr<std::unique_ptr<GrpcServer>> GrpcServer::Start(const Options& options,
                                                              const std::vector<grpc::Service*>& services) {
  absl::StatusOr<ops::HostPort> parsed = ops::ParseHostPort(options.listen);
  if (!parsed.ok()) return parsed.status();
  grpc::EnableDefaultHealthCheckService(true);
  grpc::ServerBuilder builder;
  // A second server on the port must fail, not take half of the workers.
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  builder.SetMaxReceiveMessageSize(kMostMessageBytes);
  // A small compressed message may become a huge one; ours are not compressible.
  builder.AddChannelArgument(GRPC_ARG_ENABLE_PER_MESSAGE_DECOMPRESSION, 0);
  builder.AddChannelArgument(GRPC_ARG_MAX_METADATA_SIZE, kMostMetadataBytes);
  // Clients ping every 30 s; the server must allow strictly more often, also between calls.
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 10'000);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  // A peer that vanished without a word is noticed although nothing is sent to it.
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, 20'000);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 10'000);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_IDLE_MS, 5 * 60'000);
  builder.AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, 10'000);
  grpc::ResourceQuota quota("bmuf");
  quota.Resize(options.buffer_bytes).SetMaxThreads(kMostThreads);
  builder.SetResourceQuota(quota);
  if (!options.reflection) builder.SetOption(std::make_unique<WithoutReflection>());
  int port = 0;
  builder.AddListeningPort(options.listen, grpc::InsecureServerCredentials(), &port);
  for (grpc::Service* service : services) builder.RegisterService(service);
  std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  if (server == nullptr || port == 0) {
    return absl::UnavailableError(absl::StrCat(
        "cannot listen on ", options.listen, ": the address is in use by another program, or is not of this machine"));
  }
  const bool v6 = parsed->host.find(':') != std::string::npos;
  return std::unique_ptr<GrpcServer>(new GrpcServer(
      std::move(server), v6 ? absl::StrCat("[", parsed->host, "]:", port) : absl::StrCat(parsed->host, ":", port)));
}

GrpcServer::GrpcServer(std::unique_ptr<grpc::Server> server, std::string address)
    : server_(std::move(server)), address_(std::move(address)) {}

GrpcServer::~GrpcServer() { Shutdown(absl::ZeroDuration()); }

void GrpcServer::SetServing(bool serving) {
  if (grpc::HealthCheckServiceInterface* health = server_->GetHealthCheckService(); health != nullptr) {
    health->SetServingStatus(serving);
  }
}

void GrpcServer::Shutdown(absl::Duration grace) {
  if (down_) return;
  down_ = true;
  const gpr_timespec deadline =
      gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC), gpr_time_from_millis(absl::ToInt64Milliseconds(grace), GPR_TIMESPAN));
  server_->Shutdown(deadline);
  server_->Wait();
}

}  // namespace bmuf::service
