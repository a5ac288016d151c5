#include "server/coordinator/job.h"

#include <algorithm>
#include <new>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/base/limits.h"
#include "core/base/names.h"
#include "core/base/status_macros.h"
#include "server/coordinator/protocol.h"

namespace bmuf::coordinator {
namespace {

// Displayed progress, `waiting` events and WatchJob: often enough for people, seldom enough for a thousand watchers.
constexpr absl::Duration kProgressPeriod = absl::Milliseconds(100);
constexpr absl::Duration kNewsPeriod = absl::Milliseconds(100);
// A transfer below 64 KiB/s over this long is ended.
constexpr absl::Duration kProgressWindow = absl::Seconds(10);
constexpr uint64_t kLeastBytesPerWindow = uint64_t{10} * 64 * 1024;

engine::WorkerKey KeyOf(const v1::Session& session) {
  return engine::WorkerKey{session.worker(), Incarnation(session.incarnation())};
}

bool SameLife(const v1::Session& a, const v1::Session& b) {
  return a.worker() == b.worker() && a.incarnation() == b.incarnation();
}

void SetTimestamp(absl::Time time, google::protobuf::Timestamp* out) {
  const int64_t seconds = absl::ToUnixSeconds(time);
  out->set_seconds(seconds);
  out->set_nanos(static_cast<int32_t>(absl::ToInt64Nanoseconds(time - absl::FromUnixSeconds(seconds))));
}

}  // namespace

Job::Job(JobContext& context, std::string name, v1::JobConfig config)
    : context_(context),
      name_(std::move(name)),
      created_config_(config),
      engine_(name_, context.epoch, std::move(config), context.clock.Now()),
      strand_(std::make_shared<Strand>(context.executor)) {}

Job::~Job() = default;

// ------------------------------------------------------------------------------------------------------ the engine

void Job::Dispatch(engine::Event event) {
  events_.push_back(std::move(event));
  if (dispatching_) return;
  dispatching_ = true;
  while (!events_.empty()) {
    const engine::Event next = std::move(events_.front());
    events_.pop_front();
    engine::Effects effects = engine_.Step(context_.clock.Now(), next);
    for (engine::Effect& effect : effects) {
      std::visit([this](auto& e) { Perform(e); }, effect);
    }
    if (std::holds_alternative<engine::CommittedEvent>(next) ||
        std::holds_alternative<engine::InitialModelStoredEvent>(next)) {
      urgent_ = true;
    }
  }
  dispatching_ = false;
  Conclude();
}

void Job::Conclude() {
  engine_deadline_.reset();
  const auto over = [this](const Kept& kept) { return kept.round != engine_.round(); };
  kept_.erase(std::remove_if(kept_.begin(), kept_.end(), over), kept_.end());
  if (urgent_) Flush(context_.clock.Now());
}

void Job::Announce(Announcement::Level level, const std::string& worker, const std::string& text) {
  Announcement line;
  line.level = level;
  line.job = name_;
  line.round = engine_.round().value();
  line.worker = worker;
  line.text = text;
  context_.observer.OnAnnouncement(line);
}

void Job::Perform(engine::ReplyJoin& e) {
  const auto it = joins_.find(e.request);
  if (it == joins_.end()) return;
  Reply<v1::JoinResponse> reply = std::move(it->second);
  joins_.erase(it);
  if (e.answer.ok()) {
    had_member_ = true;
    e.answer->set_protocol(kProtocolVersion);
    e.answer->set_max_chunk_bytes(limits::kMaxChunkBytes);
  }
  reply(std::move(e.answer));
}

void Job::Perform(engine::ReplyHeartbeat& e) {
  const auto it = heartbeats_.find(e.request);
  if (it == heartbeats_.end()) return;
  Reply<v1::HeartbeatResponse> reply = std::move(it->second);
  heartbeats_.erase(it);
  reply(std::move(e.answer));
}

void Job::Perform(engine::ReplyStatus& e) {
  const auto it = statuses_.find(e.request);
  if (it == statuses_.end()) return;
  StatusReply reply = std::move(it->second);
  statuses_.erase(it);
  reply(std::move(e.status));
}

void Job::Perform(engine::NotifyWatchers&) { changed_ = true; }

void Job::Perform(engine::Announce& e) {
  Announce(e.level == engine::Announce::Level::kWarning ? Announcement::Level::kWarning : Announcement::Level::kInfo,
           e.worker, e.text);
}

void Job::Perform(engine::JobEnded& e) {
  urgent_ = changed_ = true;
  Announce(e.state == v1::JOB_STATE_FINISHED ? Announcement::Level::kInfo : Announcement::Level::kError, "",
           absl::StrCat("the job is ", e.state == v1::JOB_STATE_FINISHED ? "finished: " : "failed: ", e.reason));
}

// ----------------------------------------------------------------------------------------------- joins and manifest

void Job::Join(v1::JoinRequest request, Reply<v1::JoinResponse> reply) {
  pending_joins_.push_back({std::move(request), std::move(reply)});
  HandleJoins();
}

void Job::HandleJoins() {
  while (!pending_joins_.empty() && !making_model_) {
    const v1::Manifest& manifest = pending_joins_.front().request.manifest();
    if (model_ == nullptr && !context_.draining && !ended()) {
      MakeModel(manifest);
      continue;
    }
    absl::Status same = model_ == nullptr ? absl::OkStatus() : model_->layout()->CheckSame(manifest);
    if (!same.ok() && !engine_.has_model() && engine_.Idle() && !HasActiveWorkers()) {
      // Whoever brought the other manifest is gone and has left nothing: the job may still become this model's.
      model_ = nullptr;
      had_member_ = false;
      kept_.clear();
      continue;
    }
    PendingJoin join = std::move(pending_joins_.front());
    pending_joins_.pop_front();
    if (same.ok()) {
      StepJoin(std::move(join));
    } else {
      join.reply(same);
    }
  }
}

void Job::MakeModel(const v1::Manifest& manifest) {
  making_model_ = true;
  context_.executor([this, manifest, config = engine_.config()]() mutable {
    auto made = [&]() -> absl::StatusOr<std::shared_ptr<JobModel>> {
      ASSIGN_OR_RETURN(std::shared_ptr<const Layout> layout, Layout::Create(std::move(manifest)));
      try {
        ASSIGN_OR_RETURN(std::unique_ptr<JobModel> model,
                         JobModel::Create(std::move(layout), config, context_.budget, context_.kernels, context_.pool));
        return std::shared_ptr<JobModel>(std::move(model));
      } catch (const std::bad_alloc&) {
        return Error(v1::REASON_MODEL_TOO_LARGE, "the machine has no memory for this model")
            .With("limit_bytes", context_.budget.limit_bytes());
      }
    }();
    context_.loop.Post([this, made = std::move(made)]() mutable {
      making_model_ = false;
      if (made.ok()) {
        model_ = *std::move(made);
        slots_bytes_ = model_->plan().staging_bytes;
        more_slots_ = MemoryBudget::Reservation();
      } else if (!pending_joins_.empty()) {
        PendingJoin join = std::move(pending_joins_.front());
        pending_joins_.pop_front();
        join.reply(made.status());
      }
      HandleJoins();
      // Nobody was let in with it: the next worker's manifest is as good.
      if (!had_member_ && !making_model_ && pending_joins_.empty()) model_ = nullptr;
    });
  });
}

void Job::StepJoin(PendingJoin join) {
  const engine::RequestId id = NextRequest();
  joins_[id] = std::move(join.reply);
  engine::JoinEvent event;
  event.request = id;
  event.worker = join.request.worker();
  event.instance = join.request.instance();
  event.token = context_.random_token();
  event.client_info = EscapeForLog(join.request.client_info());
  event.trajectories = std::max(join.request.trajectories(), uint32_t{1});
  Dispatch(std::move(event));
}

// ------------------------------------------------------------------------------------------------- small requests

void Job::Heartbeat(const v1::HeartbeatRequest& request, Reply<v1::HeartbeatResponse> reply) {
  const engine::RequestId id = NextRequest();
  heartbeats_[id] = std::move(reply);
  Dispatch(engine::HeartbeatEvent{id, KeyOf(request.session()), request.session().token(), request.steps_done()});
}

void Job::Leave(const v1::LeaveRequest& request, Reply<v1::LeaveResponse> reply) {
  const engine::RequestId id = NextRequest();
  statuses_[id] = [this, reply = std::move(reply)](const absl::Status& status) {
    if (!status.ok()) return reply(status);
    v1::LeaveResponse answer;
    answer.set_epoch(context_.epoch.value());
    reply(std::move(answer));
  };
  Dispatch(engine::LeaveEvent{id, KeyOf(request.session()), request.session().token(), EscapeForLog(request.reason())});
}

void Job::Pause(const std::string& reason, StatusReply reply) {
  const engine::RequestId id = NextRequest();
  statuses_[id] = std::move(reply);
  Dispatch(engine::PauseEvent{id, EscapeForLog(reason)});
}

void Job::Resume(StatusReply reply) {
  const engine::RequestId id = NextRequest();
  statuses_[id] = std::move(reply);
  Dispatch(engine::ResumeEvent{id});
}

void Job::Evict(const std::string& worker, StatusReply reply) {
  const engine::RequestId id = NextRequest();
  statuses_[id] = std::move(reply);
  Dispatch(engine::EvictEvent{id, worker});
}

void Job::Readmit(const std::string& worker, StatusReply reply) {
  const engine::RequestId id = NextRequest();
  statuses_[id] = std::move(reply);
  Dispatch(engine::ReadmitEvent{id, worker});
}

void Job::Update(const v1::JobConfig& changes, Reply<v1::UpdateJobResponse> reply) {
  updates_.push_back([this, changes, reply = std::move(reply)]() {
    const auto finish = [this, reply](const absl::Status& status) {
      if (status.ok()) {
        v1::UpdateJobResponse answer;
        *answer.mutable_job() = Describe();
        reply(std::move(answer));
      } else {
        reply(status);
      }
      updates_.pop_front();
      NextUpdate();
    };
    // What the model's buffers were made for is fixed from the first worker on.
    absl::StatusOr<v1::JobConfig> config =
        engine::ApplyChanges(engine_.config(), changes, engine_.has_model() || model_ != nullptr || making_model_);
    if (!config.ok()) return finish(config.status());
    if (model_ != nullptr) {
      const uint64_t slots_bytes = PlanMemory(*model_->layout(), *config).staging_bytes;
      if (slots_bytes > slots_bytes_) {
        absl::StatusOr<MemoryBudget::Reservation> more =
            context_.budget.Reserve(slots_bytes - model_->plan().staging_bytes, "the staging slots of these rules");
        if (!more.ok()) return finish(more.status());
        more_slots_ = *std::move(more);
        slots_bytes_ = slots_bytes;
      }
    }
    storage::JobRow row{name_, *config, std::nullopt};
    if (engine_.has_model()) row.manifest = model_->layout()->manifest();
    strand_->Schedule([this, row = std::move(row), finish] {
      absl::Status kept = context_.ledger.PutJob(context_.epoch, row);
      context_.loop.Post([this, kept, config = row.config, finish] {
        if (!kept.ok()) return finish(kept);
        const engine::RequestId id = NextRequest();
        statuses_[id] = finish;
        Dispatch(engine::UpdateConfigEvent{id, config});
      });
    });
  });
  if (updates_.size() == 1) NextUpdate();
}

void Job::NextUpdate() {
  if (updates_.empty()) return;
  // A copy: it takes itself out of the queue when it is done, which may be at once.
  const std::function<void()> update = updates_.front();
  update();
}

v1::Job Job::Describe() const {
  v1::Job job;
  job.set_name(name_);
  *job.mutable_config() = engine_.config();
  job.set_state(engine_.state());
  if (model_ != nullptr && had_member_) *job.mutable_manifest() = model_->layout()->manifest();
  job.set_version(engine_.version().value());
  job.set_round(engine_.round().value());
  job.set_state_reason(engine_.state_reason());
  return job;
}

v1::JobStatus Job::Status() const {
  v1::JobStatus status;
  engine_.FillStatus(context_.clock.Now(), context_.clock.WallNow(), &status);
  status.set_job(name_);
  if (model_ != nullptr && had_member_) status.set_model_bytes(model_->layout()->model_bytes());
  return status;
}

bool Job::HasActiveWorkers() const {
  const v1::JobStatus status = Status();
  return std::any_of(status.workers().begin(), status.workers().end(),
                     [](const v1::WorkerStatus& worker) { return worker.state() == v1::WorkerStatus::STATE_ACTIVE; });
}

// ---------------------------------------------------------------------------------------------------------- pushes

engine::RequestId Job::OpenPush(const v1::PushHeader& header, std::shared_ptr<Push> push) {
  const engine::RequestId id = NextRequest();
  OpenPushState& open = pushes_[id];
  open.push = std::move(push);
  open.header = header;
  engine::PushOpenedEvent event;
  event.request = id;
  event.who = KeyOf(header.session());
  event.token = header.session().token();
  event.kind = header.kind();
  event.round = RoundId(header.round());
  event.base_version = ModelVersion(header.base_version());
  event.base_digest = header.base_digest();
  event.codec = header.codec();
  event.total_bytes = header.payload_bytes();
  if (header.has_digest()) event.digest = header.digest();
  event.facts = header.facts();
  Dispatch(std::move(event));
  return id;
}

void Job::Perform(engine::AdmitPush& e) {
  const auto it = pushes_.find(e.request);
  if (it == pushes_.end()) return;
  if (absl::Status admitted = Admit(e.request, it->second); !admitted.ok()) {
    Dispatch(engine::PushFailedEvent{e.request, admitted, false});
  }
}

absl::Status Job::Admit(engine::RequestId id, OpenPushState& open) {
  const v1::PushHeader& header = open.header;
  std::shared_ptr<Staging> staging;
  const Kept* kept = FindKept(header.session(), header.round());
  if (header.resume_offset() > 0) {
    const bool fits = kept != nullptr && kept->staging->codec() == header.codec() &&
                      kept->staging->total_bytes() == header.payload_bytes();
    const uint64_t offset = fits ? kept->staging->received_bytes() : 0;
    if (header.resume_offset() != offset) {
      return Error(v1::REASON_OFFSET_MISMATCH, absl::StrCat("of this push ", offset, " bytes are kept, not ",
                                                            header.resume_offset(), "; go on from there"))
          .With("offset", offset);
    }
    staging = kept->staging;
  }
  DropKept(header.session());
  if (staging == nullptr) {
    // What is kept of broken pushes must not stand in the way of a whole one.
    const size_t slots = engine_.config().max_inflight_pushes();
    size_t taken = std::count_if(pushes_.begin(), pushes_.end(),
                                 [](const auto& entry) { return entry.second.staging != nullptr; });
    while (!kept_.empty() && taken + kept_.size() >= slots) kept_.pop_front();
    try {
      ASSIGN_OR_RETURN(staging, Staging::Create(model_->layout(), header.codec(), header.payload_bytes()));
    } catch (const std::bad_alloc&) {
      return Error(v1::REASON_UPLOAD_BUDGET, "the machine has no memory for this push").RetryAfter(absl::Seconds(1));
    }
  }
  const MonotonicTime now = context_.clock.Now();
  open.staging = staging;
  open.window_start = now;
  open.window_bytes = staging->received_bytes();
  const bool others = std::any_of(pushes_.begin(), pushes_.end(), [id](const auto& entry) {
    return entry.first != id && entry.second.staging != nullptr;
  });
  if (!others) next_progress_check_ = now + kProgressPeriod;
  open.push->Admit(std::move(staging));
  return absl::OkStatus();
}

void Job::OnPushEnded(engine::RequestId id, Push::Ending ending) {
  const auto it = pushes_.find(id);
  if (it == pushes_.end()) return;
  OpenPushState& open = it->second;
  if (open.ended) return;
  if (!ending.status.ok()) {
    open.resumable = ending.resumable;
    if (open.staging == nullptr) {
      // Nothing was admitted: the engine may know nothing of it. Its answer goes nowhere, or says what was wrong.
      Dispatch(engine::PushFailedEvent{id, ending.status, false});
      return FinishPush(id, ending.status, false);
    }
    return Dispatch(engine::PushFailedEvent{id, ending.status, false});
  }
  open.ended = true;
  std::shared_ptr<Staging> staging = open.staging;
  Dispatch(engine::PushProgressEvent{id, staging->total_bytes()});
  context_.executor([this, id, staging] {
    absl::StatusOr<Verified> verified = staging->Verify(context_.kernels, context_.pool);
    context_.loop.Post([this, id, verified = std::move(verified)] {
      const auto it = pushes_.find(id);
      if (it == pushes_.end()) return;
      if (!verified.ok()) return Dispatch(engine::PushFailedEvent{id, verified.status(), true});
      it->second.verified = *verified;
      Dispatch(engine::PushVerifiedEvent{id, verified->digest, verified->norm, verified->max_abs});
    });
  });
}

void Job::Perform(engine::ReplyPush& e) { FinishPush(e.request, std::move(e.answer), e.keep_staging); }

void Job::Perform(engine::CancelPush& e) {
  const auto it = pushes_.find(e.request);
  if (it == pushes_.end()) return;
  // A newer call of the same worker for the same round may want to go on where this one stopped.
  const v1::PushHeader& header = it->second.header;
  const bool followed = std::any_of(pushes_.begin(), pushes_.end(), [&](const auto& entry) {
    const v1::PushHeader& other = entry.second.header;
    return entry.first > e.request && SameLife(other.session(), header.session()) && other.round() == header.round();
  });
  it->second.resumable = followed;
  FinishPush(e.request, e.status, followed);
}

void Job::FinishPush(engine::RequestId id, absl::StatusOr<v1::PushDeltaResponse> answer, bool keep_staging) {
  const auto it = pushes_.find(id);
  if (it == pushes_.end()) return;
  OpenPushState open = std::move(it->second);
  pushes_.erase(it);
  const std::shared_ptr<Staging> staging = open.push->Close();
  const v1::PushHeader& header = open.header;
  if (keep_staging && open.resumable && !open.ended && staging != nullptr && staging->received_bytes() > 0) {
    DropKept(header.session());
    kept_.push_back(
        {header.session().worker(), Incarnation(header.session().incarnation()), RoundId(header.round()), staging});
  }
  if (!answer.ok()) {
    Announcement line;
    line.job = name_;
    line.round = header.round();
    line.worker = EscapeForLog(header.session().worker());
    line.reason = ReasonName(ReasonOf(answer.status()));
    line.text = absl::StrCat("a push of worker ", line.worker, " for round ", header.round(),
                             " was not taken: ", line.reason, ": ", std::string(answer.status().message()));
    context_.observer.OnAnnouncement(line);
  }
  open.push->Answer(std::move(answer));
}

const Job::Kept* Job::FindKept(const v1::Session& session, uint64_t round) const {
  for (const Kept& kept : kept_) {
    if (kept.worker == session.worker() && kept.incarnation.value() == session.incarnation() &&
        kept.round.value() == round) {
      return &kept;
    }
  }
  return nullptr;
}

void Job::DropKept(const v1::Session& session) {
  const auto same = [&](const Kept& kept) { return kept.worker == session.worker(); };
  kept_.erase(std::remove_if(kept_.begin(), kept_.end(), same), kept_.end());
}

void Job::CheckProgress(MonotonicTime now) {
  std::vector<engine::Event> events;
  for (auto& [id, open] : pushes_) {
    if (open.staging == nullptr || open.ended) continue;
    const uint64_t total = open.header.payload_bytes();
    const uint64_t received = open.push->received_bytes();
    if (received != open.reported_bytes) {
      open.reported_bytes = received;
      // The last byte does not free the worker from sending its end: only OnPushEnded reports the whole.
      if (received < total) events.push_back(engine::PushProgressEvent{id, received});
    }
    if (now - open.window_start < kProgressWindow) continue;
    const uint64_t wanted = std::min(kLeastBytesPerWindow, total - open.window_bytes);
    if (wanted > 0 && received - open.window_bytes >= wanted) {
      open.window_start = now;
      open.window_bytes = received;
      continue;
    }
    open.resumable = true;
    ++context_.transfers_too_slow;
    const absl::Status slow =
        Error(v1::REASON_TOO_SLOW,
              absl::StrCat("only ", received - open.window_bytes, " bytes came within ",
                           absl::FormatDuration(now - open.window_start), ", ", received, " of ", total, " in all"));
    events.push_back(engine::PushFailedEvent{id, slow, false});
  }
  next_progress_check_ = now + kProgressPeriod;
  for (engine::Event& event : events) Dispatch(std::move(event));
}

bool Job::Received(const v1::Session& session, uint64_t round) const {
  if (round == 0) return engine_.has_model();
  if (round < engine_.round().value()) {
    for (const v1::RoundRecord& record : engine_.Records(round + 1, 1)) {
      if (record.round() != round) continue;
      for (const v1::Contribution& part : record.contributions()) {
        if (part.worker() == session.worker() && part.incarnation() == session.incarnation()) return true;
      }
    }
    return false;
  }
  if (round > engine_.round().value()) return false;
  const v1::JobStatus status = Status();
  for (const v1::WorkerStatus& worker : status.workers()) {
    if (worker.worker() == session.worker()) {
      return worker.incarnation() == session.incarnation() && worker.part() == v1::WorkerStatus::PART_FOLDED;
    }
  }
  return false;
}

void Job::QueryPush(const v1::QueryPushRequest& request, Reply<v1::QueryPushResponse> reply) {
  const v1::Session& session = request.session();
  if (absl::Status known = engine_.CheckSession(KeyOf(session), session.token()); !known.ok()) return reply(known);
  Dispatch(engine::SignOfLifeEvent{KeyOf(session), session.token()});
  v1::QueryPushResponse answer;
  answer.set_epoch(context_.epoch.value());
  // Whoever asks has given up its stream, even if the network has not told us yet; only then the offset stands still.
  for (const auto& [id, open] : pushes_) {
    if (!SameLife(open.header.session(), session) || open.header.round() != request.round()) continue;
    if (open.ended) {
      answer.set_committed_offset(open.staging->total_bytes());
      answer.set_crc32c(open.staging->crc32c());
      return reply(std::move(answer));
    }
    const engine::RequestId given_up = id;
    OnPushEnded(given_up, {Error(v1::REASON_TRANSFER_CANCELLED, "the worker asked where this push stands"), true});
    break;
  }
  if (const Kept* kept = FindKept(session, request.round()); kept != nullptr) {
    answer.set_committed_offset(kept->staging->received_bytes());
    answer.set_crc32c(kept->staging->crc32c());
  }
  answer.set_received(Received(session, request.round()));
  reply(std::move(answer));
}

// ---------------------------------------------------------------------------------------------------- the numbers

void Job::Perform(engine::BeginAttempt&) {
  urgent_ = changed_ = true;
  strand_->Schedule([model = model_] { model->BeginAttempt(); });
}

void Job::Perform(engine::Fold& e) {
  const auto it = pushes_.find(e.request);
  if (it == pushes_.end()) return;
  strand_->Schedule(
      [this, model = model_, staging = it->second.staging, max_abs = it->second.verified.max_abs, fold = e] {
        absl::Status folded = model->Fold(*staging, max_abs, fold.weight, fold.scale, fold.rank);
        context_.loop.Post([this, folded, request = fold.request] {
          if (folded.ok()) {
            Dispatch(engine::FoldedEvent{request});
          } else {
            Dispatch(engine::FoldRefusedEvent{request, folded});
          }
        });
      });
}

void Job::Perform(engine::StoreInitialModel& e) {
  const auto it = pushes_.find(e.request);
  if (it == pushes_.end()) return;
  storage::JobRow row{name_, engine_.config(), model_->layout()->manifest()};
  strand_->Schedule([this, model = model_, staging = it->second.staging, request = e.request, row = std::move(row)] {
    if (absl::Status kept = context_.ledger.PutJob(context_.epoch, row); !kept.ok()) {
      context_.loop.Post([this, kept, request] { Dispatch(engine::InitialModelFailedEvent{request, kept}); });
      return;
    }
    const std::shared_ptr<const Version> version = model->SetInitialModel(*staging);
    context_.loop.Post([this, request, digest = version->digest()] {
      Dispatch(engine::InitialModelStoredEvent{request, digest});
    });
  });
}

void Job::Perform(engine::Commit& e) {
  strand_->Schedule([this, model = model_, commit = e] {
    CommitRound(model, commit.record, commit.outer, commit.trajectories_total);
  });
}

void Job::CommitRound(const std::shared_ptr<JobModel>& model, v1::RoundRecord record, const v1::OuterOptimizer& outer,
                      uint32_t trajectories) {
  const RoundId round(record.round());
  // 1. Compute: beside the model, which stays as it is.
  absl::StatusOr<PreparedCommit> prepared = model->Prepare(round, outer, trajectories, record.momentum_rescale());
  if (!prepared.ok()) {
    context_.loop.Post([this, round, why = std::string(prepared.status().message())] {
      Dispatch(engine::CommitFailedEvent{round, why});
    });
    return;
  }
  const absl::Time wall_time = context_.clock.WallNow();
  const double mean_norm = prepared->mean_norm;
  const uint32_t digest = prepared->version->digest();
  record.set_mean_norm(mean_norm);
  record.set_model_digest(digest);
  SetTimestamp(wall_time, record.mutable_committed_at());
  context_.seams.Reached(kCommitComputed);
  // 2. Durable: the commit point. What cannot be kept is not published; nobody retries a failed sync.
  if (absl::Status kept = context_.ledger.AppendRound(context_.epoch, name_, record); !kept.ok()) {
    context_.observer.OnFatal(kept);
    return;
  }
  context_.seams.Reached(kCommitDurable);
  // 3. Publish: a swap.
  model->Publish(*std::move(prepared));
  context_.seams.Reached(kCommitPublished);
  // 4. Acknowledge.
  context_.loop.Post([this, round, digest, mean_norm, wall_time] {
    Dispatch(engine::CommittedEvent{round, digest, mean_norm, wall_time});
    for (const v1::RoundRecord& newest : engine_.Records(round.value() + 1, 1)) {
      context_.observer.OnCommitted(name_, newest);
    }
  });
}

absl::StatusOr<std::shared_ptr<const Version>> Job::FindVersion(std::optional<ModelVersion> version) const {
  if (model_ == nullptr || !engine_.has_model())
    return Error(v1::REASON_NO_MODEL, "there is no model yet; watch round 0");
  return model_->Get(version);
}

void Job::OpenPull(const v1::PullModelRequest& request, Reply<PullSource> reply) {
  if (!request.session().worker().empty()) {
    const v1::Session& session = request.session();
    if (absl::Status known = engine_.CheckSession(KeyOf(session), session.token()); !known.ok()) return reply(known);
    Dispatch(engine::SignOfLifeEvent{KeyOf(session), session.token()});
  }
  const v1::Codec own = engine_.config().pull_codec();
  const v1::Codec codec = request.codec() == v1::CODEC_UNSPECIFIED ? own : request.codec();
  if (codec != own && codec != v1::CODEC_FP32) {
    return reply(Error(v1::REASON_BAD_CODEC,
                       absl::StrCat("this job's models are read as FP32", own == v1::CODEC_BF16 ? " or BF16" : "",
                                    ", not as codec ", static_cast<int>(codec))));
  }
  const v1::ModelKind kind = request.kind() == v1::MODEL_KIND_UNSPECIFIED ? v1::MODEL_KIND_BROADCAST : request.kind();
  if (kind != v1::MODEL_KIND_BROADCAST && kind != v1::MODEL_KIND_MODEL) {
    return reply(Error(v1::REASON_INVALID_REQUEST, "kind must be BROADCAST or MODEL").Field("kind", "is not known"));
  }
  std::optional<ModelVersion> wanted;
  if (request.has_version()) wanted = ModelVersion(request.version());
  absl::StatusOr<std::shared_ptr<const Version>> version = FindVersion(wanted);
  if (!version.ok()) return reply(version.status());
  // The first reader of a codec encodes, others wait for it: not on this thread.
  context_.executor([this, version = *version, kind, codec, offset = request.offset(), length = request.length(),
                     reply = std::move(reply)] {
    absl::StatusOr<PullSource> source = [&]() -> absl::StatusOr<PullSource> {
      PullSource made;
      ASSIGN_OR_RETURN(made.payload, version->Payload(kind, codec, context_.kernels));
      const uint64_t total = made.payload.size();
      if (offset > total) {
        return Error(v1::REASON_OFFSET_MISMATCH,
                     absl::StrCat("the payload has ", total, " bytes, byte ", offset, " lies beyond"))
            .With("offset", total);
      }
      made.version = version;
      made.offset = offset;
      made.length = length == 0 ? total - offset : std::min(length, total - offset);
      v1::PullHeader& header = made.header;
      header.set_version(version->id().value());
      header.set_payload_bytes(total);
      header.set_codec(codec);
      header.set_kind(kind);
      header.set_model_digest(version->digest());
      header.set_payload_digest(made.payload.digest);
      header.set_epoch(context_.epoch.value());
      *header.mutable_manifest() = version->layout()->manifest();
      return made;
    }();
    context_.loop.Post([reply, source = std::move(source)]() mutable { reply(std::move(source)); });
  });
}

// -------------------------------------------------------------------------------------------------------- watchers

uint64_t Job::WatchRound(const v1::WatchRoundRequest& request, Subscriber<v1::WatchRoundResponse> subscriber) {
  const v1::Session& session = request.session();
  if (absl::Status known = engine_.CheckSession(KeyOf(session), session.token()); !known.ok()) {
    subscriber({}, known);
    return 0;
  }
  if (context_.watchers >= limits::kMaxWatchers) {
    subscriber({}, Error(v1::REASON_TOO_MANY,
                         absl::StrCat("the coordinator serves ", limits::kMaxWatchers, " watchers already"))
                       .RetryAfter(absl::Seconds(1)));
    return 0;
  }
  Dispatch(engine::SignOfLifeEvent{KeyOf(session), session.token()});
  const uint64_t id = ++last_watch_;
  RoundWatch& watch = round_watches_[id];
  watch.cursor.round = RoundId(request.round());
  watch.cursor.who = KeyOf(session);
  watch.token = session.token();
  watch.subscriber = std::move(subscriber);
  ++context_.watchers;
  if (Tell(context_.clock.Now(), watch)) return id;
  Unwatch(id);
  return 0;
}

uint64_t Job::WatchJob(Subscriber<v1::WatchJobResponse> subscriber) {
  if (context_.watchers >= limits::kMaxWatchers) {
    subscriber({}, Error(v1::REASON_TOO_MANY,
                         absl::StrCat("the coordinator serves ", limits::kMaxWatchers, " watchers already"))
                       .RetryAfter(absl::Seconds(1)));
    return 0;
  }
  const uint64_t id = ++last_watch_;
  ++context_.watchers;
  std::vector<v1::WatchJobResponse> first(1);
  *first[0].mutable_status() = Status();
  subscriber(std::move(first), std::nullopt);
  job_watches_[id] = std::move(subscriber);
  return id;
}

void Job::Unwatch(uint64_t id) { context_.watchers -= round_watches_.erase(id) + job_watches_.erase(id); }

bool Job::Tell(MonotonicTime now, RoundWatch& watch) {
  if (absl::Status known = engine_.CheckSession(watch.cursor.who, watch.token); !known.ok()) {
    watch.subscriber({}, known);
    return false;
  }
  engine::WatchCursor cursor = watch.cursor;
  std::vector<v1::WatchRoundResponse> events = engine_.NextWatchEvents(now, cursor);
  if (events.empty() && !cursor.done) return true;
  const auto waiting = [](const v1::WatchRoundResponse& event) { return event.has_waiting(); };
  if (std::any_of(events.begin(), events.end(), waiting)) {
    if (now < watch.waiting_after && std::all_of(events.begin(), events.end(), waiting)) {
      changed_ = true;  // Told at the next flush, in its state of then.
      return true;
    }
    watch.waiting_after = now + kNewsPeriod;
  }
  watch.cursor = std::move(cursor);
  const bool done = watch.cursor.done;
  watch.subscriber(std::move(events), done ? std::optional<absl::Status>(absl::OkStatus()) : std::nullopt);
  return !done;
}

void Job::Flush(MonotonicTime now) {
  changed_ = urgent_ = false;
  next_flush_ = now + kNewsPeriod;
  for (auto it = round_watches_.begin(); it != round_watches_.end();) {
    if (Tell(now, it->second)) {
      ++it;
    } else {
      it = round_watches_.erase(it);
      --context_.watchers;
    }
  }
  if (job_watches_.empty()) return;
  if (now < next_job_flush_) {
    changed_ = true;
    return;
  }
  next_job_flush_ = now + kNewsPeriod;
  v1::WatchJobResponse news;
  *news.mutable_status() = Status();
  for (auto& [id, subscriber] : job_watches_) subscriber({news}, std::nullopt);
}

// ---------------------------------------------------------------------------------------------------- time and end

MonotonicTime Job::NextDeadline() {
  if (!engine_deadline_.has_value()) engine_deadline_ = engine_.NextDeadline();
  MonotonicTime next = *engine_deadline_;
  const bool receiving = std::any_of(pushes_.begin(), pushes_.end(), [](const auto& entry) {
    return entry.second.staging != nullptr && !entry.second.ended;
  });
  if (receiving) next = std::min(next, next_progress_check_);
  if (changed_) next = std::min(next, next_flush_);
  return next;
}

void Job::OnDeadline(MonotonicTime now) {
  if (NextDeadline() > now) return;
  if (now >= next_progress_check_) CheckProgress(now);
  if (!engine_deadline_.has_value()) engine_deadline_ = engine_.NextDeadline();
  if (*engine_deadline_ <= now) Dispatch(engine::TickEvent{});
  if (changed_ && now >= next_flush_) Flush(now);
}

void Job::Drain() { Dispatch(engine::DrainEvent{}); }

bool Job::Drained() const {
  if (!engine_.Idle()) return false;
  const v1::RoundPhase phase = Status().round().phase();
  return phase != v1::ROUND_PHASE_COLLECTING && phase != v1::ROUND_PHASE_COMMITTING;
}

void Job::Abandon(const absl::Status& why) {
  while (!pending_joins_.empty()) {
    PendingJoin join = std::move(pending_joins_.front());
    pending_joins_.pop_front();
    join.reply(why);
  }
  while (!pushes_.empty()) FinishPush(pushes_.begin()->first, why, false);
  for (auto& [id, watch] : round_watches_) watch.subscriber({}, why);
  for (auto& [id, subscriber] : job_watches_) subscriber({}, why);
  context_.watchers -= round_watches_.size() + job_watches_.size();
  round_watches_.clear();
  job_watches_.clear();
}

}  // namespace bmuf::coordinator
