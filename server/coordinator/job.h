// One job in motion: its engine, its numbers, its open requests. The engine decides; this performs, in order.
#ifndef BMUF_SERVER_COORDINATOR_JOB_H_
#define BMUF_SERVER_COORDINATOR_JOB_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "bmuf/v1/admin_service.pb.h"
#include "bmuf/v1/coordinator_service.pb.h"
#include "bmuf/v1/types.pb.h"
#include "core/base/clock.h"
#include "core/base/ids.h"
#include "core/base/thread_pool.h"
#include "core/kernels/kernels.h"
#include "server/coordinator/loop.h"
#include "server/coordinator/observer.h"
#include "server/coordinator/push.h"
#include "server/coordinator/strand.h"
#include "server/engine/engine.h"
#include "server/model/job_model.h"
#include "server/model/memory_budget.h"
#include "server/model/version.h"
#include "server/storage/ledger.h"

namespace bmuf::coordinator {

// Called exactly once, on the loop's thread; must be short.
template <typename T>
using Reply = std::function<void(absl::StatusOr<T>)>;
using StatusReply = std::function<void(absl::Status)>;
// News for a stream of events; `end` is set with the last call.
template <typename Event>
using Subscriber = std::function<void(std::vector<Event> events, std::optional<absl::Status> end)>;

// A version to read from, kept alive by whoever holds this.
struct PullSource {
  v1::PullHeader header;
  std::shared_ptr<const Version> version;
  PayloadView payload;
  uint64_t offset = 0;  // The range asked for, cut to the payload.
  uint64_t length = 0;
};

// What all jobs of a daemon share. Everything outlives the jobs.
struct JobContext {
  Loop& loop;
  const Clock& clock;
  Executor executor;  // For long work.
  ThreadPool& pool;   // For splitting one long piece of it.
  const Kernels& kernels;
  MemoryBudget& budget;
  storage::Ledger& ledger;
  Epoch epoch;
  Observer& observer;
  Seams& seams;
  std::function<std::string()> random_token;  // Unguessable.

  // Confined to the loop's thread.
  bool draining = false;
  uint64_t transfers_too_slow = 0;
  uint64_t watchers = 0;
};

// Confined to the loop's thread, but for what it hands to its strand.
class Job {
 public:
  // `config` is resolved.
  Job(JobContext& context, std::string name, v1::JobConfig config);
  ~Job();
  Job(const Job&) = delete;

  const std::string& name() const { return name_; }
  // As it was created.
  const v1::JobConfig& created_config() const { return created_config_; }

  // ---- Workers. The caller has checked names, protocol and epoch.
  void Join(v1::JoinRequest request, Reply<v1::JoinResponse> reply);
  void Heartbeat(const v1::HeartbeatRequest& request, Reply<v1::HeartbeatResponse> reply);
  void Leave(const v1::LeaveRequest& request, Reply<v1::LeaveResponse> reply);
  void QueryPush(const v1::QueryPushRequest& request, Reply<v1::QueryPushResponse> reply);
  void OpenPull(const v1::PullModelRequest& request, Reply<PullSource> reply);
  // The push is this job's from now on: it will be answered. Returns the name under which its end is reported.
  engine::RequestId OpenPush(const v1::PushHeader& header, std::shared_ptr<Push> push);
  void OnPushEnded(engine::RequestId id, Push::Ending ending);
  // 0 if it has ended already.
  uint64_t WatchRound(const v1::WatchRoundRequest& request, Subscriber<v1::WatchRoundResponse> subscriber);
  uint64_t WatchJob(Subscriber<v1::WatchJobResponse> subscriber);
  // No further call of the subscriber. Unknown ids are ignored.
  void Unwatch(uint64_t id);

  // ---- Operators.
  v1::Job Describe() const;
  v1::JobStatus Status() const;
  std::vector<v1::RoundRecord> Records(uint64_t before, size_t limit) const { return engine_.Records(before, limit); }
  void Update(const v1::JobConfig& changes, Reply<v1::UpdateJobResponse> reply);
  void Pause(const std::string& reason, StatusReply reply);
  void Resume(StatusReply reply);
  void Evict(const std::string& worker, StatusReply reply);
  void Readmit(const std::string& worker, StatusReply reply);
  absl::StatusOr<std::shared_ptr<const Version>> FindVersion(std::optional<ModelVersion> version) const;

  // ---- Time and end.
  MonotonicTime NextDeadline();
  void OnDeadline(MonotonicTime now);
  void Drain();
  // Draining: nothing is open that a drain waits for.
  bool Drained() const;
  bool ended() const { return engine_.state() == v1::JOB_STATE_FINISHED || engine_.state() == v1::JOB_STATE_FAILED; }
  v1::JobState state() const { return engine_.state(); }
  bool HasActiveWorkers() const;
  // Answers everything that is open with `why`.
  void Abandon(const absl::Status& why);

