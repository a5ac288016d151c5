#include "client/link.h"

#include <algorithm>
#include <cstring>
#include <random>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "client/constants.h"
#include "client/retry.h"
#include "core/base/clock.h"
#include "core/base/crc32c.h"
#include "core/base/error.h"
#include "core/base/names.h"
#include "core/base/status_macros.h"
#include "core/codec/codec.h"

namespace bmuf::client {
namespace {

absl::Status FromGrpc(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  absl::Status error(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
  google::rpc::Status rpc;
  if (!status.error_details().empty() && rpc.ParseFromString(status.error_details()) &&
      rpc.code() == static_cast<int>(status.error_code())) {
    error = FromRpcStatus(rpc);
  }
  // A cancellation of ours is known before the status is looked at. Any other is a server's that shuts down or a
  // proxy's.
  if (absl::IsCancelled(error)) return absl::UnavailableError("the call was cancelled by the other side");
  return error;
}

std::string NewInstance() {
  std::random_device device;
  std::string bytes;
  for (int i = 0; i < 4; ++i) {
    const uint32_t word = device();
    bytes.append(reinterpret_cast<const char*>(&word), sizeof(word));
  }
  return bytes;
}

std::shared_ptr<grpc::Channel> MakeChannel(const LinkOptions& options) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, static_cast<int>(absl::ToInt64Milliseconds(kKeepaliveTime)));
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, static_cast<int>(absl::ToInt64Milliseconds(kKeepaliveTimeout)));
  // A push must not be repeated behind our back.
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, options.use_http_proxy ? 1 : 0);
  // A coordinator that comes back is found within the cap, not after gRPC's two minutes.
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 2000);
  // Two links of one process do not share a connection's fate.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  return grpc::CreateCustomChannel(options.target, grpc::InsecureChannelCredentials(), arguments);
}

absl::Duration ToDuration(const google::protobuf::Duration& d) {
  return absl::Seconds(d.seconds()) + absl::Nanoseconds(d.nanos());
}

}  // namespace

// Registers itself for its lifetime. `watched`: the watchdog ends it when nothing moves.
class Link::Call {
 public:
  Call(Link& link, bool watched) : link_(link), watched_(watched) {
    Moved();
    absl::MutexLock lock(&link_.mu_);
    link_.call_ = this;
    if (link_.cancelled_) context.TryCancel();
  }
  ~Call() {
    absl::MutexLock lock(&link_.mu_);
    link_.call_ = nullptr;
  }
  void Moved() { moved_ns_ = absl::ToInt64Nanoseconds(Clock::Real().Now().since_origin()); }
  bool Idle() const {
    const absl::Duration since =
        Clock::Real().Now().since_origin() - absl::Nanoseconds(moved_ns_.load(std::memory_order_relaxed));
    return watched_ && since > kIdleTimeout;
  }
  // Whether the watchdog ended it.
  bool timed_out() const { return timed_out_; }
  void TimeOut() {
    timed_out_ = true;
    context.TryCancel();
  }

  // Ends a wait because there is news that does not come over it. Requires the link's mutex.
  void Interrupt() {
    if (!interruptible) return;
    interrupted = true;
    context.TryCancel();
  }

  grpc::ClientContext context;
  bool interruptible = false;  // Guarded by the link's mutex, as the next.
  bool interrupted = false;

 private:
  Link& link_;
  const bool watched_;
  std::atomic<int64_t> moved_ns_{0};
  std::atomic<bool> timed_out_{false};
};

// Registers itself for its lifetime.
class Link::Unary {
 public:
  explicit Unary(Link& link) : link_(link) {
    context.set_deadline(absl::ToChronoTime(absl::Now() + kUnaryTimeout));
    absl::MutexLock lock(&link_.mu_);
    link_.unary_.push_back(&context);
    if (link_.cancelled_) context.TryCancel();
  }
  ~Unary() {
    absl::MutexLock lock(&link_.mu_);
    link_.unary_.erase(std::find(link_.unary_.begin(), link_.unary_.end(), &context));
  }

  grpc::ClientContext context;

 private:
  Link& link_;
};

