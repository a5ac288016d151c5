#include "client/fake_coordinator.h"

#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "core/base/crc32c.h"
#include "core/base/error.h"
#include "core/base/status_macros.h"
#include "core/codec/codec.h"
#include "core/kernels/kernels.h"

namespace bmuf::client {
namespace {

constexpr size_t kPullChunkBytes = 64;

grpc::Status ToGrpc(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()), std::string(status.message()),
                      ToRpcStatus(status).SerializeAsString());
}

template <typename T>
bool TakeOne(std::vector<T>& from, T* to) {
  if (from.empty()) return false;
  *to = from.front();
  from.erase(from.begin());
  return true;
}

uint32_t DigestOf(const std::string& bytes) { return Crc32c(bytes.data(), bytes.size()); }

}  // namespace

void FakeCoordinator::Set(const std::function<void(Faults&)>& change) {
  absl::MutexLock lock(&mu_);
  change(faults_);
}

Seen FakeCoordinator::seen() const {
  absl::MutexLock lock(&mu_);
  return seen_;
}

bool FakeCoordinator::Await(const std::function<bool(const Seen&)>& reached) {
  const auto condition = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return reached(seen_); };
  absl::MutexLock lock(&mu_);
  return mu_.AwaitWithTimeout(absl::Condition(&condition), absl::Seconds(10));
}

void FakeCoordinator::Publish(uint64_t version, std::string payload) {
  absl::MutexLock lock(&mu_);
  has_model_ = true;
  version_ = version;
  model_ = std::move(payload);
}

void FakeCoordinator::ContinueFrom(const FakeCoordinator& former) { Publish(former.version(), former.payload()); }

void FakeCoordinator::HoldCommits(bool hold) {
  absl::MutexLock lock(&mu_);
  hold_commits_ = hold;
  MaybeCommit();
}

void FakeCoordinator::FailAttempt() {
  absl::MutexLock lock(&mu_);
  folded_.clear();
  kept_.clear();
  ++attempt_;
  collecting_ = false;
}

void FakeCoordinator::StartRound() {
  absl::MutexLock lock(&mu_);
  collecting_ = true;
}

void FakeCoordinator::CommitWithout(int count) {
  absl::MutexLock lock(&mu_);
  for (int i = 0; i < count; ++i) Commit(model_);
}

void FakeCoordinator::ForgetSessions() {
  absl::MutexLock lock(&mu_);
  session_.Clear();
  instance_.clear();
}

void FakeCoordinator::Finish() {
  absl::MutexLock lock(&mu_);
  finished_ = true;
}

void FakeCoordinator::ElectAtJoin(bool at_join) {
  absl::MutexLock lock(&mu_);
  elected_ = at_join;
}

void FakeCoordinator::ElectNow() { ElectAtJoin(true); }

uint64_t FakeCoordinator::version() const {
  absl::MutexLock lock(&mu_);
  return version_;
}

std::string FakeCoordinator::payload() const {
  absl::MutexLock lock(&mu_);
  return model_;
}

template <typename Condition>
bool FakeCoordinator::AwaitOrGone(grpc::ServerContext* context, Condition condition) {
  // The synchronous API does not wake a handler whose caller has gone.
  while (!mu_.AwaitWithTimeout(absl::Condition(&condition), absl::Milliseconds(20))) {
    if (context->IsCancelled()) return false;
  }
  return true;
}

absl::Status FakeCoordinator::Check(const v1::Session& session) const {
  if (session.epoch() != epoch_) {
    return Error(v1::REASON_EPOCH_CHANGED, "this is another life of the coordinator").With("epoch", epoch_);
  }
  if (session_.token().empty() || session.token() != session_.token()) {
    return Error(v1::REASON_SESSION_NOT_FOUND, "no such session");
  }
  return absl::OkStatus();
}