 private:
  struct OpenPushState {
    std::shared_ptr<Push> push;
    v1::PushHeader header;
    std::shared_ptr<Staging> staging;  // Since its admission; the stream may write to it until the push ended.
    bool ended = false;                // All bytes are here: time no longer runs against it.
    bool resumable = false;
    Verified verified;
    // The progress rule: at each end of a window enough must have come since its begin.
    MonotonicTime window_start;
    uint64_t window_bytes = 0;
    uint64_t reported_bytes = 0;
  };
  // What is left of a push whose connection broke.
  struct Kept {
    std::string worker;
    Incarnation incarnation;
    RoundId round;
    std::shared_ptr<Staging> staging;
  };
  struct RoundWatch {
    engine::WatchCursor cursor;
    std::string token;
    Subscriber<v1::WatchRoundResponse> subscriber;
    MonotonicTime waiting_after;  // No `waiting` before this.
  };
  struct PendingJoin {
    v1::JoinRequest request;
    Reply<v1::JoinResponse> reply;
  };

  engine::RequestId NextRequest() { return engine::RequestId(++last_request_); }
  void Dispatch(engine::Event event);
  void Conclude();  // After a run of events.
  void Announce(Announcement::Level level, const std::string& worker, const std::string& text);

  // Effects.
  void Perform(engine::ReplyJoin& e);
  void Perform(engine::ReplyHeartbeat& e);
  void Perform(engine::ReplyStatus& e);
  void Perform(engine::AdmitPush& e);
  void Perform(engine::ReplyPush& e);
  void Perform(engine::CancelPush& e);
  void Perform(engine::Fold& e);
  void Perform(engine::StoreInitialModel& e);
  void Perform(engine::BeginAttempt& e);
  void Perform(engine::Commit& e);
  void Perform(engine::NotifyWatchers& e);
  void Perform(engine::Announce& e);
  void Perform(engine::JobEnded& e);

  // Joins and the manifest.
  void HandleJoins();
  void StepJoin(PendingJoin join);
  void MakeModel(const v1::Manifest& manifest);

  // Pushes.
  absl::Status Admit(engine::RequestId id, OpenPushState& open);
  void FinishPush(engine::RequestId id, absl::StatusOr<v1::PushDeltaResponse> answer, bool keep_staging);
  void CheckProgress(MonotonicTime now);
  const Kept* FindKept(const v1::Session& session, uint64_t round) const;
  void DropKept(const v1::Session& session);
  // Whether the worker's delta of `round` is in the sum or in a commit.
  bool Received(const v1::Session& session, uint64_t round) const;

  // The one way to a new version: computed, durable, published, acknowledged. Runs on the strand.
  void CommitRound(const std::shared_ptr<JobModel>& model, v1::RoundRecord record, const v1::OuterOptimizer& outer,
                   uint32_t trajectories);

  void NextUpdate();

  // Watchers.
  void Flush(MonotonicTime now);
  // True if the watch goes on.
  bool Tell(MonotonicTime now, RoundWatch& watch);

  JobContext& context_;
  const std::string name_;
  const v1::JobConfig created_config_;
  engine::Engine engine_;
  const std::shared_ptr<Strand> strand_;
  std::shared_ptr<JobModel> model_;  // Null before a worker brought a manifest. Its long calls run on strand_.
  bool making_model_ = false;
  bool had_member_ = false;  // Somebody joined under model_'s manifest.
  MemoryBudget::Reservation more_slots_;
  uint64_t slots_bytes_ = 0;  // Reserved for staging in all.
  std::deque<PendingJoin> pending_joins_;
  std::deque<std::function<void()>> updates_;  // The first one runs.

  uint64_t last_request_ = 0;
  std::deque<engine::Event> events_;
  bool dispatching_ = false;
  std::map<engine::RequestId, Reply<v1::JoinResponse>> joins_;
  std::map<engine::RequestId, Reply<v1::HeartbeatResponse>> heartbeats_;
  std::map<engine::RequestId, StatusReply> statuses_;
  std::map<engine::RequestId, OpenPushState> pushes_;
  std::deque<Kept> kept_;  // Oldest first.
  MonotonicTime next_progress_check_;

  std::map<uint64_t, RoundWatch> round_watches_;
  std::map<uint64_t, Subscriber<v1::WatchJobResponse>> job_watches_;
  uint64_t last_watch_ = 0;
  bool changed_ = false;  // Since the last Flush.
  bool urgent_ = false;   // And it cannot wait.
  MonotonicTime next_flush_;
  MonotonicTime next_job_flush_;

  std::optional<MonotonicTime> engine_deadline_;  // Cached.
};

}  // namespace bmuf::coordinator

#endif  // BMUF_SERVER_COORDINATOR_JOB_H_