absl::StatusOr<std::unique_ptr<Link>> Link::Create(LinkOptions options, v1::Manifest manifest) {
  RETURN_IF_ERROR(ValidateName("job", options.job));
  RETURN_IF_ERROR(ValidateName("worker", options.worker));
  ASSIGN_OR_RETURN(std::shared_ptr<const Layout> layout, Layout::Create(std::move(manifest)));
  return std::unique_ptr<Link>(new Link(std::move(options), std::move(layout)));
}

Link::Link(LinkOptions options, std::shared_ptr<const Layout> layout)
    : options_(std::move(options)),
      layout_(std::move(layout)),
      instance_(NewInstance()),
      kernels_(**KernelsByName("auto")),
      channel_(MakeChannel(options_)),
      stub_(v1::CoordinatorService::NewStub(channel_)),
      background_([this] { Background(); }) {}

Link::~Link() {
  Cancel();
  {
    absl::MutexLock lock(&mu_);
    stopping_ = true;
  }
  background_.join();
}

void Link::Cancel() {
  absl::MutexLock lock(&mu_);
  cancelled_ = true;
  if (call_ != nullptr) call_->context.TryCancel();
  for (grpc::ClientContext* context : unary_) context->TryCancel();
}

v1::JoinResponse Link::joined() const {
  absl::MutexLock lock(&mu_);
  return joined_;
}

v1::Session Link::session() const {
  absl::MutexLock lock(&mu_);
  return joined_.session();
}

// ------------------------------------------------------------------------------------------------------- membership

absl::StatusOr<v1::JoinResponse> Link::JoinOnce() {
  v1::JoinRequest request;
  request.set_protocol_min(kProtocolVersion);
  request.set_protocol_max(kProtocolVersion);
  request.set_job(options_.job);
  request.set_worker(options_.worker);
  request.set_instance(instance_);
  request.set_trajectories(options_.trajectories);
  *request.mutable_manifest() = layout_->manifest();
  request.set_client_info(options_.client_info);
  v1::JoinResponse answer;
  {
    Unary call(*this);
    RETURN_IF_ERROR(FromGrpc(stub_->Join(&call.context, request, &answer)));
  }
  RETURN_IF_ERROR(CheckEpoch(answer.session().epoch()));
  absl::MutexLock lock(&mu_);
  highest_epoch_ = std::max(highest_epoch_, answer.session().epoch());
  if (answer.session().token() != joined_.session().token()) {
    elected_told_ = false;
    if (call_ != nullptr) call_->Interrupt();
  }
  joined_ = answer;
  is_member_ = true;
  elected_ = answer.need_initial_model();
  return answer;
}

void Link::Told() {
  known_token_ = joined_.session().token();
  elected_told_ = elected_told_ || joined_.need_initial_model();
}

absl::Status Link::CheckEpoch(uint64_t epoch) const {
  absl::MutexLock lock(&mu_);
  if (epoch >= highest_epoch_) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("a coordinator of epoch ", epoch, " answered after one of ",
                                             highest_epoch_, "; waiting for the newer one"));
}

absl::StatusOr<v1::JoinResponse> Link::Join() {
  const MonotonicTime deadline = Clock::Real().Now() + options_.patience;
  for (int attempt = 0;; ++attempt) {
    absl::StatusOr<v1::JoinResponse> answer = JoinOnce();
    if (answer.ok()) {
      absl::MutexLock lock(&mu_);
      Told();
      return answer;
    }
    const RetryDecision decision = DecideRetry(answer.status(), attempt, absl::Uniform(random_, 0.0, 1.0));
    {
      absl::MutexLock lock(&mu_);
      if (cancelled_) return absl::CancelledError("the link was cancelled");
    }
    if (decision.remedy == Remedy::kNone || decision.remedy == Remedy::kStale) return answer.status();
    if (Clock::Real().Now() + decision.delay > deadline) return answer.status();
    if (attempt == 0) {
      Log(absl::StrCat("waiting for the coordinator at ", options_.target, ": ",
                       std::string(answer.status().message())));
    }
    RETURN_IF_ERROR(Wait(decision.delay));
  }
}

bool Link::TakeRejoined(v1::JoinResponse* answer) {
  absl::MutexLock lock(&mu_);
  if (joined_.session().token() == known_token_) return false;
  Told();
  *answer = joined_;
  return true;
}