grpc::Status FakeCoordinator::Join(grpc::ServerContext*, const v1::JoinRequest* request, v1::JoinResponse* answer) {
  absl::MutexLock lock(&mu_);
  seen_.joins.push_back(*request);
  absl::Status fault;
  if (TakeOne(faults_.join, &fault)) return ToGrpc(fault);
  if (finished_) return ToGrpc(Error(v1::REASON_JOB_FINISHED, "the job is finished"));
  absl::StatusOr<std::shared_ptr<const Layout>> layout = Layout::Create(request->manifest());
  if (!layout.ok()) return ToGrpc(layout.status());
  layout_ = *layout;
  if (request->instance() != instance_) {
    instance_ = request->instance();
    session_.set_job(request->job());
    session_.set_worker(request->worker());
    session_.set_incarnation(++tokens_);
    session_.set_epoch(epoch_);
    session_.set_token(absl::StrCat("token-", epoch_, "-", tokens_));
  }
  *answer->mutable_session() = session_;
  answer->set_protocol(1);
  answer->mutable_lease()->set_seconds(30);
  answer->mutable_heartbeat_period()->set_nanos(100'000'000);
  answer->set_round(has_model_ ? version_ + 1 : 0);
  answer->set_version(version_);
  answer->set_has_model(has_model_);
  answer->set_need_initial_model(!has_model_ && elected_);
  *answer->mutable_config() = config_;
  answer->set_max_chunk_bytes(1 << 20);
  if (has_model_) answer->set_model_digest(DigestOf(model_));
  return grpc::Status::OK;
}

grpc::Status FakeCoordinator::Heartbeat(grpc::ServerContext* context, const v1::HeartbeatRequest* request,
                                        v1::HeartbeatResponse* answer) {
  absl::MutexLock lock(&mu_);
  ++seen_.heartbeats;
  const auto speaks = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return !faults_.silent; };
  if (!AwaitOrGone(context, speaks)) return grpc::Status::CANCELLED;
  absl::Status fault;
  if (TakeOne(faults_.heartbeat, &fault)) return ToGrpc(fault);
  if (absl::Status known = Check(request->session()); !known.ok()) return ToGrpc(known);
  answer->set_epoch(epoch_);
  answer->set_round(has_model_ ? version_ + 1 : 0);
  answer->set_version(version_);
  answer->set_need_initial_model(!has_model_ && elected_);
  return grpc::Status::OK;
}

absl::Status FakeCoordinator::Admit(const v1::PushHeader& header) {
  absl::Status fault;
  if (TakeOne(faults_.push, &fault)) return fault;
  RETURN_IF_ERROR(Check(header.session()));
  if (finished_) return Error(v1::REASON_JOB_FINISHED, "the job is finished");
  ASSIGN_OR_RETURN(const uint64_t encoded, EncodedBytes(header.codec(), layout_->bmuf_elements()));
  if (header.payload_bytes() != encoded + layout_->auxiliary_bytes()) return Error(v1::REASON_SIZE_MISMATCH, "size");
  const auto stale = [version = version_](const std::string& what) {
    return Error(v1::REASON_STALE_ROUND, what).With("round", version + 1).With("version", version);
  };
  if (header.kind() == v1::PAYLOAD_KIND_INITIAL_MODEL) {
    if (has_model_) return stale("the job has its initial model");
    if (!elected_) return Error(v1::REASON_NOT_INITIALIZER, "another worker sends the initial model");
  } else {
    if (!has_model_) return Error(v1::REASON_NO_MODEL, "there is no model yet");
    if (header.round() != version_ + 1) return stale(absl::StrCat("round ", header.round(), " is over"));
    if (header.base_digest() != DigestOf(model_)) {
      return Error(v1::REASON_BASE_MISMATCH, "not the base").With("version", version_);
    }
    if (!collecting_) return stale(absl::StrCat("round ", header.round(), " has not started"));
  }
  if (header.resume_offset() == 0) kept_.clear();
  if (header.resume_offset() != kept_.size()) {
    return Error(v1::REASON_OFFSET_MISMATCH, "offset").With("offset", kept_.size());
  }
  return absl::OkStatus();
}

