#include "worker/client_exchange.h"

#include <cstring>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/base/status_macros.h"

namespace bmuf::worker {
namespace {

Event EventFrom(const absl::Status& error) {
  if (absl::IsCancelled(error)) return Interrupted{};
  Refused refused;
  refused.reason = std::string(error.message());
  if (ReasonOf(error) != v1::REASON_UNSPECIFIED)
    absl::StrAppend(&refused.reason, " (", ReasonName(ReasonOf(error)), ")");
  refused.unreachable = absl::IsUnavailable(error) || absl::IsDeadlineExceeded(error);
  return refused;
}

Committed CommittedFrom(const v1::RoundCommitted& c) {
  return {c.version(), c.next_round(), c.reset_inner_state(), c.job_finished()};
}

Ended EndedFrom(const v1::RoundEnded& e) { return {e.job_state() == v1::JOB_STATE_FINISHED, e.reason()}; }

}  // namespace

absl::StatusOr<std::unique_ptr<ClientExchange>> ClientExchange::Create(client::LinkOptions options,
                                                                       v1::Manifest manifest, v1::Codec codec) {
  ASSIGN_OR_RETURN(const Kernels* kernels, KernelsByName("auto"));
  ASSIGN_OR_RETURN(std::unique_ptr<client::Link> link, client::Link::Create(std::move(options), std::move(manifest)));
  return std::unique_ptr<ClientExchange>(new ClientExchange(std::move(link), *kernels, codec));
}

template <typename Call>
auto ClientExchange::Waiting(Call call) -> decltype(call()) {
  {
    absl::MutexLock lock(&mu_);
    if (interrupted_) return absl::CancelledError("asked to stop");
    waiting_ = true;
  }
  auto result = call();
  absl::MutexLock lock(&mu_);
  waiting_ = false;
  return result;
}

void ClientExchange::Interrupt() {
  absl::MutexLock lock(&mu_);
  interrupted_ = true;
  // A push under way is finished: the block was trained for it.
  if (waiting_) link_->Cancel();
}

Joined ClientExchange::JoinedFrom(const v1::JoinResponse& answer) {
  // A coordinator that went back to an older version: the residual belongs to rounds that never were.
  if (answer.version() < newest_version_) feedback_.Reset();
  newest_version_ = answer.version();
  if (answer.need_initial_model()) initial_delivered_ = false;
  Joined joined;
  joined.round = answer.round();
  joined.need_initial_model = answer.need_initial_model();
  joined.warmup_steps = answer.config().warmup_steps();
  joined.max_rounds = answer.config().max_rounds();
  joined.reset_inner_state = answer.config().reset_inner_state();
  joined.seed = answer.config().seed();
  return joined;
}

Event ClientExchange::Join() {
  const auto answer = Waiting([&] { return link_->Join(); });
  if (!answer.ok()) return EventFrom(answer.status());
  return JoinedFrom(*answer);
}

Event ClientExchange::UploadInitial(const ModelState& model) {
  payload_round_.reset();
  payload_ = AlignedBuffer<uint8_t>::Uninitialized(model.bmuf.size_bytes() + model.auxiliary.size());
  std::memcpy(payload_.data(), model.bmuf.data(), model.bmuf.size_bytes());
  if (!model.auxiliary.empty()) {
    std::memcpy(payload_.data() + model.bmuf.size_bytes(), model.auxiliary.data(), model.auxiliary.size());
  }
  const auto news =
      link_->Push(v1::PAYLOAD_KIND_INITIAL_MODEL, 0, 0, v1::CODEC_FP32, payload_.span(), v1::BlockFacts());
  if (!news.ok()) {
    // Another worker was faster, or was elected in between: its model is the job's.
    if (ReasonOf(news.status()) == v1::REASON_NOT_INITIALIZER) return InitialUploaded{};
    return EventFrom(news.status());
  }
  if (const auto* rejoined = std::get_if<client::Rejoined>(&*news)) return JoinedFrom(rejoined->answer);
  initial_delivered_ = true;
  return InitialUploaded{};
}

Event ClientExchange::AwaitRound(uint64_t round) {
  while (true) {
    const auto news = Waiting([&] { return link_->AwaitRound(round); });
    if (!news.ok()) return EventFrom(news.status());
    if (const auto* s = std::get_if<v1::RoundStarted>(&*news)) {
      payload_round_.reset();
      return RoundStarted{round, s->base_version(), s->rank(), s->size(), s->block_steps(), s->total_samples()};
    }
    if (const auto* c = std::get_if<v1::RoundCommitted>(&*news)) return CommittedFrom(*c);
    if (const auto* e = std::get_if<v1::RoundEnded>(&*news)) return EndedFrom(*e);
    if (const auto* r = std::get_if<client::Rejoined>(&*news)) return JoinedFrom(r->answer);
    // The link repeats what Join said, also to one that has delivered already.
    if (std::holds_alternative<client::Elected>(*news) && !initial_delivered_) return Elected{};
    // RoundRestarted: this worker has sent nothing yet; it is told when the round starts.
  }
}

Event ClientExchange::Pull(std::optional<uint64_t> version, ModelState* out) {
  auto pulled = link_->Pull(version);
  if (!pulled.ok()) return EventFrom(pulled.status());
  base_digest_ = pulled->header.model_digest();
  newest_version_ = pulled->header.version();
  out->bmuf = std::move(pulled->bmuf);
  out->auxiliary = std::move(pulled->auxiliary);
  return Pulled{pulled->header.version()};
}

// Fills payload_ with the delta in the job's codec and the auxiliary section.
absl::Status ClientExchange::Encode(const ModelState& base, const ModelState& local) {
  const size_t elements = local.bmuf.size();
  if (delta_.size() != elements) delta_ = AlignedBuffer<float>::Uninitialized(elements);
  kernels_.subtract(delta_.data(), local.bmuf.data(), base.bmuf.data(), elements);
  const bool lossy = codec_ != v1::CODEC_FP32;
  if (lossy) feedback_.Apply(kernels_, delta_.span());
  ASSIGN_OR_RETURN(const uint64_t encoded_bytes, EncodedBytes(codec_, elements));
  payload_ = AlignedBuffer<uint8_t>::Uninitialized(encoded_bytes + local.auxiliary.size());
  const absl::Span<uint8_t> encoded = payload_.span().subspan(0, encoded_bytes);
  RETURN_IF_ERROR(bmuf::Encode(kernels_, codec_, delta_.span(), encoded));
  if (lossy) {
    AlignedBuffer<float> sent = AlignedBuffer<float>::Uninitialized(elements);
    RETURN_IF_ERROR(Decode(kernels_, codec_, encoded, sent.span()));
    feedback_.Note(kernels_, delta_.span(), sent.span());
  }
  if (!local.auxiliary.empty()) {
    std::memcpy(payload_.data() + encoded_bytes, local.auxiliary.data(), local.auxiliary.size());
  }
  return absl::OkStatus();
}

Event ClientExchange::Push(uint64_t round, const ModelState& base, const ModelState& local,
                           const v1::BlockFacts& facts) {
  if (payload_round_ != round) {
    if (absl::Status encoded = Encode(base, local); !encoded.ok()) return EventFrom(encoded);
    payload_round_ = round;
  }
  const auto news = link_->Push(v1::PAYLOAD_KIND_DELTA, round, base_digest_, codec_, payload_.span(), facts);
  if (!news.ok()) {
    // The last round closed without this delta: no fault of anybody.
    if (ReasonOf(news.status()) == v1::REASON_JOB_FINISHED) return Ended{true, std::string(news.status().message())};
    return EventFrom(news.status());
  }
  if (const auto* stale = std::get_if<client::Stale>(&*news)) {
    feedback_.Drop();
    return PushStale{stale->round};
  }
  if (const auto* rejoined = std::get_if<client::Rejoined>(&*news)) return JoinedFrom(rejoined->answer);
  return PushAccepted{};
}

Event ClientExchange::AwaitCommit(uint64_t round) {
  while (true) {
    const auto news = Waiting([&] { return link_->AwaitRound(round); });
    if (!news.ok()) return EventFrom(news.status());
    if (const auto* c = std::get_if<v1::RoundCommitted>(&*news)) {
      feedback_.Commit();
      return CommittedFrom(*c);
    }
    // Asked for the delta again.
    if (std::holds_alternative<v1::RoundStarted>(*news)) return Restarted{};
    if (const auto* e = std::get_if<v1::RoundEnded>(&*news)) return EndedFrom(*e);
    if (const auto* r = std::get_if<client::Rejoined>(&*news)) return JoinedFrom(r->answer);
  }
}

Event ClientExchange::Leave(const std::string& reason) {
  link_->Leave(reason).IgnoreError();
  return Left{};
}

}  // namespace bmuf::worker
