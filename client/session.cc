#include <cstring>
#include <optional>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/bmuf.h"
#include "client/link.h"
#include "core/base/aligned_buffer.h"
#include "core/base/clock.h"
#include "core/base/error.h"
#include "core/base/status_macros.h"
#include "core/codec/codec.h"
#include "core/kernels/kernels.h"

namespace bmuf {
namespace {

using client::Link;
using client::PulledModel;
using client::PushNews;
using client::RoundNews;

v1::Manifest ManifestOf(const std::vector<TensorView>& tensors) {
  v1::Manifest manifest;
  for (const TensorView& tensor : tensors) {
    v1::TensorSpec* spec = manifest.add_tensors();
    spec->set_name(tensor.name);
    for (uint64_t dimension : tensor.shape) spec->add_shape(dimension);
    spec->set_dtype(tensor.dtype);
    spec->set_role(tensor.role);
  }
  return manifest;
}

}  // namespace

struct Session::Impl {
  Options options;
  std::vector<TensorView> tensors;
  std::function<absl::Status(uint32_t)> train_alone;
  const Kernels& kernels = **KernelsByName("auto");
  std::unique_ptr<Link> link;
  v1::JobConfig config;

  // The block in progress.
  AlignedBuffer<float> base;  // The broadcast model it started from.
  uint32_t base_digest = 0;
  uint64_t version = 0;
  uint64_t round = 0;
  AlignedBuffer<uint8_t> base_auxiliary;
  v1::RoundStarted started;
  bool reset_inner_state = false;
  bool done = false;
  MonotonicTime began;
  bool is_warm = false;  // The warm-up before an initial model is done.

  // What the accessors say: a copy, because an exchange in flight moves on while the caller trains.
  struct Shown {
    uint64_t version = 0;
    uint64_t round = 0;
    v1::RoundStarted started;
    bool reset_inner_state = false;
    bool done = false;
    v1::JobConfig config;
  };
  Shown shown;
  absl::Status broken;  // The first error: the state behind it is not one to go on from.

  ErrorFeedback feedback;

  // SyncAsync: the exchange in flight, with its own copy of everything.
  std::thread exchange;
  absl::Status exchange_status;
  AlignedBuffer<float> sent_from;  // The parameters the delta in flight was taken from.

  ~Impl() {
    if (exchange.joinable()) {
      link->Cancel();
      exchange.join();
    }
    if (link != nullptr) link->Leave("the session ended").IgnoreError();
  }

  // The flat vector and the auxiliary bytes of the caller's tensors.
  AlignedBuffer<float> ReadBmuf() const {
    AlignedBuffer<float> flat = AlignedBuffer<float>::Uninitialized(link->layout()->bmuf_elements());
    float* to = flat.data();
    ForEachBmuf([&](const TensorView& tensor, uint64_t n) {
      if (tensor.dtype == v1::DTYPE_F32) {
        std::memcpy(to, tensor.data, n * sizeof(float));
      } else {
        const auto* halves = static_cast<const uint16_t*>(tensor.data);
        (tensor.dtype == v1::DTYPE_BF16 ? kernels.bf16_decode : kernels.fp16_decode)(to, halves, n);
      }
      to += n;
    });
    return flat;
  }
  void WriteBmuf(const float* from) const {
    ForEachBmuf([&](const TensorView& tensor, uint64_t n) {
      if (tensor.dtype == v1::DTYPE_F32) {
        std::memcpy(tensor.data, from, n * sizeof(float));
      } else {
        auto* halves = static_cast<uint16_t*>(tensor.data);
        (tensor.dtype == v1::DTYPE_BF16 ? kernels.bf16_encode : kernels.fp16_encode)(halves, from, n);
      }
      from += n;
    });
  }
  template <typename Body>
  void ForEachBmuf(Body body) const {
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (tensors[i].role == v1::TENSOR_ROLE_BMUF) body(tensors[i], link->layout()->tensors()[i].elements);
    }
  }
  template <typename Body>
  void ForEachAuxiliary(Body body) const {
    for (size_t i = 0; i < tensors.size(); ++i) {
      const Layout::Tensor& tensor = link->layout()->tensors()[i];
      if (tensor.role == v1::TENSOR_ROLE_BMUF || tensor.role == v1::TENSOR_ROLE_LOCAL) continue;
      body(tensors[i].data, tensor.offset, tensor.elements * DTypeBytes(tensor.dtype));
    }
  }
  void WriteAuxiliary(const AlignedBuffer<uint8_t>& from) const {
    ForEachAuxiliary(
        [&](void* data, uint64_t offset, uint64_t bytes) { std::memcpy(data, from.data() + offset, bytes); });
  }