absl::Status Link::Wait(absl::Duration delay) {
  absl::MutexLock lock(&mu_);
  mu_.AwaitWithTimeout(absl::Condition(&cancelled_), delay);
  return cancelled_ ? absl::CancelledError("the link was cancelled") : absl::OkStatus();
}

absl::Status Link::Recover(const absl::Status& error, int attempt, MonotonicTime* silent_since) {
  {
    absl::MutexLock lock(&mu_);
    if (cancelled_) return absl::CancelledError("the link was cancelled");
  }
  const RetryDecision decision = DecideRetry(error, attempt, absl::Uniform(random_, 0.0, 1.0));
  if (decision.remedy == Remedy::kNone || decision.remedy == Remedy::kStale) return error;
  // A coordinator that answers, if only to say "later", may take all the time it wants.
  if (ReasonOf(error) != v1::REASON_UNSPECIFIED) *silent_since = Clock::Real().Now();
  if (Clock::Real().Now() + decision.delay - *silent_since > options_.patience) return error;
  if (attempt == 0) Log(absl::StrCat("trying again after: ", std::string(error.message())));
  RETURN_IF_ERROR(Wait(decision.delay));
  if (decision.remedy != Remedy::kReattach) return absl::OkStatus();
  absl::StatusOr<v1::JoinResponse> answer = JoinOnce();
  if (answer.ok()) {
    Log(absl::StrCat("joined again, epoch ", answer->session().epoch()));
    return absl::OkStatus();
  }
  // The next try of the call meets the same fault, and this again.
  return DecideRetry(answer.status(), attempt, 0).remedy == Remedy::kNone ? answer.status() : absl::OkStatus();
}

void Link::Background() {
  MonotonicTime next_beat = Clock::Real().Now();
  while (true) {
    absl::Duration period;
    bool is_member;
    {
      absl::MutexLock lock(&mu_);
      mu_.AwaitWithTimeout(absl::Condition(&stopping_), absl::Milliseconds(200));
      if (stopping_) return;
      if (call_ != nullptr && call_->Idle()) call_->TimeOut();
      is_member = is_member_;
      period = std::max(absl::Milliseconds(100), ToDuration(joined_.heartbeat_period()));
    }
    if (!is_member || Clock::Real().Now() < next_beat) continue;
    next_beat = Clock::Real().Now() + period;
    Beat(period);
  }
}

void Link::Beat(absl::Duration period) {
  v1::HeartbeatRequest request;
  {
    absl::MutexLock lock(&mu_);
    if (!is_member_) return;
    *request.mutable_session() = joined_.session();
    beating_ = true;
  }
  request.set_steps_done(steps_done_);
  v1::HeartbeatResponse answer;
  absl::Status status;
  {
    Unary call(*this);
    // One that hangs must not cost the next ones.
    call.context.set_deadline(absl::ToChronoTime(absl::Now() + std::min(kUnaryTimeout, 2 * period)));
    status = FromGrpc(stub_->Heartbeat(&call.context, request, &answer));
  }
  if (status.ok()) status = CheckEpoch(answer.epoch());
  // The calling thread meets the same fault if it calls; while it trains, the place is kept here.
  bool is_member;
  {
    absl::MutexLock lock(&mu_);
    is_member = is_member_ && !cancelled_;
  }
  if (is_member && DecideRetry(status, 0, 0).remedy == Remedy::kReattach) JoinOnce().status().IgnoreError();
  absl::MutexLock lock(&mu_);
  beating_ = false;
  if (!status.ok()) return;
  if (!answer.need_initial_model()) elected_told_ = false;
  elected_ = answer.need_initial_model();
  if (elected_ && !elected_told_ && call_ != nullptr) call_->Interrupt();
}

absl::Status Link::Leave(const std::string& reason) {
  v1::LeaveRequest request;
  {
    absl::MutexLock lock(&mu_);
    if (!is_member_) return absl::OkStatus();
    is_member_ = false;
    // A heartbeat under way that is answered after this would join again.
    for (grpc::ClientContext* context : unary_) context->TryCancel();
    const auto silent = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return !beating_; };
    mu_.Await(absl::Condition(&silent));
    is_member_ = false;
    *request.mutable_session() = joined_.session();
  }
  request.set_reason(reason);
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + kUnaryTimeout));
  v1::LeaveResponse answer;
  return FromGrpc(stub_->Leave(&context, request, &answer));
}