absl::Status FakeCoordinator::TakeChunk(const v1::PushHeader& header, const v1::Chunk& chunk) {
  absl::MutexLock lock(&mu_);
  seen_.payload_bytes += chunk.data().size();
  if (chunk.data().empty() || chunk.data().size() > (1 << 20)) return Error(v1::REASON_BAD_CHUNK, "size of a chunk");
  if (chunk.offset() != kept_.size()) return Error(v1::REASON_OFFSET_MISMATCH, "gap");
  if (chunk.crc32c() != DigestOf(chunk.data())) return Error(v1::REASON_CHECKSUM_MISMATCH, "chunk");
  if (kept_.size() + chunk.data().size() > header.payload_bytes()) return Error(v1::REASON_SIZE_MISMATCH, "too long");
  kept_ += chunk.data();
  if (faults_.broken_pushes > 0) {
    --faults_.broken_pushes;
    return absl::UnavailableError("the connection broke");
  }
  return absl::OkStatus();
}

absl::Status FakeCoordinator::Fold(const v1::PushHeader& header) {
  if (kept_.size() != header.payload_bytes()) return Error(v1::REASON_SIZE_MISMATCH, "an end before all bytes");
  std::string payload = std::exchange(kept_, "");
  if (header.kind() == v1::PAYLOAD_KIND_INITIAL_MODEL) {
    seen_.initial_models.push_back(payload);
    has_model_ = true;
    version_ = 0;
    model_ = std::move(payload);
    return absl::OkStatus();
  }
  folded_ = std::move(payload);
  folded_digest_ = DigestOf(folded_);
  folded_codec_ = header.codec();
  seen_.folded_rounds.push_back(header.round());
  MaybeCommit();
  return absl::OkStatus();
}

void FakeCoordinator::MaybeCommit() {
  if (folded_.empty() || hold_commits_) return;
  const Kernels& kernels = **KernelsByName("scalar");
  std::vector<float> model(layout_->bmuf_elements()), delta(layout_->bmuf_elements());
  std::memcpy(model.data(), model_.data(), model.size() * sizeof(float));
  const size_t encoded = folded_.size() - layout_->auxiliary_bytes();
  const auto* bytes = reinterpret_cast<const uint8_t*>(folded_.data());
  if (!Decode(kernels, folded_codec_, absl::MakeConstSpan(bytes, encoded), absl::MakeSpan(delta)).ok()) return;
  for (size_t i = 0; i < model.size(); ++i) model[i] += delta[i];
  std::string next(reinterpret_cast<const char*>(model.data()), model.size() * sizeof(float));
  next.append(folded_, encoded, std::string::npos);
  Commit(std::move(next));
}

void FakeCoordinator::Commit(std::string next) {
  model_ = std::move(next);
  ++version_;
  attempt_ = 1;
  collecting_ = true;
  folded_.clear();
  kept_.clear();
  if (config_.max_rounds() > 0 && version_ >= config_.max_rounds()) finished_ = true;
}

grpc::Status FakeCoordinator::PushDelta(grpc::ServerContext*, grpc::ServerReader<v1::PushDeltaRequest>* reader,
                                        v1::PushDeltaResponse* answer) {
  v1::PushDeltaRequest message;
  if (!reader->Read(&message) || !message.has_header()) return ToGrpc(Error(v1::REASON_BAD_CHUNK, "no header"));
  const v1::PushHeader header = message.header();
  answer->set_round(header.round());
  answer->set_epoch(epoch_);
  {
    absl::MutexLock lock(&mu_);
    seen_.pushes.push_back(header);
    if (!folded_.empty() && header.digest() == folded_digest_ && header.round() == version_ + 1 &&
        Check(header.session()).ok()) {
      answer->set_outcome(v1::PUSH_OUTCOME_DUPLICATE);
      return grpc::Status::OK;
    }
    if (absl::Status admitted = Admit(header); !admitted.ok()) return ToGrpc(admitted);
  }
  while (reader->Read(&message)) {
    if (message.has_chunk()) {
      if (absl::Status taken = TakeChunk(header, message.chunk()); !taken.ok()) return ToGrpc(taken);
      continue;
    }
    if (!message.has_end()) return ToGrpc(Error(v1::REASON_BAD_CHUNK, "a second header"));
    absl::MutexLock lock(&mu_);
    if (message.end().digest() != DigestOf(kept_)) return ToGrpc(Error(v1::REASON_CHECKSUM_MISMATCH, "digest"));
    answer->set_outcome(v1::PUSH_OUTCOME_ACCEPTED);
    return ToGrpc(Fold(header));
  }
  return grpc::Status(grpc::StatusCode::CANCELLED, "the stream ended early");
}