  AlignedBuffer<uint8_t> ReadAuxiliary() const {
    AlignedBuffer<uint8_t> to = AlignedBuffer<uint8_t>::Uninitialized(link->layout()->auxiliary_bytes());
    ForEachAuxiliary(
        [&](void* data, uint64_t offset, uint64_t bytes) { std::memcpy(to.data() + offset, data, bytes); });
    return to;
  }

  // A payload with `x` encoded and `auxiliary` behind it.
  absl::StatusOr<AlignedBuffer<uint8_t>> MakePayload(v1::Codec codec, absl::Span<const float> x,
                                                     const AlignedBuffer<uint8_t>& auxiliary) const {
    ASSIGN_OR_RETURN(const uint64_t encoded, EncodedBytes(codec, x.size()));
    AlignedBuffer<uint8_t> payload = AlignedBuffer<uint8_t>::Uninitialized(encoded + auxiliary.size());
    RETURN_IF_ERROR(Encode(kernels, codec, x, payload.span().subspan(0, encoded)));
    if (!auxiliary.empty()) std::memcpy(payload.data() + encoded, auxiliary.data(), auxiliary.size());
    return payload;
  }

  // Ends a call of the caller: shows where things stand, keeps the first error.
  absl::Status Publish(absl::Status status) {
    shown = {version, round, started, reset_inner_state, done, config};
    if (broken.ok()) broken = status;
    return status;
  }

  absl::Status Start() {
    ASSIGN_OR_RETURN(v1::JoinResponse joined, link->Join());
    RETURN_IF_ERROR(Settle(joined, /*write=*/true));
    return BeginBlock();
  }

  // After a (re-)join: bring the initial model if asked, then hold the newest.
  absl::Status Settle(v1::JoinResponse joined, bool write) {
    while (true) {
      config = joined.config();
      // Rounds that never were have left nothing to make up for.
      if (!joined.has_model() || joined.version() < version) feedback.Reset();
      if (joined.has_model()) break;
      std::optional<v1::JoinResponse> again;
      if (joined.need_initial_model()) {
        ASSIGN_OR_RETURN(again, BringInitialModel());
        joined.set_need_initial_model(false);
      }
      if (!again.has_value()) {
        ASSIGN_OR_RETURN(RoundNews news, link->AwaitRound(0));
        if (const auto* ended = std::get_if<v1::RoundEnded>(&news)) return JobEnded(*ended);
        if (std::holds_alternative<client::Elected>(news)) joined.set_need_initial_model(true);
        if (std::holds_alternative<v1::RoundCommitted>(news)) joined.set_has_model(true);
        if (auto* rejoined = std::get_if<client::Rejoined>(&news)) again = std::move(rejoined->answer);
      }
      if (again.has_value()) joined = *std::move(again);
    }
    return Load(std::nullopt, write);
  }

  // The answer of a Join that was needed on the way, if one was.
  absl::StatusOr<std::optional<v1::JoinResponse>> BringInitialModel() {
    AlignedBuffer<uint8_t> payload;
    if (base.empty()) {
      if (config.warmup_steps() > 0 && train_alone != nullptr && !is_warm) {
        Log(absl::StrCat("warm-up: training ", config.warmup_steps(), " steps alone"));
        RETURN_IF_ERROR(train_alone(config.warmup_steps()));
      }
      is_warm = true;
      ASSIGN_OR_RETURN(payload, MakePayload(v1::CODEC_FP32, ReadBmuf().span(), ReadAuxiliary()));
    } else {
      Log("the coordinator has no model: bringing back the last broadcast one");
      ASSIGN_OR_RETURN(payload, MakePayload(v1::CODEC_FP32, base.span(), base_auxiliary));
    }
    absl::StatusOr<PushNews> news =
        link->Push(v1::PAYLOAD_KIND_INITIAL_MODEL, 0, 0, v1::CODEC_FP32, payload.span(), v1::BlockFacts());
    std::optional<v1::JoinResponse> rejoined;
    if (!news.ok()) {
      // Another worker was elected in between: its model is the job's.
      if (ReasonOf(news.status()) == v1::REASON_NOT_INITIALIZER) return rejoined;
      return news.status();
    }
    if (auto* again = std::get_if<client::Rejoined>(&*news)) rejoined = std::move(again->answer);
    return rejoined;
  }

  // Holds a version as the base of the next block; `write`: also in the tensors.
  absl::Status Load(std::optional<uint64_t> wanted, bool write) {
    absl::StatusOr<PulledModel> model = link->Pull(wanted);
    if (!model.ok()) {
      // The coordinator lost its state on the way, and the link has joined it again.
      v1::JoinResponse joined = link->joined();
      if (ReasonOf(model.status()) == v1::REASON_NO_MODEL && !joined.has_model()) return Settle(joined, write);
      return model.status();
    }
    base = std::move(model->bmuf);
    base_auxiliary = std::move(model->auxiliary);
    base_digest = model->header.model_digest();
    version = model->header.version();
    round = version + 1;
    if (write) {
      WriteBmuf(base.data());
      WriteAuxiliary(base_auxiliary);
    }
    return absl::OkStatus();
  }

