// The wire's two services over the coordinator: parse, call, map the status, reply. Nothing here blocks.
#ifndef BMUF_SERVER_SERVICE_SERVICES_H_
#define BMUF_SERVER_SERVICE_SERVICES_H_

#include <grpcpp/grpcpp.h>

#include "bmuf/v1/admin_service.grpc.pb.h"
#include "bmuf/v1/coordinator_service.grpc.pb.h"
#include "server/coordinator/coordinator.h"
#include "server/service/call.h"
#include "server/service/watchdog.h"

namespace bmuf::service {

// What both services use; everything outlives them.
struct ServiceParts {
  coordinator::Coordinator& coordinator;
  CallBook& book;
  Watchdog& watchdog;
};

// Thread-safe.
class CoordinatorServiceImpl final : public v1::CoordinatorService::CallbackService {
 public:
  explicit CoordinatorServiceImpl(ServiceParts parts) : parts_(parts) {}

  grpc::ServerUnaryReactor* Join(grpc::CallbackServerContext* context, const v1::JoinRequest* request,
                                 v1::JoinResponse* response) override;
  grpc::ServerUnaryReactor* Heartbeat(grpc::CallbackServerContext* context, const v1::HeartbeatRequest* request,
                                      v1::HeartbeatResponse* response) override;
  grpc::ServerReadReactor<v1::PushDeltaRequest>* PushDelta(grpc::CallbackServerContext* context,
                                                           v1::PushDeltaResponse* response) override;
  grpc::ServerUnaryReactor* QueryPush(grpc::CallbackServerContext* context, const v1::QueryPushRequest* request,
                                      v1::QueryPushResponse* response) override;
  grpc::ServerWriteReactor<v1::WatchRoundResponse>* WatchRound(grpc::CallbackServerContext* context,
                                                               const v1::WatchRoundRequest* request) override;
  grpc::ServerWriteReactor<v1::PullModelResponse>* PullModel(grpc::CallbackServerContext* context,
                                                             const v1::PullModelRequest* request) override;
  grpc::ServerUnaryReactor* Leave(grpc::CallbackServerContext* context, const v1::LeaveRequest* request,
                                  v1::LeaveResponse* response) override;

 private:
  const ServiceParts parts_;
};

// Thread-safe.
class AdminServiceImpl final : public v1::AdminService::CallbackService {
 public:
  explicit AdminServiceImpl(ServiceParts parts) : parts_(parts) {}

  grpc::ServerUnaryReactor* CreateJob(grpc::CallbackServerContext* context, const v1::CreateJobRequest* request,
                                      v1::CreateJobResponse* response) override;
  grpc::ServerUnaryReactor* GetJob(grpc::CallbackServerContext* context, const v1::GetJobRequest* request,
                                   v1::GetJobResponse* response) override;
  grpc::ServerUnaryReactor* ListJobs(grpc::CallbackServerContext* context, const v1::ListJobsRequest* request,
                                     v1::ListJobsResponse* response) override;
  grpc::ServerUnaryReactor* UpdateJob(grpc::CallbackServerContext* context, const v1::UpdateJobRequest* request,
                                      v1::UpdateJobResponse* response) override;
  grpc::ServerUnaryReactor* PauseJob(grpc::CallbackServerContext* context, const v1::PauseJobRequest* request,
                                     v1::PauseJobResponse* response) override;
  grpc::ServerUnaryReactor* ResumeJob(grpc::CallbackServerContext* context, const v1::ResumeJobRequest* request,
                                      v1::ResumeJobResponse* response) override;
  grpc::ServerUnaryReactor* ListRounds(grpc::CallbackServerContext* context, const v1::ListRoundsRequest* request,
                                       v1::ListRoundsResponse* response) override;
  grpc::ServerUnaryReactor* EvictWorker(grpc::CallbackServerContext* context, const v1::EvictWorkerRequest* request,
                                        v1::EvictWorkerResponse* response) override;
  grpc::ServerUnaryReactor* ReadmitWorker(grpc::CallbackServerContext* context, const v1::ReadmitWorkerRequest* request,
                                          v1::ReadmitWorkerResponse* response) override;
  grpc::ServerUnaryReactor* Checkpoint(grpc::CallbackServerContext* context, const v1::CheckpointRequest* request,
                                       v1::CheckpointResponse* response) override;
  grpc::ServerUnaryReactor* RollbackJob(grpc::CallbackServerContext* context, const v1::RollbackJobRequest* request,
                                        v1::RollbackJobResponse* response) override;
  grpc::ServerWriteReactor<v1::ExportModelResponse>* ExportModel(grpc::CallbackServerContext* context,
                                                                 const v1::ExportModelRequest* request) override;
  grpc::ServerUnaryReactor* Drain(grpc::CallbackServerContext* context, const v1::DrainRequest* request,
                                  v1::DrainResponse* response) override;
  grpc::ServerUnaryReactor* GetStatus(grpc::CallbackServerContext* context, const v1::GetStatusRequest* request,
                                      v1::GetStatusResponse* response) override;
  grpc::ServerWriteReactor<v1::WatchJobResponse>* WatchJob(grpc::CallbackServerContext* context,
                                                           const v1::WatchJobRequest* request) override;

 private:
  const ServiceParts parts_;
};

}  // namespace bmuf::service

#endif  // BMUF_SERVER_SERVICE_SERVICES_H_
