#include "server/coordinator/coordinator.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/base/limits.h"
#include "core/base/names.h"
#include "core/base/status_macros.h"
#include "google/protobuf/util/message_differencer.h"
#include "server/coordinator/protocol.h"

namespace bmuf::coordinator {
namespace {

// A draining daemon looks this often whether it may end.
constexpr absl::Duration kDrainCheckPeriod = absl::Milliseconds(20);
constexpr absl::Duration kDoneCheckPeriod = absl::Milliseconds(200);
// After the end of its last job a daemon waits this long for workers to read the model and leave.
constexpr absl::Duration kLeaveTime = absl::Seconds(10);
// Enough to tell two processes apart, and not more than a nonce needs.
constexpr size_t kLeastInstanceBytes = 16;
constexpr size_t kMostInstanceBytes = 256;
constexpr size_t kMostPushIdBytes = 64;
constexpr size_t kMostMetricNameBytes = 64;
constexpr uint32_t kDefaultRoundsListed = 100;
constexpr uint32_t kMostRoundsListed = 1000;
// A manifest travels with other fields in messages below gRPC's default limit.
constexpr size_t kMostManifestBytes = limits::kMaxRequestBytes - 64 * 1024;

absl::Status Draining() {
  return Error(v1::REASON_DRAINING, "the coordinator is shutting down; its successor answers")
      .RetryAfter(absl::Seconds(1));
}

absl::Status WrongField(const std::string& field, const std::string& rule) {
  return Error(v1::REASON_INVALID_REQUEST, absl::StrCat(field, " ", rule)).Field(field, rule);
}

absl::Status CheckHeader(const v1::PushHeader& header) {
  if (header.ByteSizeLong() > limits::kMaxPushHeaderBytes) {
    return WrongField("header", absl::StrCat("must be at most ", limits::kMaxPushHeaderBytes, " bytes"));
  }
  if (header.push_id().size() > kMostPushIdBytes) {
    return WrongField("header.push_id", absl::StrCat("must be at most ", kMostPushIdBytes, " bytes"));
  }
  const v1::BlockFacts& facts = header.facts();
  if (static_cast<size_t>(facts.metrics().size()) > limits::kMaxPushMetrics) {
    return WrongField("header.facts.metrics", absl::StrCat("must be at most ", limits::kMaxPushMetrics));
  }
  for (const auto& [name, value] : facts.metrics()) {
    const bool plain = !name.empty() && name.size() <= kMostMetricNameBytes &&
                       std::all_of(name.begin(), name.end(), [](char c) { return c > ' ' && c < 0x7f; });
    if (!plain) return WrongField("header.facts.metrics", "names are 1 to 64 printable ASCII characters");
  }
  const auto& block_time = facts.block_time();
  constexpr int64_t kMostSeconds = int64_t{100} * 365 * 86400;
  if (block_time.seconds() < 0 || block_time.seconds() > kMostSeconds || block_time.nanos() < 0 ||
      block_time.nanos() > 999'999'999) {
    return WrongField("header.facts.block_time", "must be a duration of 0 to 100 years");
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<v1::JobConfig> ResolveJobConfig(const v1::JobConfig& defaults, const v1::JobConfig& config) {
  v1::JobConfig merged = defaults;
  // Lists replace, they do not add up.
  if (config.push_codecs_size() > 0) merged.clear_push_codecs();
  merged.MergeFrom(config);
  return engine::ResolveConfig(merged);
}

void Watch::Cancel() {
  if (state_ == nullptr) return;
  state_->loop->Post([state = state_] {
    state->cancelled = true;
    if (state->job != nullptr && state->id != 0) state->job->Unwatch(state->id);
    state->id = 0;
  });
}

Coordinator::Coordinator(Parts parts, Options options)
    : context_{parts.loop,
               parts.loop.clock(),
               [this, executor = parts.executor](std::function<void()> task) {
                 {
                   absl::MutexLock lock(&outstanding_mu_);
                   ++outstanding_;
                 }
                 executor([this, task = std::move(task)]() mutable {
                   task();
                   task = nullptr;
                   absl::MutexLock lock(&outstanding_mu_);
                   --outstanding_;
                 });
               },
               parts.pool,
               parts.kernels,
               parts.budget,
               parts.ledger,
               parts.epoch,
               parts.observer,
               parts.seams,
               std::move(parts.random_token)},
      options_(std::move(options)),
      started_(parts.loop.clock().Now()) {
  context_.loop.SetTimer(this);
}

Coordinator::~Coordinator() {
  outstanding_mu_.LockWhen(absl::Condition(
      +[](int* outstanding) { return *outstanding == 0; }, &outstanding_));
  outstanding_mu_.Unlock();
  context_.loop.SetTimer(nullptr);
}

// ------------------------------------------------------------------------------------------------------ to the loop

void Coordinator::OnLoop(std::function<void()> handle, std::function<void(absl::Status)> refuse) {
  const bool queued = context_.loop.PostRequest([this, handle = std::move(handle), refuse] {
    if (abandoned_) {
      refuse(Draining());
    } else {
      handle();
    }
  });
  if (!queued) refuse(Error(v1::REASON_TOO_MANY, "too many requests are waiting").RetryAfter(absl::Seconds(1)));
}

template <typename Request, typename Response>
void Coordinator::Handle(void (Coordinator::*handler)(Request, Reply<Response>), Request request,
                         Reply<Response> reply) {
  auto held = std::make_shared<Request>(std::move(request));
  OnLoop([this, handler, held, reply] { (this->*handler)(std::move(*held), reply); },
         [reply](const absl::Status& why) { reply(why); });
}

void Coordinator::Join(v1::JoinRequest request, Reply<v1::JoinResponse> reply) {
  Handle(&Coordinator::DoJoin, std::move(request), std::move(reply));
}
void Coordinator::Heartbeat(v1::HeartbeatRequest request, Reply<v1::HeartbeatResponse> reply) {
  Handle(&Coordinator::DoHeartbeat, std::move(request), std::move(reply));
}
void Coordinator::Leave(v1::LeaveRequest request, Reply<v1::LeaveResponse> reply) {
  Handle(&Coordinator::DoLeave, std::move(request), std::move(reply));
}
void Coordinator::QueryPush(v1::QueryPushRequest request, Reply<v1::QueryPushResponse> reply) {
  Handle(&Coordinator::DoQueryPush, std::move(request), std::move(reply));
}
void Coordinator::OpenPull(v1::PullModelRequest request, Reply<PullSource> reply) {
  Handle(&Coordinator::DoOpenPull, std::move(request), std::move(reply));
}
void Coordinator::CreateJob(v1::CreateJobRequest request, Reply<v1::CreateJobResponse> reply) {
  Handle(&Coordinator::DoCreateJob, std::move(request), std::move(reply));
}
void Coordinator::GetJob(v1::GetJobRequest request, Reply<v1::GetJobResponse> reply) {
  Handle(&Coordinator::DoGetJob, std::move(request), std::move(reply));
}
void Coordinator::ListJobs(v1::ListJobsRequest request, Reply<v1::ListJobsResponse> reply) {
  Handle(&Coordinator::DoListJobs, std::move(request), std::move(reply));
}
void Coordinator::UpdateJob(v1::UpdateJobRequest request, Reply<v1::UpdateJobResponse> reply) {
  Handle(&Coordinator::DoUpdateJob, std::move(request), std::move(reply));
}
void Coordinator::PauseJob(v1::PauseJobRequest request, Reply<v1::PauseJobResponse> reply) {
  Handle(&Coordinator::DoPauseJob, std::move(request), std::move(reply));
}
void Coordinator::ResumeJob(v1::ResumeJobRequest request, Reply<v1::ResumeJobResponse> reply) {
  Handle(&Coordinator::DoResumeJob, std::move(request), std::move(reply));
}
void Coordinator::ListRounds(v1::ListRoundsRequest request, Reply<v1::ListRoundsResponse> reply) {
  Handle(&Coordinator::DoListRounds, std::move(request), std::move(reply));
}
void Coordinator::EvictWorker(v1::EvictWorkerRequest request, Reply<v1::EvictWorkerResponse> reply) {
  Handle(&Coordinator::DoEvictWorker, std::move(request), std::move(reply));
}
void Coordinator::ReadmitWorker(v1::ReadmitWorkerRequest request, Reply<v1::ReadmitWorkerResponse> reply) {
  Handle(&Coordinator::DoReadmitWorker, std::move(request), std::move(reply));
}
void Coordinator::OpenExport(v1::ExportModelRequest request, Reply<ExportSource> reply) {
  Handle(&Coordinator::DoOpenExport, std::move(request), std::move(reply));
}
void Coordinator::Drain(v1::DrainRequest request, Reply<v1::DrainResponse> reply) {
  Handle(&Coordinator::DoDrain, std::move(request), std::move(reply));
}
void Coordinator::GetStatus(v1::GetStatusRequest request, Reply<v1::GetStatusResponse> reply) {
  Handle(&Coordinator::DoGetStatus, std::move(request), std::move(reply));
}

void Coordinator::SetListenAddress(std::string address) {
  context_.loop.Post([this, address = std::move(address)] { listen_address_ = address; });
}

void Coordinator::CountSlowReader() {
  context_.loop.Post([this] { ++context_.transfers_too_slow; });
}

void Coordinator::Abandon() {
  context_.loop.Post([this] {
    abandoned_ = true;
    for (auto& [name, job] : jobs_) job->Abandon(Draining());
  });
}

// ---------------------------------------------------------------------------------------------------------- workers

absl::StatusOr<Job*> Coordinator::FindJob(const std::string& name) const {
  RETURN_IF_ERROR(ValidateName("job", name));
  const auto it = jobs_.find(name);
  if (it == jobs_.end()) {
    return Error(v1::REASON_JOB_NOT_FOUND, absl::StrCat("there is no job ", name, "; create it or correct the name"))
        .With("job", name);
  }
  return it->second.get();
}

absl::StatusOr<Job*> Coordinator::FindSession(const v1::Session& session) const {
  if (session.epoch() != context_.epoch.value()) {
    return Error(v1::REASON_EPOCH_CHANGED,
                 absl::StrCat("the session is of another life of the coordinator; this is epoch ",
                              context_.epoch.value(), "; join again"))
        .With("epoch", context_.epoch.value());
  }
  const auto it = jobs_.find(session.job());
  if (it == jobs_.end() || !ValidateName("worker", session.worker()).ok()) {
    return Error(v1::REASON_SESSION_NOT_FOUND, "no such session; join again");
  }
  return it->second.get();
}

void Coordinator::DoJoin(v1::JoinRequest request, Reply<v1::JoinResponse> reply) {
  const auto check = [&]() -> absl::StatusOr<Job*> {
    RETURN_IF_ERROR(ValidateName("job", request.job()));
    RETURN_IF_ERROR(ValidateName("worker", request.worker()));
    if (request.protocol_min() > kProtocolVersion || request.protocol_max() < kOldestProtocolVersion) {
      return Error(v1::REASON_PROTOCOL_VERSION,
                   absl::StrCat("the client speaks protocol ", request.protocol_min(), " to ", request.protocol_max(),
                                ", this coordinator ", kOldestProtocolVersion, " to ", kProtocolVersion))
          .With("server_min", kOldestProtocolVersion)
          .With("server_max", kProtocolVersion)
          .With("client_min", request.protocol_min())
          .With("client_max", request.protocol_max());
    }
    if (request.instance().size() < kLeastInstanceBytes || request.instance().size() > kMostInstanceBytes) {
      return WrongField("instance",
                        absl::StrCat("must be ", kLeastInstanceBytes, " to ", kMostInstanceBytes, " random bytes"));
    }
    if (request.trajectories() > limits::kMaxTrajectoriesPerWorker) {
      return WrongField("trajectories", absl::StrCat("must be at most ", limits::kMaxTrajectoriesPerWorker));
    }
    if (request.manifest().ByteSizeLong() > kMostManifestBytes) {
      return WrongField("manifest", absl::StrCat("must be at most ", kMostManifestBytes, " bytes"));
    }
    return FindJob(request.job());
  };
  absl::StatusOr<Job*> job = check();
  if (!job.ok()) return reply(job.status());
  (*job)->Join(std::move(request), std::move(reply));
}

void Coordinator::DoHeartbeat(v1::HeartbeatRequest request, Reply<v1::HeartbeatResponse> reply) {
  absl::StatusOr<Job*> job = FindSession(request.session());
  if (!job.ok()) return reply(job.status());
  (*job)->Heartbeat(request, std::move(reply));
}

void Coordinator::DoLeave(v1::LeaveRequest request, Reply<v1::LeaveResponse> reply) {
  absl::StatusOr<Job*> job = FindSession(request.session());
  if (!job.ok()) return reply(job.status());
  (*job)->Leave(request, std::move(reply));
}

void Coordinator::DoQueryPush(v1::QueryPushRequest request, Reply<v1::QueryPushResponse> reply) {
  absl::StatusOr<Job*> job = FindSession(request.session());
  if (!job.ok()) return reply(job.status());
  (*job)->QueryPush(request, std::move(reply));
}

void Coordinator::DoOpenPull(v1::PullModelRequest request, Reply<PullSource> reply) {
  absl::StatusOr<Job*> job = FindJob(request.job());
  if (job.ok() && !request.session().worker().empty()) {
    absl::StatusOr<Job*> own = FindSession(request.session());
    if (!own.ok()) {
      job = own.status();
    } else if (*own != *job) {
      job = WrongField("session.job", "must be the job that is read");
    }
  }
  if (!job.ok()) return reply(job.status());
  (*job)->OpenPull(request, std::move(reply));
}

absl::StatusOr<engine::RequestId> Coordinator::StartPush(const v1::PushHeader& header,
                                                         const std::shared_ptr<Push>& push, Job** owner) {
  RETURN_IF_ERROR(CheckHeader(header));
  ASSIGN_OR_RETURN(*owner, FindSession(header.session()));
  return (*owner)->OpenPush(header, push);
}

std::shared_ptr<Push> Coordinator::OpenPush(v1::PushHeader header, Push::Callbacks callbacks) {
  // Whom the stream's end concerns is known once the loop has seen the header; both come through the same queue.
  struct Owner {
    Job* job = nullptr;
    engine::RequestId id;
  };
  auto owner = std::make_shared<Owner>();
  auto push = std::make_shared<Push>(std::move(callbacks), [&loop = context_.loop, owner](Push::Ending ending) {
    loop.Post([owner, ending = std::move(ending)] {
      if (owner->job != nullptr) owner->job->OnPushEnded(owner->id, ending);
    });
  });
  auto held = std::make_shared<v1::PushHeader>(std::move(header));
  OnLoop(
      [this, held, push, owner] {
        Job* job = nullptr;
        absl::StatusOr<engine::RequestId> id = StartPush(*held, push, &job);
        if (!id.ok()) {
          push->Close();
          push->Answer(id.status());
          return;
        }
        owner->job = job;
        owner->id = *id;
      },
      [push](const absl::Status& why) {
        push->Close();
        push->Answer(why);
      });
  return push;
}

Watch Coordinator::WatchRound(v1::WatchRoundRequest request, Subscriber<v1::WatchRoundResponse> subscriber) {
  Watch watch;
  watch.state_ = std::make_shared<Watch::State>();
  watch.state_->loop = &context_.loop;
  OnLoop(
      [this, state = watch.state_, request = std::move(request), subscriber] {
        absl::StatusOr<Job*> job = FindSession(request.session());
        if (!job.ok()) return subscriber({}, job.status());
        const uint64_t id = (*job)->WatchRound(request, subscriber);
        if (state->cancelled) return (*job)->Unwatch(id);
        state->job = *job;
        state->id = id;
      },
      [subscriber](const absl::Status& why) { subscriber({}, why); });
  return watch;
}

// -------------------------------------------------------------------------------------------------------- operators

void Coordinator::DoCreateJob(v1::CreateJobRequest request, Reply<v1::CreateJobResponse> reply) {
  const std::string& name = request.job();
  if (absl::Status valid = ValidateName("job", name); !valid.ok()) return reply(valid);
  if (context_.draining) return reply(Draining());
  absl::StatusOr<v1::JobConfig> config = ResolveJobConfig(options_.job_defaults, request.config());
  if (!config.ok()) return reply(config.status());
  if (const auto it = jobs_.find(name); it != jobs_.end()) {
    if (!google::protobuf::util::MessageDifferencer::Equals(it->second->created_config(), *config)) {
      return reply(Error(v1::REASON_JOB_EXISTS, absl::StrCat("job ", name, " exists with other rules")));
    }
    v1::CreateJobResponse answer;
    *answer.mutable_job() = it->second->Describe();
    return reply(std::move(answer));
  }
  if (const auto it = creating_.find(name); it != creating_.end()) {
    it->second.push_back([this, request, reply] { DoCreateJob(request, reply); });
    return;
  }
  if (jobs_.size() + creating_.size() >= limits::kMaxJobs) {
    return reply(Error(v1::REASON_TOO_MANY, absl::StrCat("the daemon has its ", limits::kMaxJobs, " jobs")));
  }
  creating_[name];
  context_.executor([this, row = storage::JobRow{name, *config, std::nullopt}, reply = std::move(reply)] {
    absl::Status kept = context_.ledger.PutJob(context_.epoch, row);
    context_.loop.Post([this, row, kept, reply] {
      if (kept.ok()) {
        auto& job = jobs_[row.name] = std::make_unique<Job>(context_, row.name, row.config);
        if (context_.draining) job->Drain();
        Announcement line;
        line.job = row.name;
        line.text = absl::StrCat("job ", row.name, " created");
        context_.observer.OnAnnouncement(line);
        all_ended_since_.reset();
        v1::CreateJobResponse answer;
        *answer.mutable_job() = job->Describe();
        reply(std::move(answer));
      } else {
        reply(kept);
      }
      const std::vector<std::function<void()>> waiting = std::move(creating_[row.name]);
      creating_.erase(row.name);
      for (const auto& again : waiting) again();
    });
  });
}

void Coordinator::DoGetJob(v1::GetJobRequest request, Reply<v1::GetJobResponse> reply) {
  absl::StatusOr<Job*> job = FindJob(request.job());
  if (!job.ok()) return reply(job.status());
  v1::GetJobResponse answer;
  *answer.mutable_job() = (*job)->Describe();
  reply(std::move(answer));
}

void Coordinator::DoListJobs(v1::ListJobsRequest, Reply<v1::ListJobsResponse> reply) {
  v1::ListJobsResponse answer;
  for (const auto& [name, job] : jobs_) {
    // Without the manifests, which may be megabytes each: GetJob has them.
    *answer.add_jobs() = job->Describe();
    answer.mutable_jobs()->rbegin()->clear_manifest();
  }
  reply(std::move(answer));
}

void Coordinator::DoUpdateJob(v1::UpdateJobRequest request, Reply<v1::UpdateJobResponse> reply) {
  absl::StatusOr<Job*> job = FindJob(request.job());
  if (!job.ok()) return reply(job.status());
  (*job)->Update(request.changes(), std::move(reply));
}

void Coordinator::DoPauseJob(v1::PauseJobRequest request, Reply<v1::PauseJobResponse> reply) {
  absl::StatusOr<Job*> job = FindJob(request.job());
  if (!job.ok()) return reply(job.status());
  (*job)->Pause(request.reason(), [reply](const absl::Status& status) {
    if (!status.ok()) return reply(status);
    reply(v1::PauseJobResponse());
  });
}

void Coordinator::DoResumeJob(v1::ResumeJobRequest request, Reply<v1::ResumeJobResponse> reply) {
  absl::StatusOr<Job*> job = FindJob(request.job());
  if (!job.ok()) return reply(job.status());
  (*job)->Resume([reply](const absl::Status& status) {
    if (!status.ok()) return reply(status);
    reply(v1::ResumeJobResponse());
  });
}

void Coordinator::DoListRounds(v1::ListRoundsRequest request, Reply<v1::ListRoundsResponse> reply) {
  absl::StatusOr<Job*> job = FindJob(request.job());
  if (!job.ok()) return reply(job.status());
  const uint32_t limit = request.limit() == 0 ? kDefaultRoundsListed : std::min(request.limit(), kMostRoundsListed);
  v1::ListRoundsResponse answer;
  // As many as fit a message that a client without options can take: the rest is there with `before`.
  size_t bytes = 0;
  for (v1::RoundRecord& record : (*job)->Records(request.before(), limit)) {
    bytes += record.ByteSizeLong() + 8;
    if (bytes > limits::kMaxRequestBytes - 1024 && answer.rounds_size() > 0) break;
    *answer.add_rounds() = std::move(record);
  }
  reply(std::move(answer));
}

void Coordinator::DoEvictWorker(v1::EvictWorkerRequest request, Reply<v1::EvictWorkerResponse> reply) {
  absl::StatusOr<Job*> job = FindJob(request.job());
  absl::Status valid = job.ok() ? ValidateName("worker", request.worker()) : job.status();
  if (!valid.ok()) return reply(valid);
  (*job)->Evict(request.worker(), [reply](const absl::Status& status) {
    if (!status.ok()) return reply(status);
    reply(v1::EvictWorkerResponse());
  });
}

void Coordinator::DoReadmitWorker(v1::ReadmitWorkerRequest request, Reply<v1::ReadmitWorkerResponse> reply) {
  absl::StatusOr<Job*> job = FindJob(request.job());
  absl::Status valid = job.ok() ? ValidateName("worker", request.worker()) : job.status();
  if (!valid.ok()) return reply(valid);
  (*job)->Readmit(request.worker(), [reply](const absl::Status& status) {
    if (!status.ok()) return reply(status);
    reply(v1::ReadmitWorkerResponse());
  });
}

void Coordinator::DoOpenExport(v1::ExportModelRequest request, Reply<ExportSource> reply) {
  absl::StatusOr<Job*> job = FindJob(request.job());
  if (!job.ok()) return reply(job.status());
  v1::ModelKind kind = v1::MODEL_KIND_MODEL;
  switch (request.kind()) {
    case v1::MODEL_EXPORT_KIND_UNSPECIFIED:
    case v1::MODEL_EXPORT_KIND_MODEL:
      break;
    case v1::MODEL_EXPORT_KIND_BROADCAST:
      kind = v1::MODEL_KIND_BROADCAST;
      break;
    default:
      return reply(WrongField("kind", "must be MODEL or BROADCAST"));
  }
  std::optional<ModelVersion> wanted;
  if (request.has_version()) wanted = ModelVersion(request.version());
  absl::StatusOr<std::shared_ptr<const Version>> version = (*job)->FindVersion(wanted);
  if (!version.ok()) return reply(version.status());
  context_.executor([this, version = *version, name = request.job(), kind, reply = std::move(reply)] {
    ExportSource source{std::make_shared<const SafetensorsView>(name, version, kind, context_.kernels), version->id()};
    context_.loop.Post([reply, source = std::move(source)] { reply(source); });
  });
}

void Coordinator::DoDrain(v1::DrainRequest, Reply<v1::DrainResponse> reply) {
  if (!context_.draining) {
    context_.draining = true;
    const MonotonicTime now = context_.clock.Now();
    drain_deadline_ = now + options_.drain_timeout;
    next_ending_check_ = now;
    Announcement line;
    line.text = absl::StrCat("draining: open rounds may end for up to ", absl::FormatDuration(options_.drain_timeout));
    context_.observer.OnAnnouncement(line);
    for (auto& [name, job] : jobs_) job->Drain();
    if (options_.on_draining) options_.on_draining();
  }
  reply(v1::DrainResponse());
}

void Coordinator::DoGetStatus(v1::GetStatusRequest request, Reply<v1::GetStatusResponse> reply) {
  v1::GetStatusResponse answer;
  if (!request.job().empty()) {
    absl::StatusOr<Job*> job = FindJob(request.job());
    if (!job.ok()) return reply(job.status());
    *answer.add_jobs() = (*job)->Status();
  } else {
    for (const auto& [name, job] : jobs_) *answer.add_jobs() = job->Status();
  }
  answer.set_build(options_.build);
  answer.set_epoch(context_.epoch.value());
  const int64_t uptime = absl::ToInt64Nanoseconds(context_.clock.Now() - started_);
  answer.mutable_uptime()->set_seconds(uptime / 1'000'000'000);
  answer.mutable_uptime()->set_nanos(static_cast<int32_t>(uptime % 1'000'000'000));
  const int64_t wall = absl::ToUnixNanos(context_.clock.WallNow());
  answer.mutable_now()->set_seconds(wall / 1'000'000'000);
  answer.mutable_now()->set_nanos(static_cast<int32_t>(wall % 1'000'000'000));
  answer.set_kernels(context_.kernels.name);
  answer.set_listen(listen_address_);
  answer.set_draining(context_.draining);
  auto& counters = *answer.mutable_counters();
  for (const v1::JobStatus& job : answer.jobs()) {
    for (const auto& [name, value] : job.counters()) counters[name] += value;
  }
  counters["transfers_too_slow_total"] = context_.transfers_too_slow;
  reply(std::move(answer));
}

Watch Coordinator::WatchJob(v1::WatchJobRequest request, Subscriber<v1::WatchJobResponse> subscriber) {
  Watch watch;
  watch.state_ = std::make_shared<Watch::State>();
  watch.state_->loop = &context_.loop;
  OnLoop(
      [this, state = watch.state_, request = std::move(request), subscriber] {
        absl::StatusOr<Job*> job = FindJob(request.job());
        if (!job.ok()) return subscriber({}, job.status());
        const uint64_t id = (*job)->WatchJob(subscriber);
        if (state->cancelled) return (*job)->Unwatch(id);
        state->job = *job;
        state->id = id;
      },
      [subscriber](const absl::Status& why) { subscriber({}, why); });
  return watch;
}

// ------------------------------------------------------------------------------------------------------- time and end

MonotonicTime Coordinator::NextDeadline() {
  MonotonicTime next = MonotonicTime::InfiniteFuture();
  for (auto& [name, job] : jobs_) next = std::min(next, job->NextDeadline());
  if (!ended_ && (context_.draining || (options_.exit_when_done && !jobs_.empty()))) {
    next = std::min(next, next_ending_check_);
  }
  return next;
}

void Coordinator::OnDeadline(MonotonicTime now) {
  for (auto& [name, job] : jobs_) job->OnDeadline(now);
  if (!ended_ && now >= next_ending_check_) CheckEnding(now);
}

void Coordinator::CheckEnding(MonotonicTime now) {
  if (context_.draining) {
    next_ending_check_ = now + kDrainCheckPeriod;
    const bool drained =
        std::all_of(jobs_.begin(), jobs_.end(), [](const auto& entry) { return entry.second->Drained(); });
    if (!drained && now < drain_deadline_) return;
    Announcement line;
    line.text = drained ? "drained" : "the drain timeout ran out with a round open";
    line.level = drained ? Announcement::Level::kInfo : Announcement::Level::kWarning;
    context_.observer.OnAnnouncement(line);
    return End(Ending::kDrained);
  }
  next_ending_check_ = now + kDoneCheckPeriod;
  if (!options_.exit_when_done || jobs_.empty()) return;
  bool all_ended = true, any_failed = false, any_active = false;
  for (const auto& [name, job] : jobs_) {
    all_ended = all_ended && job->ended();
    any_failed = any_failed || job->state() == v1::JOB_STATE_FAILED;
    any_active = any_active || job->HasActiveWorkers();
  }
  if (!all_ended) {
    all_ended_since_.reset();
    return;
  }
  if (!all_ended_since_.has_value()) all_ended_since_ = now;
  if (any_active && now - *all_ended_since_ < kLeaveTime) return;
  End(any_failed ? Ending::kSomeFailed : Ending::kAllFinished);
}

void Coordinator::End(Ending ending) {
  ended_ = true;
  if (options_.on_ending) options_.on_ending(ending);
}

}  // namespace bmuf::coordinator
