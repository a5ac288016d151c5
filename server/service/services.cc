#include "server/service/services.h"

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "core/base/crc32c.h"
#include "core/base/error.h"
#include "core/base/limits.h"
#include "server/service/download_reactor.h"
#include "server/service/event_reactor.h"
#include "server/service/push_reactor.h"

namespace bmuf::service {
namespace {

using coordinator::Coordinator;
using coordinator::Reply;

// A unary call: the answer comes from the loop, whenever it is known; request, response and context live until then.
template <typename Request, typename Response>
grpc::ServerUnaryReactor* Answer(const ServiceParts& parts, const char* method, grpc::CallbackServerContext* context,
                                 void (Coordinator::*handler)(Request, Reply<Response>), const Request* request,
                                 Response* response) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  auto call = std::make_shared<Call>(parts.book, method, *context);
  (parts.coordinator.*handler)(*request, [reactor, response, call](absl::StatusOr<Response> answer) {
    if (answer.ok()) *response = *std::move(answer);
    reactor->Finish(call->End(answer.status()));
  });
  return reactor;
}

grpc::ServerUnaryReactor* NotImplemented(const ServiceParts& parts, const char* method,
                                         grpc::CallbackServerContext* context, const char* why) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  Call call(parts.book, method, *context);
  reactor->Finish(call.End(absl::Status(Error(v1::REASON_NOT_IMPLEMENTED, why))));
  return reactor;
}

// Cuts a version into messages: header, chunks that end at multiples of the chunk size, end.
class PullProducer {
 public:
  PullProducer(coordinator::PullSource source, ops::Metrics& metrics) : source_(std::move(source)), metrics_(metrics) {}

  bool operator()(v1::PullModelResponse* message) {
    if (!header_sent_) {
      header_sent_ = true;
      *message->mutable_header() = std::move(source_.header);
      return true;
    }
    if (sent_ == source_.length) {
      if (end_sent_) return false;
      end_sent_ = true;
      message->mutable_end()->set_digest(crc32c_);
      return true;
    }
    const uint64_t at = source_.offset + sent_;
    const uint64_t to_boundary = limits::kMaxChunkBytes - at % limits::kMaxChunkBytes;
    const uint64_t size = std::min(source_.length - sent_, to_boundary);
    v1::Chunk* chunk = message->mutable_chunk();
    std::string* data = chunk->mutable_data();
    data->reserve(size);
    while (data->size() < size) {
      const absl::Span<const uint8_t> piece = source_.payload.At(at + data->size(), size - data->size());
      data->append(reinterpret_cast<const char*>(piece.data()), piece.size());
    }
    const uint32_t crc = Crc32c(data->data(), data->size());
    chunk->set_offset(at);
    chunk->set_crc32c(crc);
    crc32c_ = CombineCrc32c(crc32c_, crc, size);
    sent_ += size;
    metrics_.CountSent(size);
    return true;
  }

 private:
  coordinator::PullSource source_;
  ops::Metrics& metrics_;
  bool header_sent_ = false;
  bool end_sent_ = false;
  uint64_t sent_ = 0;
  uint32_t crc32c_ = 0;
};

class ExportProducer {
 public:
  ExportProducer(coordinator::ExportSource source, ops::Metrics& metrics)
      : source_(std::move(source)), metrics_(metrics) {}

  bool operator()(v1::ExportModelResponse* message) {
    const uint64_t total = source_.file->size();
    if (sent_ >= total) return false;
    const uint64_t size = std::min<uint64_t>(limits::kMaxChunkBytes, total - sent_);
    std::string* data = message->mutable_data();
    data->reserve(size);
    while (data->size() < size) {
      const absl::Span<const uint8_t> piece = source_.file->At(sent_ + data->size(), size - data->size());
      data->append(reinterpret_cast<const char*>(piece.data()), piece.size());
    }
    message->set_version(source_.version.value());
    message->set_total_bytes(total);
    message->set_offset(sent_);
    message->set_crc32c(Crc32c(data->data(), data->size()));
    sent_ += size;
    metrics_.CountSent(size);
    return true;
  }

 private:
  coordinator::ExportSource source_;
  ops::Metrics& metrics_;
  uint64_t sent_ = 0;
};

}  // namespace

