// The services on a real channel: a stock client, port 0, no sleeping.
#include <grpcpp/grpcpp.h>

#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/synchronization/notification.h"
#include "bmuf/v1/admin_service.grpc.pb.h"
#include "bmuf/v1/coordinator_service.grpc.pb.h"
#include "core/base/crc32c.h"
#include "core/base/error.h"
#include "core/base/limits.h"
#include "gtest/gtest.h"
#include "server/service/download_reactor.h"
#include "server/service/grpc_server.h"
#include "server/service/services.h"
#include "server/storage/memory_ledger.h"

namespace bmuf::service {
namespace {

absl::Status FromGrpc(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  google::rpc::Status rpc;
  if (!status.error_details().empty() && rpc.ParseFromString(status.error_details())) return FromRpcStatus(rpc);
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
}

class ServiceTest : public testing::Test {
 protected:
  ServiceTest() {
    epoch_ = *ledger_.RaiseEpoch();
    coordinator_ = std::make_unique<coordinator::Coordinator>(
        coordinator::Coordinator::Parts{
            loop_, [this](std::function<void()> task) { executor_->Schedule(std::move(task)); }, pool_, ScalarKernels(),
            budget_, ledger_, epoch_, observer_, seams_, [] { return std::string("token"); }},
        coordinator::Coordinator::Options());
    loop_thread_ = std::thread([this] { loop_.Run(); });
    workers_ = std::make_unique<CoordinatorServiceImpl>(ServiceParts{*coordinator_, book_, watchdog_});
    operators_ = std::make_unique<AdminServiceImpl>(ServiceParts{*coordinator_, book_, watchdog_});
    GrpcServer::Options options;
    options.listen = "127.0.0.1:0";
    server_ = *GrpcServer::Start(options, {workers_.get(), operators_.get()});
    channel_ = grpc::CreateChannel(server_->address(), grpc::InsecureChannelCredentials());
    stub_ = v1::CoordinatorService::NewStub(channel_);
    admin_ = v1::AdminService::NewStub(channel_);
  }

  ~ServiceTest() override {
    coordinator_->Abandon();
    server_->Shutdown(absl::Seconds(1));
    loop_.Stop();
    loop_thread_.join();
    coordinator_.reset();
    EXPECT_EQ(calls_.size(), 0u);
  }

  static std::unique_ptr<grpc::ClientContext> Context() {
    auto context = std::make_unique<grpc::ClientContext>();
    context->set_deadline(gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC), gpr_time_from_seconds(30, GPR_TIMESPAN)));
    return context;
  }

  absl::Status CreateJob(const std::string& name, v1::JobConfig config = {}) {
    v1::CreateJobRequest request;
    request.set_job(name);
    *request.mutable_config() = std::move(config);
    request.mutable_config()->mutable_outer()->set_variant(v1::VARIANT_AVERAGING);
    v1::CreateJobResponse answer;
    return FromGrpc(admin_->CreateJob(Context().get(), request, &answer));
  }

  absl::StatusOr<v1::JoinResponse> Join(const std::string& job, const std::string& worker, uint64_t elements) {
    v1::JoinRequest request;
    request.set_protocol_min(1);
    request.set_protocol_max(1);
    request.set_job(job);
    request.set_worker(worker);
    request.set_instance(worker + "-0123456789abcdef");
    v1::TensorSpec* tensor = request.mutable_manifest()->add_tensors();
    tensor->set_name("w");
    tensor->add_shape(elements);
    tensor->set_dtype(v1::DTYPE_F32);
    tensor->set_role(v1::TENSOR_ROLE_BMUF);
    v1::JoinResponse answer;
    const absl::Status status = FromGrpc(stub_->Join(Context().get(), request, &answer));
    if (!status.ok()) return status;
    return answer;
  }

  static v1::PushDeltaRequest Header(const v1::Session& session, uint64_t round, uint64_t bytes, uint32_t digest) {
    v1::PushDeltaRequest message;
    v1::PushHeader* header = message.mutable_header();
    *header->mutable_session() = session;
    header->set_kind(round == 0 ? v1::PAYLOAD_KIND_INITIAL_MODEL : v1::PAYLOAD_KIND_DELTA);
    header->set_round(round);
    header->set_base_version(round == 0 ? 0 : round - 1);
    header->set_base_digest(digest);
    header->set_codec(v1::CODEC_FP32);
    header->set_payload_bytes(bytes);
    return message;
  }

  static v1::PushDeltaRequest ChunkOf(const std::string& payload, uint64_t offset,
                                      size_t size = limits::kMaxChunkBytes) {
    v1::PushDeltaRequest message;
    message.mutable_chunk()->set_offset(offset);
    message.mutable_chunk()->set_data(payload.substr(offset, size));
    const std::string& data = message.chunk().data();
    message.mutable_chunk()->set_crc32c(Crc32c(data.data(), data.size()));
    return message;
  }