// ------------------------------------------------------------------------------------------------------------ rounds

absl::StatusOr<RoundNews> Link::AwaitRound(uint64_t round) {
  MonotonicTime silent_since = Clock::Real().Now();
  for (int attempt = 0;; ++attempt) {
    v1::JoinResponse answer;
    if (TakeRejoined(&answer)) return RoundNews(Rejoined{std::move(answer)});
    absl::Status status;
    {
      Call call(*this, /*watched=*/false);
      {
        absl::MutexLock lock(&mu_);
        if (round == 0 && elected_ && !elected_told_) {
          elected_told_ = true;
          return RoundNews(Elected{});
        }
        // What came since TakeRejoined looked is not interrupted for.
        if (joined_.session().token() != known_token_) continue;
        call.interruptible = true;
      }
      v1::WatchRoundRequest request;
      *request.mutable_session() = session();
      request.set_round(round);
      auto stream = stub_->WatchRound(&call.context, request);
      v1::WatchRoundResponse event;
      absl::Status fault;
      while (stream->Read(&event)) {
        fault = CheckEpoch(event.epoch());
        if (!fault.ok()) break;
        silent_since = Clock::Real().Now();
        attempt = 0;
        std::optional<RoundNews> news;
        switch (event.event_case()) {
          case v1::WatchRoundResponse::kStarted:
            news = event.started();
            break;
          case v1::WatchRoundResponse::kCommitted:
            news = event.committed();
            break;
          case v1::WatchRoundResponse::kRestarted:
            news = event.restarted();
            break;
          case v1::WatchRoundResponse::kEnded:
            news = event.ended();
            break;
          default:
            break;
        }
        if (!news.has_value()) continue;
        call.context.TryCancel();
        stream->Finish();
        return *std::move(news);
      }
      if (!fault.ok()) call.context.TryCancel();
      status = FromGrpc(stream->Finish());
      if (!fault.ok()) status = fault;
      absl::MutexLock lock(&mu_);
      if (call.interrupted && !cancelled_) continue;
    }
    if (status.ok()) status = absl::UnavailableError("the watch ended without a final event");
    RETURN_IF_ERROR(Recover(status, attempt, &silent_since));
  }
}

// ------------------------------------------------------------------------------------------------------------- pushes

absl::Status Link::PushOnce(const v1::PushHeader& header, absl::Span<const uint8_t> payload,
                            v1::PushDeltaResponse* answer) {
  Call call(*this, /*watched=*/true);
  auto stream = stub_->PushDelta(&call.context, answer);
  v1::PushDeltaRequest message;
  *message.mutable_header() = header;
  bool open = stream->Write(message);
  for (uint64_t offset = header.resume_offset(); open && offset < payload.size();) {
    const absl::Span<const uint8_t> data = payload.subspan(offset, kChunkBytes);
    v1::Chunk* chunk = message.mutable_chunk();
    chunk->set_offset(offset);
    chunk->set_crc32c(Crc32c(data.data(), data.size()));
    chunk->set_data(data.data(), data.size());
    open = stream->Write(message);
    offset += data.size();
    call.Moved();
  }
  if (open) {
    message.mutable_end()->set_digest(header.digest());
    if (stream->Write(message)) stream->WritesDone();
  }
  const grpc::Status status = stream->Finish();
  if (call.timed_out()) return absl::UnavailableError("the push stood still");
  return FromGrpc(status);
}