  absl::Status BeginBlock(bool write = true) {
    while (!done) {
      ASSIGN_OR_RETURN(RoundNews news, link->AwaitRound(round));
      if (const auto* s = std::get_if<v1::RoundStarted>(&news)) {
        if (s->base_version() != version || s->base_digest() != base_digest) {
          RETURN_IF_ERROR(Load(s->base_version(), write));
        }
        if (version != s->base_version()) continue;  // It is gone by now, and so is the round.
        if (base_digest != s->base_digest()) {
          return absl::DataLossError(
              absl::StrCat("version ", version, " is not the one that round ", round, " starts from"));
        }
        started = *s;
        break;
      }
      if (const auto* c = std::get_if<v1::RoundCommitted>(&news)) {  // A round went by without this worker.
        done = c->job_finished();
        reset_inner_state = c->reset_inner_state();
        RETURN_IF_ERROR(Load(std::nullopt, write));
      } else if (const auto* e = std::get_if<v1::RoundEnded>(&news)) {
        RETURN_IF_ERROR(JobEnded(*e));
      } else if (const auto* r = std::get_if<client::Rejoined>(&news)) {
        RETURN_IF_ERROR(Settle(r->answer, write));
      }
    }
    began = Clock::Real().Now();
    return absl::OkStatus();
  }

  absl::Status JobEnded(const v1::RoundEnded& ended) {
    if (ended.job_state() == v1::JOB_STATE_FINISHED) {
      done = true;
      return absl::OkStatus();
    }
    return Error(v1::REASON_JOB_FAILED, ended.reason());
  }

  // The payload of a block that ends now with parameters `local`.
  absl::StatusOr<AlignedBuffer<uint8_t>> DeltaPayload(const AlignedBuffer<float>& local) {
    AlignedBuffer<float> delta = AlignedBuffer<float>::Uninitialized(local.size());
    kernels.subtract(delta.data(), local.data(), base.data(), delta.size());
    const bool lossy = options.codec != v1::CODEC_FP32;
    if (lossy) feedback.Apply(kernels, delta.span());
    ASSIGN_OR_RETURN(AlignedBuffer<uint8_t> payload, MakePayload(options.codec, delta.span(), ReadAuxiliary()));
    if (lossy) {
      AlignedBuffer<float> sent = AlignedBuffer<float>::Uninitialized(delta.size());
      const absl::Span<const uint8_t> all = payload.span();
      RETURN_IF_ERROR(
          Decode(kernels, options.codec, all.subspan(0, all.size() - link->layout()->auxiliary_bytes()), sent.span()));
      feedback.Note(kernels, delta.span(), sent.span());
    }
    return payload;
  }