grpc::Status FakeCoordinator::QueryPush(grpc::ServerContext*, const v1::QueryPushRequest* request,
                                        v1::QueryPushResponse* answer) {
  absl::MutexLock lock(&mu_);
  if (absl::Status known = Check(request->session()); !known.ok()) return ToGrpc(known);
  answer->set_committed_offset(kept_.size());
  answer->set_crc32c(DigestOf(kept_));
  answer->set_received(!folded_.empty());
  answer->set_epoch(epoch_);
  return grpc::Status::OK;
}

grpc::Status FakeCoordinator::WatchRound(grpc::ServerContext* context, const v1::WatchRoundRequest* request,
                                         grpc::ServerWriter<v1::WatchRoundResponse>* writer) {
  const uint64_t round = request->round();
  uint32_t attempt_seen = 0, attempt_started = 0;
  bool waiting_told = false;
  while (true) {
    v1::WatchRoundResponse event;
    event.set_epoch(epoch_);
    bool final = false;
    {
      absl::MutexLock lock(&mu_);
      const auto asked = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
        return has_model_ && round == version_ + 1 && collecting_ && folded_.empty() && attempt_started < attempt_;
      };
      const auto restarted = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
        return has_model_ && round == version_ + 1 && attempt_seen != 0 && attempt_seen < attempt_;
      };
      const auto news = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
        return !waiting_told || !Check(request->session()).ok() || (has_model_ && round <= version_) || finished_ ||
               asked() || restarted();
      };
      if (!AwaitOrGone(context, news)) return grpc::Status::CANCELLED;
      if (absl::Status known = Check(request->session()); !known.ok()) return ToGrpc(known);
      if (has_model_ && round <= version_) {
        v1::RoundCommitted* committed = event.mutable_committed();
        committed->set_version(round);
        committed->set_newest_version(version_);
        committed->set_next_round(version_ + 1);
        committed->set_reset_inner_state(config_.reset_inner_state());
        committed->set_job_finished(finished_);
        if (round == version_) committed->set_model_digest(DigestOf(model_));
        final = true;
      } else if (finished_) {
        event.mutable_ended()->set_job_state(v1::JOB_STATE_FINISHED);
        final = true;
      } else if (restarted()) {
        event.mutable_restarted()->set_attempt(attempt_);
        event.mutable_restarted()->set_reason("too few");
        attempt_seen = attempt_;
      } else if (asked()) {
        v1::RoundStarted* started = event.mutable_started();
        started->set_base_version(version_);
        started->set_base_digest(DigestOf(model_));
        started->set_size(1);
        started->set_block_steps(config_.block_steps());
        started->set_attempt(attempt_);
        attempt_seen = attempt_started = attempt_;
      } else {
        event.mutable_waiting()->set_reason("waiting");
        if (has_model_ && round == version_ + 1) attempt_seen = attempt_;
        waiting_told = true;
      }
    }
    if (!writer->Write(event)) return grpc::Status::CANCELLED;
    if (final) return grpc::Status::OK;
  }
}