absl::StatusOr<PushNews> Link::Push(v1::PayloadKind kind, uint64_t round, uint32_t base_digest, v1::Codec codec,
                                    absl::Span<const uint8_t> payload, const v1::BlockFacts& facts) {
  v1::PushHeader header;
  header.set_kind(kind);
  header.set_round(round);
  header.set_base_version(round > 0 ? round - 1 : 0);
  header.set_base_digest(base_digest);
  header.set_codec(codec);
  header.set_payload_bytes(payload.size());
  header.set_digest(Crc32c(payload.data(), payload.size()));
  *header.mutable_facts() = facts;
  header.set_push_id(absl::StrCat(absl::Hex(absl::Uniform<uint64_t>(random_), absl::kZeroPad16)));
  MonotonicTime silent_since = Clock::Real().Now();
  for (int attempt = 0;; ++attempt) {
    v1::JoinResponse rejoined;
    if (TakeRejoined(&rejoined)) return PushNews(Rejoined{std::move(rejoined)});
    *header.mutable_session() = session();
    header.set_resume_offset(attempt == 0 ? 0 : KeptBytes(round, payload));
    v1::PushDeltaResponse answer;
    absl::Status status = PushOnce(header, payload, &answer);
    if (status.ok()) status = CheckEpoch(answer.epoch());
    if (status.ok()) return PushNews(std::move(answer));
    if (ReasonOf(status) == v1::REASON_NO_MODEL) {
      // The coordinator lost its state: only a new Join says who brings a model.
      status = JoinOnce().status();
      if (status.ok()) {
        absl::MutexLock lock(&mu_);
        Told();
        return PushNews(Rejoined{joined_});
      }
    }
    if (DecideRetry(status, attempt, 0).remedy == Remedy::kStale) {
      Stale stale;
      // Reasons without these facts leave 0: the newest.
      if (!absl::SimpleAtoi(MetadataOf(status, "round"), &stale.round)) stale.round = 0;
      if (!absl::SimpleAtoi(MetadataOf(status, "version"), &stale.version)) stale.version = 0;
      stale.reason = std::string(status.message());
      Log(absl::StrCat("this block does not count: ", stale.reason));
      return PushNews(std::move(stale));
    }
    RETURN_IF_ERROR(Recover(status, attempt, &silent_since));
  }
}

uint64_t Link::KeptBytes(uint64_t round, absl::Span<const uint8_t> payload) {
  v1::QueryPushRequest request;
  *request.mutable_session() = session();
  request.set_round(round);
  v1::QueryPushResponse answer;
  Unary call(*this);
  if (!stub_->QueryPush(&call.context, request, &answer).ok()) return 0;
  const uint64_t kept = answer.committed_offset();
  // Only bytes that are ours may stand in for a part of this push.
  if (kept > payload.size() || Crc32c(payload.data(), kept) != answer.crc32c()) return 0;
  return kept;
}

// -------------------------------------------------------------------------------------------------------------- pulls

absl::Status Link::PullOnce(const v1::PullModelRequest& request, PullProgress* progress) {
  Call call(*this, /*watched=*/true);
  auto stream = stub_->PullModel(&call.context, request);
  v1::PullModelResponse message;
  absl::Status fault;
  while (fault.ok() && stream->Read(&message)) {
    call.Moved();
    if (message.has_header()) {
      const v1::PullHeader& header = message.header();
      fault = CheckEpoch(header.epoch());
      if (!fault.ok()) break;
      absl::StatusOr<uint64_t> bytes = EncodedBytes(header.codec(), layout_->bmuf_elements());
      if (!bytes.ok() || header.payload_bytes() != *bytes + layout_->auxiliary_bytes()) {
        fault = absl::DataLossError(absl::StrCat("version ", header.version(), " has ", header.payload_bytes(),
                                                 " bytes, which this model has not"));
      } else if (header.kind() != v1::MODEL_KIND_BROADCAST ||
                 (request.has_version() && header.version() != request.version()) ||
                 (progress->started && (header.codec() != progress->header.codec() ||
                                        header.payload_digest() != progress->header.payload_digest()))) {
        // What is there does not go together with what would come: from the start.
        fault = absl::UnavailableError(
            absl::StrCat("version ", header.version(), " came where version ", request.version(), " was asked for"));
        *progress = PullProgress();
      } else if (!progress->started) {
        progress->started = true;
        progress->header = header;
        progress->payload = AlignedBuffer<uint8_t>::Uninitialized(header.payload_bytes());
      }
    } else if (message.has_chunk() && progress->started) {
      const v1::Chunk& chunk = message.chunk();
      const std::string& data = chunk.data();
      if (chunk.offset() != progress->received || data.size() > progress->payload.size() - progress->received ||
          Crc32c(data.data(), data.size()) != chunk.crc32c()) {
        fault = absl::UnavailableError(absl::StrCat("a chunk of version ", progress->header.version(),
                                                    " was damaged at byte ", progress->received));
      } else {
        std::copy(data.begin(), data.end(), progress->payload.data() + progress->received);
        progress->received += data.size();
      }
    }
  }
  if (!fault.ok()) call.context.TryCancel();
  const grpc::Status status = stream->Finish();
  if (!fault.ok()) return fault;
  if (call.timed_out()) return absl::UnavailableError("the pull stood still");
  RETURN_IF_ERROR(FromGrpc(status));
  if (!progress->started || progress->received != progress->payload.size()) {
    return absl::UnavailableError("the pull ended early");
  }
  return absl::OkStatus();
}