  v1::BlockFacts FactsOf(const BlockFacts& facts) const {
    v1::BlockFacts message;
    message.set_samples(facts.samples);
    message.set_steps(facts.steps);
    message.set_tokens(facts.tokens);
    for (const auto& [name, value] : facts.metrics) (*message.mutable_metrics())[name] = value;
    const int64_t nanos = absl::ToInt64Nanoseconds(Clock::Real().Now() - began);
    message.mutable_block_time()->set_seconds(nanos / 1'000'000'000);
    message.mutable_block_time()->set_nanos(static_cast<int32_t>(nanos % 1'000'000'000));
    return message;
  }

  // Pushes until the round's commit was seen, or the delta turned out not to count; then holds the newest model.
  absl::Status Exchange(const AlignedBuffer<uint8_t>& payload, const v1::BlockFacts& facts, bool write) {
    bool push = true;
    while (true) {
      std::optional<v1::JoinResponse> rejoined;
      if (push) {
        ASSIGN_OR_RETURN(PushNews pushed,
                         link->Push(v1::PAYLOAD_KIND_DELTA, round, base_digest, options.codec, payload.span(), facts));
        if (const auto* stale = std::get_if<client::Stale>(&pushed)) {
          // The very round and version, not begun yet (a new attempt gathers): the delta is early, not late.
          if (stale->round != round || stale->version != version) {
            feedback.Drop();
            return Load(std::nullopt, write);
          }
        }
        if (auto* again = std::get_if<client::Rejoined>(&pushed)) rejoined = std::move(again->answer);
      }
      if (!rejoined.has_value()) {
        ASSIGN_OR_RETURN(RoundNews news, link->AwaitRound(round));
        if (const auto* committed = std::get_if<v1::RoundCommitted>(&news)) {
          done = committed->job_finished();
          reset_inner_state = committed->reset_inner_state();
          feedback.Commit();
          return Load(std::nullopt, write);
        }
        if (const auto* ended = std::get_if<v1::RoundEnded>(&news)) return JobEnded(*ended);
        if (auto* again = std::get_if<client::Rejoined>(&news)) rejoined = std::move(again->answer);
        // After `restarted` the round gathers: the delta is good for it, and is asked for by `started`.
        push = std::holds_alternative<v1::RoundStarted>(news);
      }
      if (!rejoined.has_value()) continue;
      // A coordinator that stands where it stood asks for the same delta once more.
      push = false;
      if (!rejoined->has_model() || rejoined->round() != round || rejoined->model_digest() != base_digest) {
        feedback.Drop();
        return Settle(*std::move(rejoined), write);
      }
      config = rejoined->config();
    }
  }

  // One whole step: the exchange, then the wait for the next block. A job that finished meanwhile is no error.
  absl::Status Step(const AlignedBuffer<uint8_t>& payload, const v1::BlockFacts& facts, bool write) {
    absl::Status status = Exchange(payload, facts, write);
    if (status.ok()) status = BeginBlock(write);
    if (ReasonOf(status) != v1::REASON_JOB_FINISHED) return status;
    done = true;
    return Load(std::nullopt, write);
  }

  void Log(const std::string& text) const {
    if (options.log) options.log(text);
  }
};

Session::Session(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Session::~Session() = default;

absl::StatusOr<std::unique_ptr<Session>> Session::Join(Options options, std::vector<TensorView> tensors,
                                                       std::function<absl::Status(uint32_t)> train_alone) {
  auto impl = std::make_unique<Impl>();
  client::LinkOptions link;
  link.target = options.target;
  link.job = options.job;
  link.worker = options.worker;
  link.trajectories = options.trajectories;
  link.client_info = "bmuf C++";
  link.patience = options.patience;
  link.log = options.log;
  RETURN_IF_ERROR(EncodedBytes(options.codec, 0).status());
  ASSIGN_OR_RETURN(impl->link, Link::Create(std::move(link), ManifestOf(tensors)));
  impl->options = std::move(options);
  impl->tensors = std::move(tensors);
  impl->train_alone = std::move(train_alone);
  RETURN_IF_ERROR(impl->Publish(impl->Start()));
  return std::unique_ptr<Session>(new Session(std::move(impl)));
}

absl::Status Session::Sync(const BlockFacts& facts) {
  RETURN_IF_ERROR(Wait());
  if (impl_->done) return absl::OkStatus();
  ASSIGN_OR_RETURN(AlignedBuffer<uint8_t> payload, impl_->DeltaPayload(impl_->ReadBmuf()));
  return impl_->Publish(impl_->Step(payload, impl_->FactsOf(facts), /*write=*/true));
}

absl::Status Session::SyncAsync(const BlockFacts& facts) {
  RETURN_IF_ERROR(Wait());
  if (impl_->done) return absl::OkStatus();
  impl_->sent_from = impl_->ReadBmuf();
  ASSIGN_OR_RETURN(AlignedBuffer<uint8_t> payload, impl_->DeltaPayload(impl_->sent_from));
  impl_->exchange = std::thread([impl = impl_.get(), payload = std::move(payload), message = impl_->FactsOf(facts)] {
    impl->exchange_status = impl->Step(payload, message, /*write=*/false);
  });
  return absl::OkStatus();
}

absl::Status Session::Wait() {
  if (!impl_->exchange.joinable()) return impl_->broken;
  impl_->exchange.join();
  RETURN_IF_ERROR(impl_->Publish(impl_->exchange_status));
  // now + (base - sent_from): the new broadcast model plus what was trained since the delta was taken.
  AlignedBuffer<float> now = impl_->ReadBmuf();
  impl_->kernels.subtract(now.data(), now.data(), impl_->sent_from.data(), now.size());
  impl_->kernels.add(now.data(), now.data(), impl_->base.data(), now.size());
  impl_->WriteBmuf(now.data());
  impl_->WriteAuxiliary(impl_->base_auxiliary);
  return absl::OkStatus();
}

void Session::Cancel() { impl_->link->Cancel(); }
bool Session::done() const { return impl_->shown.done; }
uint64_t Session::round() const { return impl_->shown.round; }
uint64_t Session::version() const { return impl_->shown.version; }
uint32_t Session::rank() const { return impl_->shown.started.rank(); }
uint32_t Session::size() const { return impl_->shown.started.size(); }
uint32_t Session::block_steps() const { return impl_->shown.started.block_steps(); }
uint64_t Session::total_samples() const { return impl_->shown.started.total_samples(); }
bool Session::reset_inner_state() const { return impl_->shown.reset_inner_state; }
const v1::JobConfig& Session::config() const { return impl_->shown.config; }

}  // namespace bmuf