grpc::Status FakeCoordinator::PullModel(grpc::ServerContext* context, const v1::PullModelRequest* request,
                                        grpc::ServerWriter<v1::PullModelResponse>* writer) {
  v1::PullModelResponse message;
  std::string payload;
  uint64_t offset = request->offset();
  bool breaks = false;
  {
    absl::MutexLock lock(&mu_);
    seen_.pulls.push_back(*request);
    const auto open = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return !faults_.hold_pulls; };
    if (!AwaitOrGone(context, open)) return grpc::Status::CANCELLED;
    if (!request->session().worker().empty()) {
      if (absl::Status known = Check(request->session()); !known.ok()) return ToGrpc(known);
    }
    if (faults_.no_model_pulls > 0) {
      --faults_.no_model_pulls;
      return ToGrpc(Error(v1::REASON_NO_MODEL, "there is no model yet"));
    }
    if (!has_model_) return ToGrpc(Error(v1::REASON_NO_MODEL, "there is no model yet"));
    if (request->has_version() && request->version() != version_) {
      return ToGrpc(Error(v1::REASON_NOT_KEPT, "not kept").With("version", version_));
    }
    payload = model_;
    const float nan = std::numeric_limits<float>::quiet_NaN();
    if (faults_.nan_in_broadcast) std::memcpy(payload.data(), &nan, sizeof(nan));
    if (faults_.nan_in_auxiliary) std::memcpy(payload.data() + payload.size() - sizeof(nan), &nan, sizeof(nan));
    v1::PullHeader* header = message.mutable_header();
    header->set_version(version_);
    header->set_payload_bytes(payload.size());
    header->set_codec(v1::CODEC_FP32);
    header->set_kind(v1::MODEL_KIND_BROADCAST);
    header->set_model_digest(DigestOf(payload));
    header->set_payload_digest(DigestOf(payload) ^ (faults_.wrong_payload_digest ? 1 : 0));
    header->set_epoch(faults_.pull_epoch != 0 ? faults_.pull_epoch : epoch_);
    *header->mutable_manifest() = layout_->manifest();
    if (offset > 0 && faults_.other_version_on_resume) {
      faults_.other_version_on_resume = false;
      header->set_version(version_ + 1);
      // Bytes that would be accepted if nobody looked at the header.
      header->set_payload_digest(header->payload_digest() + 1);
    }
    breaks = faults_.broken_pulls > 0 && payload.size() > kPullChunkBytes;
    if (breaks) --faults_.broken_pulls;
  }
  if (offset > payload.size()) return ToGrpc(Error(v1::REASON_OFFSET_MISMATCH, "offset"));
  if (!writer->Write(message)) return grpc::Status::CANCELLED;
  const std::string range = payload.substr(offset);
  while (offset < payload.size()) {
    v1::Chunk* chunk = message.mutable_chunk();
    chunk->set_offset(offset);
    chunk->set_data(payload.substr(offset, kPullChunkBytes));
    chunk->set_crc32c(DigestOf(chunk->data()));
    offset += chunk->data().size();
    if (!writer->Write(message)) return grpc::Status::CANCELLED;
    if (breaks) return ToGrpc(absl::UnavailableError("the connection broke"));
  }
  message.mutable_end()->set_digest(DigestOf(range));
  writer->Write(message);
  return grpc::Status::OK;
}

grpc::Status FakeCoordinator::Leave(grpc::ServerContext*, const v1::LeaveRequest* request, v1::LeaveResponse* answer) {
  absl::MutexLock lock(&mu_);
  ++seen_.leaves;
  if (absl::Status known = Check(request->session()); !known.ok()) return ToGrpc(known);
  session_.Clear();
  instance_.clear();
  answer->set_epoch(epoch_);
  return grpc::Status::OK;
}

FakeServer::FakeServer() {
  char folder[] = "/tmp/bmufXXXXXX";  // Short: a socket's path is limited to 107 characters.
  if (mkdtemp(folder) != nullptr) folder_ = folder;
}

FakeServer::~FakeServer() {
  Stop();
  unlink((folder_ + "/s").c_str());
  rmdir(folder_.c_str());
}

void FakeServer::Start(FakeCoordinator* service) {
  grpc::ServerBuilder builder;
  builder.AddListeningPort(target(), grpc::InsecureServerCredentials());
  builder.RegisterService(service);
  server_ = builder.BuildAndStart();
}

void FakeServer::Stop() {
  if (server_ == nullptr) return;
  server_->Shutdown(gpr_inf_past(GPR_CLOCK_REALTIME));  // At once.
  server_->Wait();
  server_.reset();
}

}  // namespace bmuf::client