// ---------------------------------------------------------------------------------------------------------- workers

grpc::ServerUnaryReactor* CoordinatorServiceImpl::Join(grpc::CallbackServerContext* context,
                                                       const v1::JoinRequest* request, v1::JoinResponse* response) {
  return Answer(parts_, "Join", context, &Coordinator::Join, request, response);
}

grpc::ServerUnaryReactor* CoordinatorServiceImpl::Heartbeat(grpc::CallbackServerContext* context,
                                                            const v1::HeartbeatRequest* request,
                                                            v1::HeartbeatResponse* response) {
  return Answer(parts_, "Heartbeat", context, &Coordinator::Heartbeat, request, response);
}

grpc::ServerReadReactor<v1::PushDeltaRequest>* CoordinatorServiceImpl::PushDelta(grpc::CallbackServerContext* context,
                                                                                 v1::PushDeltaResponse* response) {
  return PushReactor::Start(parts_.coordinator, parts_.book, context, response);
}

grpc::ServerUnaryReactor* CoordinatorServiceImpl::QueryPush(grpc::CallbackServerContext* context,
                                                            const v1::QueryPushRequest* request,
                                                            v1::QueryPushResponse* response) {
  return Answer(parts_, "QueryPush", context, &Coordinator::QueryPush, request, response);
}

grpc::ServerWriteReactor<v1::WatchRoundResponse>* CoordinatorServiceImpl::WatchRound(
    grpc::CallbackServerContext* context, const v1::WatchRoundRequest* request) {
  return EventReactor<v1::WatchRoundResponse>::Start(
      parts_.book, "WatchRound", *context, [&](coordinator::Subscriber<v1::WatchRoundResponse> subscriber) {
        return parts_.coordinator.WatchRound(*request, std::move(subscriber));
      });
}

grpc::ServerWriteReactor<v1::PullModelResponse>* CoordinatorServiceImpl::PullModel(
    grpc::CallbackServerContext* context, const v1::PullModelRequest* request) {
  using Reactor = DownloadReactor<v1::PullModelResponse>;
  return Reactor::Start(
      parts_.book, parts_.watchdog, "PullModel", context, [&c = parts_.coordinator] { c.CountSlowReader(); },
      [&](Reactor::Reply reply) {
        parts_.coordinator.OpenPull(*request, [reply = std::move(reply), &metrics = parts_.book.metrics](
                                                  absl::StatusOr<coordinator::PullSource> source) {
          if (!source.ok()) return reply(source.status());
          reply(Producer<v1::PullModelResponse>(PullProducer(*std::move(source), metrics)));
        });
      });
}

grpc::ServerUnaryReactor* CoordinatorServiceImpl::Leave(grpc::CallbackServerContext* context,
                                                        const v1::LeaveRequest* request, v1::LeaveResponse* response) {
  return Answer(parts_, "Leave", context, &Coordinator::Leave, request, response);
}

// -------------------------------------------------------------------------------------------------------- operators

grpc::ServerUnaryReactor* AdminServiceImpl::CreateJob(grpc::CallbackServerContext* context,
                                                      const v1::CreateJobRequest* request,
                                                      v1::CreateJobResponse* response) {
  return Answer(parts_, "CreateJob", context, &Coordinator::CreateJob, request, response);
}

grpc::ServerUnaryReactor* AdminServiceImpl::GetJob(grpc::CallbackServerContext* context,
                                                   const v1::GetJobRequest* request, v1::GetJobResponse* response) {
  return Answer(parts_, "GetJob", context, &Coordinator::GetJob, request, response);
}

grpc::ServerUnaryReactor* AdminServiceImpl::ListJobs(grpc::CallbackServerContext* context,
                                                     const v1::ListJobsRequest* request,
                                                     v1::ListJobsResponse* response) {
  return Answer(parts_, "ListJobs", context, &Coordinator::ListJobs, request, response);
}

grpc::ServerUnaryReactor* AdminServiceImpl::UpdateJob(grpc::CallbackServerContext* context,
                                                      const v1::UpdateJobRequest* request,
                                                      v1::UpdateJobResponse* response) {
  return Answer(parts_, "UpdateJob", context, &Coordinator::UpdateJob, request, response);
}