absl::StatusOr<PulledModel> Link::Pull(std::optional<uint64_t> version) {
  MonotonicTime silent_since = Clock::Real().Now();
  PullProgress progress;
  int damaged = 0;
  for (int attempt = 0;; ++attempt) {
    v1::PullModelRequest request;
    request.set_job(options_.job);
    *request.mutable_session() = session();
    if (progress.started) {
      request.set_version(progress.header.version());
      request.set_codec(progress.header.codec());
      request.set_offset(progress.received);
    } else if (version.has_value()) {
      request.set_version(*version);
    }
    const uint64_t before = progress.received;
    const absl::Status status = PullOnce(request, &progress);
    if (status.ok()) {
      absl::StatusOr<PulledModel> model = Unpack(progress);
      if (model.ok() || ++damaged >= 3) return model;
      Log(std::string(model.status().message()));
      progress = PullProgress();
      continue;
    }
    if (progress.received > before) {
      attempt = 0;
      silent_since = Clock::Real().Now();
    }
    if (ReasonOf(status) == v1::REASON_NOT_KEPT || ReasonOf(status) == v1::REASON_OFFSET_MISMATCH) {
      if (!version.has_value() && !progress.started) return status;
      version.reset();
      progress = PullProgress();
      continue;
    }
    RETURN_IF_ERROR(Recover(status, attempt, &silent_since));
  }
}

absl::StatusOr<PulledModel> Link::Unpack(const PullProgress& progress) const {
  const v1::PullHeader& header = progress.header;
  const AlignedBuffer<uint8_t>& payload = progress.payload;
  if (Crc32c(payload.data(), payload.size()) != header.payload_digest()) {
    return absl::DataLossError(
        absl::StrCat("version ", header.version(), " does not have the digest it was sent with"));
  }
  PulledModel model;
  model.header = header;
  model.bmuf = AlignedBuffer<float>::Uninitialized(layout_->bmuf_elements());
  const uint64_t bmuf_bytes = payload.size() - layout_->auxiliary_bytes();
  RETURN_IF_ERROR(Decode(kernels_, header.codec(), payload.span().subspan(0, bmuf_bytes), model.bmuf.span()));
  const size_t bad = kernels_.first_non_finite(model.bmuf.data(), model.bmuf.size());
  if (bad < model.bmuf.size()) {
    return absl::DataLossError(
        absl::StrCat(layout_->NameOfElement(bad), " of version ", header.version(), " is not finite"));
  }
  model.auxiliary = AlignedBuffer<uint8_t>::Uninitialized(layout_->auxiliary_bytes());
  std::copy(payload.begin() + bmuf_bytes, payload.end(), model.auxiliary.begin());
  for (const Layout::Tensor& tensor : layout_->tensors()) {
    if (tensor.dtype != v1::DTYPE_F32 || tensor.role == v1::TENSOR_ROLE_BMUF || tensor.role == v1::TENSOR_ROLE_LOCAL) {
      continue;
    }
    AlignedBuffer<float> values = AlignedBuffer<float>::Uninitialized(tensor.elements);
    std::memcpy(values.data(), model.auxiliary.data() + tensor.offset, values.size_bytes());
    const size_t wrong = kernels_.first_non_finite(values.data(), values.size());
    if (wrong < values.size()) {
      return absl::DataLossError(absl::StrCat(layout_->NameOfAuxiliaryByte(tensor.offset + wrong * sizeof(float)),
                                              " of version ", header.version(), " is not finite"));
    }
  }
  return model;
}

}  // namespace bmuf::client