  absl::StatusOr<v1::PushDeltaResponse> Push(const std::vector<v1::PushDeltaRequest>& messages) {
    v1::PushDeltaResponse answer;
    auto context = Context();
    auto writer = stub_->PushDelta(context.get(), &answer);
    for (const v1::PushDeltaRequest& message : messages) {
      if (!writer->Write(message)) break;
    }
    writer->WritesDone();
    const absl::Status status = FromGrpc(writer->Finish());
    if (!status.ok()) return status;
    return answer;
  }

  absl::StatusOr<v1::PushDeltaResponse> Push(const v1::Session& session, uint64_t round, const std::string& payload,
                                             uint32_t digest) {
    std::vector<v1::PushDeltaRequest> messages = {Header(session, round, payload.size(), digest)};
    for (uint64_t at = 0; at < payload.size(); at += limits::kMaxChunkBytes) messages.push_back(ChunkOf(payload, at));
    messages.emplace_back().mutable_end()->set_digest(Crc32c(payload.data(), payload.size()));
    return Push(messages);
  }

  static std::string Payload(const std::vector<float>& values) {
    return std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float));
  }

  // The first event of `kind`; fails if the stream ends before.
  std::optional<v1::WatchRoundResponse> WatchFor(const v1::Session& session, uint64_t round,
                                                 v1::WatchRoundResponse::EventCase kind) {
    v1::WatchRoundRequest request;
    *request.mutable_session() = session;
    request.set_round(round);
    auto context = Context();
    auto reader = stub_->WatchRound(context.get(), request);
    v1::WatchRoundResponse event;
    while (reader->Read(&event)) {
      if (event.event_case() == kind) {
        context->TryCancel();
        return event;
      }
    }
    ADD_FAILURE() << "no event " << kind << ": " << FromGrpc(reader->Finish());
    return std::nullopt;
  }

  absl::StatusOr<std::string> Pull(v1::PullModelRequest request) {
    auto context = Context();
    auto reader = stub_->PullModel(context.get(), request);
    v1::PullModelResponse message;
    std::string bytes;
    bool ended = false;
    while (reader->Read(&message)) {
      switch (message.part_case()) {
        case v1::PullModelResponse::kHeader:
          EXPECT_TRUE(bytes.empty());
          break;
        case v1::PullModelResponse::kChunk: {
          const v1::Chunk& chunk = message.chunk();
          EXPECT_LE(chunk.data().size(), limits::kMaxChunkBytes);
          EXPECT_EQ(chunk.offset(), request.offset() + bytes.size());
          EXPECT_EQ(chunk.crc32c(), Crc32c(chunk.data().data(), chunk.data().size()));
          bytes += chunk.data();
          break;
        }
        case v1::PullModelResponse::kEnd:
          EXPECT_EQ(message.end().digest(), Crc32c(bytes.data(), bytes.size()));
          ended = true;
          break;
        default:
          ADD_FAILURE();
      }
    }
    const absl::Status status = FromGrpc(reader->Finish());
    if (!status.ok()) return status;
    EXPECT_TRUE(ended);
    return bytes;
  }

  using Loop = coordinator::Loop;
  ops::OpenCalls calls_;
  ops::Metrics metrics_;
  CallBook book_{Clock::Real(), calls_, metrics_};
  Watchdog watchdog_{Clock::Real()};
  Loop loop_{Clock::Real(), {}};
  MemoryBudget budget_{uint64_t{256} << 20};
  ThreadPool pool_{"split", 1};
  std::unique_ptr<ThreadPool> executor_ = std::make_unique<ThreadPool>("test", 2);
  storage::MemoryLedger ledger_{Epoch(0)};
  coordinator::Observer observer_;
  coordinator::Seams seams_;
  Epoch epoch_;
  std::unique_ptr<coordinator::Coordinator> coordinator_;
  std::thread loop_thread_;
  std::unique_ptr<CoordinatorServiceImpl> workers_;
  std::unique_ptr<AdminServiceImpl> operators_;
  std::unique_ptr<GrpcServer> server_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::CoordinatorService::Stub> stub_;
  std::unique_ptr<v1::AdminService::Stub> admin_;
};