grpc::ServerUnaryReactor* AdminServiceImpl::PauseJob(grpc::CallbackServerContext* context,
                                                     const v1::PauseJobRequest* request,
                                                     v1::PauseJobResponse* response) {
  return Answer(parts_, "PauseJob", context, &Coordinator::PauseJob, request, response);
}

grpc::ServerUnaryReactor* AdminServiceImpl::ResumeJob(grpc::CallbackServerContext* context,
                                                      const v1::ResumeJobRequest* request,
                                                      v1::ResumeJobResponse* response) {
  return Answer(parts_, "ResumeJob", context, &Coordinator::ResumeJob, request, response);
}

grpc::ServerUnaryReactor* AdminServiceImpl::ListRounds(grpc::CallbackServerContext* context,
                                                       const v1::ListRoundsRequest* request,
                                                       v1::ListRoundsResponse* response) {
  return Answer(parts_, "ListRounds", context, &Coordinator::ListRounds, request, response);
}

grpc::ServerUnaryReactor* AdminServiceImpl::EvictWorker(grpc::CallbackServerContext* context,
                                                        const v1::EvictWorkerRequest* request,
                                                        v1::EvictWorkerResponse* response) {
  return Answer(parts_, "EvictWorker", context, &Coordinator::EvictWorker, request, response);
}

grpc::ServerUnaryReactor* AdminServiceImpl::ReadmitWorker(grpc::CallbackServerContext* context,
                                                          const v1::ReadmitWorkerRequest* request,
                                                          v1::ReadmitWorkerResponse* response) {
  return Answer(parts_, "ReadmitWorker", context, &Coordinator::ReadmitWorker, request, response);
}

grpc::ServerUnaryReactor* AdminServiceImpl::Checkpoint(grpc::CallbackServerContext* context,
                                                       const v1::CheckpointRequest*, v1::CheckpointResponse*) {
  return NotImplemented(parts_, "Checkpoint", context,
                        "this build keeps state in memory and writes no snapshots; ExportModel gives the model");
}

grpc::ServerUnaryReactor* AdminServiceImpl::RollbackJob(grpc::CallbackServerContext* context,
                                                        const v1::RollbackJobRequest*, v1::RollbackJobResponse*) {
  return NotImplemented(parts_, "RollbackJob", context,
                        "this build keeps state in memory and has no snapshot to go back to");
}

grpc::ServerWriteReactor<v1::ExportModelResponse>* AdminServiceImpl::ExportModel(
    grpc::CallbackServerContext* context, const v1::ExportModelRequest* request) {
  using Reactor = DownloadReactor<v1::ExportModelResponse>;
  return Reactor::Start(
      parts_.book, parts_.watchdog, "ExportModel", context, [&c = parts_.coordinator] { c.CountSlowReader(); },
      [&](Reactor::Reply reply) {
        parts_.coordinator.OpenExport(*request, [reply = std::move(reply), &metrics = parts_.book.metrics](
                                                    absl::StatusOr<coordinator::ExportSource> source) {
          if (!source.ok()) return reply(source.status());
          reply(Producer<v1::ExportModelResponse>(ExportProducer(*std::move(source), metrics)));
        });
      });
}

grpc::ServerUnaryReactor* AdminServiceImpl::Drain(grpc::CallbackServerContext* context, const v1::DrainRequest* request,
                                                  v1::DrainResponse* response) {
  return Answer(parts_, "Drain", context, &Coordinator::Drain, request, response);
}

grpc::ServerUnaryReactor* AdminServiceImpl::GetStatus(grpc::CallbackServerContext* context,
                                                      const v1::GetStatusRequest* request,
                                                      v1::GetStatusResponse* response) {
  return Answer(parts_, "GetStatus", context, &Coordinator::GetStatus, request, response);
}

grpc::ServerWriteReactor<v1::WatchJobResponse>* AdminServiceImpl::WatchJob(grpc::CallbackServerContext* context,
                                                                           const v1::WatchJobRequest* request) {
  return EventReactor<v1::WatchJobResponse>::Start(
      parts_.book, "WatchJob", *context, [&](coordinator::Subscriber<v1::WatchJobResponse> subscriber) {
        return parts_.coordinator.WatchJob(*request, std::move(subscriber));
      });
}

}  // namespace bmuf::service
