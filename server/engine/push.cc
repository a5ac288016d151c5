// What a push is answered: admission by its header, its verified content, its place in the sum.
#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "core/base/status_macros.h"
#include "server/engine/stepper.h"

namespace bmuf::engine {
namespace {

// How long a worker waits before it asks for a slot again, or whether the job is still paused.
constexpr absl::Duration kSlotRetry = absl::Seconds(1);
constexpr absl::Duration kPausedRetry = absl::Seconds(5);

absl::Status WrongField(const std::string& field, const std::string& rule) {
  return Error(v1::REASON_INVALID_REQUEST, absl::StrCat(field, " ", rule)).Field(field, rule);
}

// What a delta counts in the mean (algorithm.md): trajectories, or samples or tokens^2/steps over the nominal block.
absl::StatusOr<double> WeightOf(const v1::JobConfig& config, uint32_t trajectories, const v1::BlockFacts& facts) {
  switch (config.weighting()) {
    case v1::WEIGHTING_SAMPLES:
      return static_cast<double>(facts.samples()) / config.nominal_block();
    case v1::WEIGHTING_TOKENS_SQUARED_PER_STEP: {
      if (facts.tokens() == 0) return 0.0;
      if (facts.steps() == 0) return WrongField("facts.steps", "must be above 0 where tokens are given");
      const double tokens = static_cast<double>(facts.tokens());
      return tokens * tokens / static_cast<double>(facts.steps()) / config.nominal_block();
    }
    default:
      return static_cast<double>(trajectories);
  }
}

double Median(const std::deque<double>& values) {
  std::vector<double> sorted(values.begin(), values.end());
  const size_t middle = sorted.size() / 2;
  std::nth_element(sorted.begin(), sorted.begin() + middle, sorted.end());
  return sorted[middle];
}

}  // namespace

Stepper::Entry* Stepper::FindPush(RequestId request) {
  for (Entry& entry : s_.workers) {
    if (entry.second.push.has_value() && entry.second.push->request == request) return &entry;
  }
  return nullptr;
}

Stepper::Entry* Stepper::FindDelta(RequestId request) {
  for (Entry& entry : s_.workers) {
    if (entry.second.delta.has_value() && entry.second.delta->request == request) return &entry;
  }
  return nullptr;
}

v1::PushDeltaResponse Stepper::PushAnswer(v1::PushOutcome outcome, RoundId round, double weight) const {
  v1::PushDeltaResponse answer;
  answer.set_outcome(outcome);
  answer.set_round(round.value());
  answer.set_epoch(s_.epoch.value());
  answer.set_weight(weight);
  return answer;
}

OpenPush Stepper::TakePush(Worker& worker) {
  OpenPush push = *std::move(worker.push);
  worker.push.reset();
  // Whoever waited for us was not silent.
  if (push.whole() && worker.active()) worker.last_seen = now_;
  return push;
}

void Stepper::CancelUpload(Worker& worker, const absl::Status& why) {
  if (!worker.push.has_value()) return;
  Emit(CancelPush{TakePush(worker).request, why});
  Count(Counter::kPushCancelled);
  Changed();
}

absl::Status Stepper::StaleRound(const Entry& entry, const std::string& what) const {
  RoundId round = s_.round;
  ModelVersion version = s_.version;
  std::string then;
  if (s_.phase == Phase::kCommitting) {
    // The open round takes nothing more; its version comes with the commit.
    version = CommittedVersionOf(round);
    round = round.Next();
    then = "watch it for its start";
  } else if (s_.phase == Phase::kCollecting && entry.second.seat != Seat::kAwaited &&
             entry.second.seat != Seat::kExcused) {
    round = round.Next();
    then = absl::StrCat("you count from round ", round.value());
  } else if (s_.phase == Phase::kGathering) {
    then = absl::StrCat("pull version ", version.value(), " and watch round ", round.value(), " for its start");
  } else {
    then = absl::StrCat("pull version ", version.value(), ", train from it, push to round ", round.value());
  }
  return Error(v1::REASON_STALE_ROUND, absl::StrCat(what, "; ", then))
      .With("round", round.value())
      .With("version", version.value());
}

absl::Status Stepper::AdmitInitialModel(const PushOpenedEvent& e, const Entry& entry) const {
  const auto& [name, worker] = entry;
  if (s_.has_model) return StaleRound(entry, "the job has its initial model");
  if (e.round != RoundId(0)) return WrongField("header.round", "must be 0 for an initial model");
  if (s_.storing.has_value() && s_.storing->worker == name && s_.storing->incarnation == worker.incarnation) {
    return Error(v1::REASON_UPLOAD_BUDGET, "the model you sent before is being stored").RetryAfter(kSlotRetry);
  }
  if (!s_.IsInitializer(name, worker)) {
    return Error(v1::REASON_NOT_INITIALIZER,
                 absl::StrCat("worker ", s_.storing.has_value() ? s_.storing->worker : s_.initializer,
                              " sends the initial model; watch round 0, then pull"));
  }
  if (e.codec != v1::CODEC_FP32) return Error(v1::REASON_BAD_CODEC, "an initial model is sent as FP32");
  return absl::OkStatus();
}

absl::Status Stepper::AdmitDelta(const PushOpenedEvent& e, const Entry& entry) const {
  const Worker& worker = entry.second;
  if (!s_.has_model) return Error(v1::REASON_NO_MODEL, "there is no model yet; watch round 0");
  if (e.round < s_.round) return StaleRound(entry, absl::StrCat("round ", e.round.value(), " is over"));
  if (e.round > s_.round || e.base_version > s_.version) {
    return Error(v1::REASON_VERSION_AHEAD, absl::StrCat("round ", e.round.value(), " from version ",
                                                        e.base_version.value(), " is ahead of the job: pull version ",
                                                        s_.version.value(), " and go on with round ", s_.round.value()))
        .With("round", s_.round.value())
        .With("version", s_.version.value());
  }
  if (e.base_version < s_.version) {
    return StaleRound(entry, absl::StrCat("a delta for round ", e.round.value(), " starts from version ",
                                          s_.version.value(), ", not ", e.base_version.value()));
  }
  if (e.base_digest != s_.model_digest) {
    return Error(v1::REASON_BASE_MISMATCH, absl::StrCat("the block did not start from version ", s_.version.value(),
                                                        " as published; pull it again"))
        .With("version", s_.version.value());
  }
  const auto& codecs = s_.config.push_codecs();
  if (std::count(codecs.begin(), codecs.end(), static_cast<int>(e.codec)) == 0) {
    return Error(v1::REASON_BAD_CODEC,
                 absl::StrCat("codec ", static_cast<int>(e.codec), " is not allowed in this job"));
  }
  const bool own_delta = worker.delta.has_value() && worker.delta->record.incarnation() == worker.incarnation.value();
  if (own_delta) return absl::OkStatus();
  if (s_.phase == Phase::kCommitting) return StaleRound(entry, absl::StrCat("round ", e.round.value(), " is closed"));
  if (s_.phase != Phase::kCollecting) {
    return StaleRound(entry, absl::StrCat("round ", e.round.value(), " has not started"));
  }
  if (worker.seat != Seat::kAwaited && worker.seat != Seat::kExcused) {
    return StaleRound(entry, absl::StrCat("round ", e.round.value(), " does not expect worker ", entry.first));
  }
  return absl::OkStatus();
}

bool Stepper::AnswerFromRecord(RequestId request, Worker& worker, std::optional<uint32_t> digest) {
  if (!worker.delta.has_value() || !digest.has_value()) return false;
  Delta& delta = *worker.delta;
  if (delta.record.incarnation() != worker.incarnation.value()) return false;
  if (*digest != delta.record.digest()) {
    Count(Counter::kPushRefused);
    Emit(ReplyPush{
        request, Error(v1::REASON_DIGEST_MISMATCH, absl::StrCat("other bytes were pushed for round ", s_.round.value(),
                                                                " before; the first ones stand"))});
  } else if (worker.seat == Seat::kFolding) {
    // The first stream's answer is this one's too. One retry waits; an older one has been given up by its client.
    if (delta.twin.has_value()) {
      Emit(CancelPush{*delta.twin, Error(v1::REASON_TRANSFER_CANCELLED, "a newer push of this worker took over")});
      Count(Counter::kPushCancelled);
    }
    delta.twin = request;
  } else {
    Count(Counter::kPushDuplicate);
    Emit(ReplyPush{request, PushAnswer(v1::PUSH_OUTCOME_DUPLICATE, s_.round, delta.record.weight())});
  }
  return true;
}

void Stepper::On(const PushOpenedEvent& e) {
  const auto refuse = [&](const absl::Status& why) {
    Count(ReasonOf(why) == v1::REASON_STALE_ROUND ? Counter::kPushStale : Counter::kPushRefused);
    Emit(ReplyPush{e.request, why});
  };
  absl::StatusOr<Entry*> accepted = Accept(e.who, e.token);
  if (!accepted.ok()) return refuse(accepted.status());
  Entry& entry = **accepted;
  auto& [name, worker] = entry;
  if (s_.phase == Phase::kEnded) {
    return refuse(
        Error(s_.ended_as == v1::JOB_STATE_FINISHED ? v1::REASON_JOB_FINISHED : v1::REASON_JOB_FAILED, s_.end_reason));
  }
  if (s_.paused) {
    return refuse(Error(v1::REASON_JOB_PAUSED,
                        absl::StrCat("the job is paused", s_.pause_reason.empty() ? "" : ": ", s_.pause_reason))
                      .RetryAfter(kPausedRetry));
  }
  double weight = 1;
  if (e.kind == v1::PAYLOAD_KIND_INITIAL_MODEL) {
    if (s_.stored.has_value() && s_.stored->worker == name && s_.stored->incarnation == worker.incarnation &&
        e.digest == s_.stored->digest) {
      Count(Counter::kPushDuplicate);
      Emit(ReplyPush{e.request, PushAnswer(v1::PUSH_OUTCOME_DUPLICATE, RoundId(0), weight)});
      return;
    }
    if (absl::Status ok = AdmitInitialModel(e, entry); !ok.ok()) return refuse(ok);
  } else if (e.kind == v1::PAYLOAD_KIND_DELTA) {
    if (absl::Status ok = AdmitDelta(e, entry); !ok.ok()) return refuse(ok);
    if (AnswerFromRecord(e.request, worker, e.digest)) return;
    absl::StatusOr<double> own = WeightOf(s_.config, worker.trajectories, e.facts);
    if (!own.ok()) return refuse(own.status());
    weight = *own;
  } else {
    return refuse(WrongField("header.kind", "must be DELTA or INITIAL_MODEL"));
  }
  // The newer stream of a worker replaces its older one and inherits the slot.
  const size_t others = s_.InflightPushes() - (worker.push.has_value() ? 1 : 0);
  if (others >= s_.config.max_inflight_pushes()) {
    return refuse(Error(v1::REASON_UPLOAD_BUDGET,
                        absl::StrCat("all ", s_.config.max_inflight_pushes(), " staging slots are taken"))
                      .RetryAfter(kSlotRetry));
  }
  CancelUpload(worker, Error(v1::REASON_TRANSFER_CANCELLED, "a newer push of this worker took over"));
  if (worker.seat == Seat::kExcused) worker.seat = Seat::kAwaited;
  worker.push = OpenPush{e.request, e.kind, e.codec, e.facts, weight, 0, e.total_bytes};
  Emit(AdmitPush{e.request, weight});
  Changed();
}

void Stepper::On(const PushProgressEvent& e) {
  Entry* entry = FindPush(e.request);
  if (entry == nullptr) return;
  Worker& worker = entry->second;
  worker.push->received_bytes = std::max(worker.push->received_bytes, e.received_bytes);
  if (worker.active()) worker.last_seen = now_;
  Changed();
}

absl::StatusOr<double> Stepper::GuardNorm(const PushVerifiedEvent& e) const {
  if (!std::isfinite(e.norm) || !std::isfinite(e.max_abs)) {
    return Error(v1::REASON_NON_FINITE_DELTA, "the delta's norm is not finite");
  }
  const v1::NormGuard& guard = s_.config.norm_guard();
  if (guard.action() == v1::NORM_GUARD_ACTION_OFF) return 1.0;
  double scale = 1;
  double limit = 0, value = 0;
  const char* what = nullptr;
  const auto check = [&](const char* name, double magnitude, double most) {
    if (most <= 0 || magnitude <= most || scale <= most / magnitude) return;
    scale = most / magnitude;
    what = name;
    value = magnitude;
    limit = most;
  };
  if (s_.norms.size() >= kLeastNorms) check("norm", e.norm, guard.factor() * Median(s_.norms));
  check("largest element", e.max_abs, guard.max_abs());
  if (what == nullptr || guard.action() == v1::NORM_GUARD_ACTION_CLIP) return scale;
  return Error(v1::REASON_OUT_OF_RANGE_DELTA, absl::StrCat("the delta's ", what, " is ", value, ", the job allows ",
                                                           limit, "; the round goes on without it"))
      .With("norm", value)
      .With("limit", limit);
}

void Stepper::RejectDelta(Entry& entry, RequestId request, const absl::Status& why) {
  auto& [name, worker] = entry;
  ++worker.rejected;
  Count(Counter::kPushRejected);
  if (ReasonOf(why) == v1::REASON_NON_FINITE_DELTA) Count(Counter::kNonFinite);
  if (ReasonOf(why) == v1::REASON_OUT_OF_RANGE_DELTA) Count(Counter::kOutOfRange);
  // The round does not wait for a worker whose block is spoilt; a good delta in time is still taken.
  if (worker.seat == Seat::kAwaited) worker.seat = worker.state == WorkerState::kLeft ? Seat::kNone : Seat::kExcused;
  Warn(absl::StrCat("push of worker ", name, " for round ", s_.round.value(), " refused: ", std::string(why.message())),
       name);
  Emit(ReplyPush{request, why});
  Changed();
}

void Stepper::On(const PushVerifiedEvent& e) {
  Entry* entry = FindPush(e.request);
  if (entry == nullptr) return;
  auto& [name, worker] = *entry;
  const OpenPush push = TakePush(worker);
  if (worker.active()) worker.last_seen = now_;
  Changed();
  if (push.kind == v1::PAYLOAD_KIND_INITIAL_MODEL) {
    if (s_.storing.has_value()) {
      // The initialiser before it left when its bytes were all here, and was verified first.
      Count(Counter::kPushRefused);
      Emit(ReplyPush{e.request,
                     Error(v1::REASON_NOT_INITIALIZER, absl::StrCat("the model of worker ", s_.storing->worker,
                                                                    " is being stored; watch round 0, then pull"))});
      return;
    }
    s_.storing = InitialModel{e.request, name, worker.incarnation, e.digest};
    Emit(StoreInitialModel{e.request});
    return;
  }
  if (AnswerFromRecord(e.request, worker, e.digest)) return;
  absl::StatusOr<double> scale = GuardNorm(e);
  if (!scale.ok()) return RejectDelta(*entry, e.request, scale.status());

  Delta delta;
  delta.request = e.request;
  delta.trajectories = worker.trajectories;
  delta.took = now_ - worker.seated_at;
  v1::Contribution& record = delta.record;
  record.set_worker(name);
  record.set_incarnation(worker.incarnation.value());
  record.set_rank(worker.place);
  record.set_weight(push.weight);
  record.set_digest(e.digest);
  record.set_norm(e.norm);
  *record.mutable_facts() = push.facts;
  record.set_codec(push.codec);
  record.set_clipped(*scale < 1);
  worker.delta = std::move(delta);
  worker.seat = Seat::kFolding;
  if (*scale < 1) {
    Count(Counter::kClipped);
    Warn(absl::StrCat("delta of worker ", name, " for round ", s_.round.value(), " scaled by ", *scale,
                      " to the norm guard's limit"),
         name);
  }
  Emit(Fold{e.request, s_.round, s_.attempt, worker.place, push.weight, *scale});
}

void Stepper::On(const PushFailedEvent& e) {
  Entry* entry = FindPush(e.request);
  if (entry == nullptr) return;
  auto& [name, worker] = *entry;
  TakePush(worker);
  Changed();
  if (e.content_fault) return RejectDelta(*entry, e.request, e.status);
  Count(Counter::kPushBroken);
  const bool awaited = worker.seat == Seat::kAwaited;
  if (awaited && worker.state == WorkerState::kLeft) worker.seat = Seat::kNone;
  ReplyPush reply{e.request, e.status};
  reply.keep_staging = awaited && worker.active();
  Emit(std::move(reply));
}

void Stepper::On(const FoldedEvent& e) {
  Entry* entry = FindDelta(e.request);
  if (entry == nullptr || entry->second.seat != Seat::kFolding) return;
  auto& [name, worker] = *entry;
  Delta& delta = *worker.delta;
  worker.seat = Seat::kFolded;
  worker.last_block = delta.record.facts();
  worker.steps_done = 0;
  s_.last_fold = now_;
  Count(Counter::kPushAccepted);
  Emit(ReplyPush{e.request, PushAnswer(v1::PUSH_OUTCOME_ACCEPTED, s_.round, delta.record.weight())});
  if (delta.twin.has_value()) {
    Count(Counter::kPushDuplicate);
    Emit(ReplyPush{*delta.twin, PushAnswer(v1::PUSH_OUTCOME_DUPLICATE, s_.round, delta.record.weight())});
    delta.twin.reset();
  }
  Changed();
}

void Stepper::On(const FoldRefusedEvent& e) {
  Entry* entry = FindDelta(e.request);
  if (entry == nullptr || entry->second.seat != Seat::kFolding) return;
  auto& [name, worker] = *entry;
  const Delta delta = *std::move(worker.delta);
  worker.delta.reset();
  const bool same_life = delta.record.incarnation() == worker.incarnation.value();
  worker.seat = !same_life || worker.state == WorkerState::kLeft || worker.state == WorkerState::kEvicted
                    ? Seat::kNone
                    : Seat::kExcused;
  if (delta.twin.has_value()) Emit(ReplyPush{*delta.twin, e.status});
  RejectDelta(*entry, e.request, e.status);
}

}  // namespace bmuf::engine