TEST_F(ServiceTest, AStockClientTrainsARound) {
  v1::JobConfig config;
  config.mutable_barrier()->set_min_workers(2);
  ASSERT_EQ(CreateJob("lm", config), absl::OkStatus());
  // More than two chunks, and not a multiple of their size.
  constexpr uint64_t kElements = 700'001;
  const auto a = Join("lm", "a", kElements), b = Join("lm", "b", kElements);
  ASSERT_TRUE(a.ok() && b.ok()) << a.status() << b.status();
  EXPECT_EQ(a->max_chunk_bytes(), limits::kMaxChunkBytes);
  ASSERT_TRUE(a->need_initial_model());
  std::vector<float> initial(kElements), delta(kElements);
  for (uint64_t i = 0; i < kElements; ++i) initial[i] = static_cast<float>(i % 97);
  for (uint64_t i = 0; i < kElements; ++i) delta[i] = static_cast<float>(i % 31) / 4;
  ASSERT_TRUE(Push(a->session(), 0, Payload(initial), 0).ok());
  const auto started = WatchFor(b->session(), 1, v1::WatchRoundResponse::kStarted);
  ASSERT_TRUE(started.has_value());
  const uint32_t digest = started->started().base_digest();
  EXPECT_EQ(digest, Crc32c(Payload(initial).data(), 4 * kElements));

  for (const auto* worker : {&*a, &*b}) {
    const auto pushed = Push(worker->session(), 1, Payload(delta), digest);
    ASSERT_TRUE(pushed.ok()) << pushed.status();
    EXPECT_EQ(pushed->outcome(), v1::PUSH_OUTCOME_ACCEPTED);
  }
  const auto committed = WatchFor(a->session(), 1, v1::WatchRoundResponse::kCommitted);
  ASSERT_TRUE(committed.has_value());
  EXPECT_EQ(committed->committed().contributors_size(), 2);

  std::vector<float> expected(kElements);
  for (uint64_t i = 0; i < kElements; ++i) expected[i] = initial[i] + delta[i];
  v1::PullModelRequest pull;
  pull.set_job("lm");
  const auto whole = Pull(pull);
  ASSERT_TRUE(whole.ok()) << whole.status();
  EXPECT_EQ(*whole, Payload(expected));
  EXPECT_EQ(committed->committed().model_digest(), Crc32c(whole->data(), whole->size()));
  pull.set_offset(1'048'570);
  pull.set_length(1'100'000);
  EXPECT_EQ(*Pull(pull), whole->substr(1'048'570, 1'100'000));

  v1::ExportModelRequest request;
  request.set_job("lm");
  auto context = Context();
  auto reader = admin_->ExportModel(context.get(), request);
  std::string file;
  for (v1::ExportModelResponse piece; reader->Read(&piece);) {
    EXPECT_EQ(piece.offset(), file.size());
    file += piece.data();
  }
  EXPECT_TRUE(reader->Finish().ok());
  EXPECT_EQ(file.substr(file.size() - whole->size()), *whole);
}

TEST_F(ServiceTest, RefusalsCarryTheirReasonOverTheWire) {
  const absl::Status refused = Join("nothing", "w", 1).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(ReasonOf(refused), v1::REASON_JOB_NOT_FOUND);
  EXPECT_EQ(MetadataOf(refused, "job"), "nothing");
  v1::CheckpointResponse answer;
  EXPECT_EQ(ReasonOf(FromGrpc(admin_->Checkpoint(Context().get(), v1::CheckpointRequest(), &answer))),
            v1::REASON_NOT_IMPLEMENTED);
}

TEST_F(ServiceTest, StreamsOutOfOrderAreRefused) {
  ASSERT_EQ(CreateJob("lm"), absl::OkStatus());
  const auto joined = Join("lm", "w", 2);
  ASSERT_TRUE(joined.ok());
  const std::string payload = Payload({1, 2});
  const v1::PushDeltaRequest header = Header(joined->session(), 0, payload.size(), 0);
  const v1::PushDeltaRequest chunk = ChunkOf(payload, 0);
  v1::PushDeltaRequest end;
  end.mutable_end()->set_digest(0);
  const std::vector<std::vector<v1::PushDeltaRequest>> streams = {{},
                                                                  {chunk},
                                                                  {end},
                                                                  {{}},
                                                                  {header},
                                                                  {header, header},
                                                                  {header, {}},
                                                                  {header, end},
                                                                  {header, chunk, header},
                                                                  {header, chunk},
                                                                  {header, chunk, ChunkOf(payload + "x", 8)}};
  for (size_t i = 0; i < streams.size(); ++i) {
    EXPECT_EQ(ReasonOf(Push(streams[i]).status()), v1::REASON_BAD_CHUNK) << i;
  }
  v1::PushDeltaRequest large = header;
  large.mutable_header()->mutable_session()->set_token(std::string(limits::kMaxPushHeaderBytes, 't'));
  EXPECT_EQ(ReasonOf(Push({large}).status()), v1::REASON_INVALID_REQUEST);
  EXPECT_TRUE(Push(joined->session(), 0, payload, 0).ok());
}

TEST_F(ServiceTest, ACancelledPushIsResumed) {
  ASSERT_EQ(CreateJob("lm"), absl::OkStatus());
  const auto joined = Join("lm", "w", 4);
  ASSERT_TRUE(Push(joined->session(), 0, Payload({0, 0, 0, 0}), 0).ok());
  const uint32_t digest = WatchFor(joined->session(), 1, v1::WatchRoundResponse::kStarted)->started().base_digest();
  const std::string payload = Payload({1, 2, 3, 4});
  {
    v1::PushDeltaResponse answer;
    auto context = Context();
    auto writer = stub_->PushDelta(context.get(), &answer);
    ASSERT_TRUE(writer->Write(Header(joined->session(), 1, payload.size(), digest)));
    ASSERT_TRUE(writer->Write(ChunkOf(payload, 0, 8)));
    // Seen by the coordinator, so that there is something to keep.
    v1::GetStatusRequest status;
    status.set_job("lm");
    v1::GetStatusResponse seen;
    do {
      seen.Clear();
      ASSERT_TRUE(admin_->GetStatus(Context().get(), status, &seen).ok());
    } while (seen.jobs(0).workers(0).received_bytes() != 8);
    context->TryCancel();
    EXPECT_FALSE(writer->Finish().ok());
  }
  v1::QueryPushRequest query;
  *query.mutable_session() = joined->session();
  query.set_round(1);
  v1::QueryPushResponse where;
  ASSERT_TRUE(stub_->QueryPush(Context().get(), query, &where).ok());
  EXPECT_EQ(where.committed_offset(), 8u);
  v1::PushDeltaRequest header = Header(joined->session(), 1, payload.size(), digest);
  header.mutable_header()->set_resume_offset(8);
  v1::PushDeltaRequest end;
  end.mutable_end()->set_digest(Crc32c(payload.data(), payload.size()));
  const auto resumed = Push({header, ChunkOf(payload, 8), end});
  ASSERT_TRUE(resumed.ok()) << resumed.status();
  EXPECT_EQ(resumed->outcome(), v1::PUSH_OUTCOME_ACCEPTED);
}

TEST_F(ServiceTest, WatchesEndWhenTheirCallerGoes) {
  ASSERT_EQ(CreateJob("lm"), absl::OkStatus());
  const auto joined = Join("lm", "w", 2);
  v1::WatchRoundRequest request;
  *request.mutable_session() = joined->session();
  for (int i = 0; i < 20; ++i) {
    auto context = Context();
    auto reader = stub_->WatchRound(context.get(), request);
    v1::WatchRoundResponse event;
    ASSERT_TRUE(reader->Read(&event));
    context->TryCancel();
    reader->Finish();
  }
  EXPECT_TRUE(calls_.WaitUntilNone(absl::Seconds(20)));
}

TEST_F(ServiceTest, AJobIsWatchedByOperators) {
  ASSERT_EQ(CreateJob("lm"), absl::OkStatus());
  v1::WatchJobRequest request;
  request.set_job("lm");
  auto context = Context();
  auto reader = admin_->WatchJob(context.get(), request);
  v1::WatchJobResponse news;
  ASSERT_TRUE(reader->Read(&news));
  EXPECT_EQ(news.status().workers_size(), 0);
  ASSERT_TRUE(Join("lm", "w", 2).ok());
  ASSERT_TRUE(reader->Read(&news));
  EXPECT_EQ(news.status().workers(0).worker(), "w");
  context->TryCancel();
  reader->Finish();
}

TEST_F(ServiceTest, OpenCallsAreAnsweredWhenTheDaemonEnds) {
  v1::JobConfig config;
  config.mutable_barrier()->set_min_workers(2);
  ASSERT_EQ(CreateJob("lm", config), absl::OkStatus());
  const auto joined = Join("lm", "w", 2);
  v1::WatchRoundRequest request;
  *request.mutable_session() = joined->session();
  auto context = Context();
  auto reader = stub_->WatchRound(context.get(), request);
  v1::WatchRoundResponse event;
  ASSERT_TRUE(reader->Read(&event));
  coordinator_->Abandon();
  while (reader->Read(&event)) {
  }
  EXPECT_EQ(ReasonOf(FromGrpc(reader->Finish())), v1::REASON_DRAINING);
  EXPECT_EQ(ReasonOf(CreateJob("other")), v1::REASON_DRAINING);
}

TEST_F(ServiceTest, APortThatIsTakenIsNamed) {
  GrpcServer::Options options;
  options.listen = server_->address();
  const auto second = GrpcServer::Start(options, {});
  ASSERT_FALSE(second.ok());
  EXPECT_NE(std::string(second.status().message()).find(server_->address()), std::string::npos);
  options.listen = "nowhere";
  EXPECT_EQ(GrpcServer::Start(options, {}).status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace bmuf::service
