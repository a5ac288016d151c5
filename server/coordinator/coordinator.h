// The coordinator without a wire: all jobs of a daemon, one thread that decides, callbacks that answer.
//
// Problem: hundreds of streams wait, push and pull at the same time; who waits must hold no thread, and one order of
// events must decide everything.
// Idea: every call posts to one loop and returns; its answer comes through a callback when it is known. Long work
// (verifying, folding, the outer update, encoding, the ledger) runs on an executor and comes back as an event.
// Usage:
//   Coordinator coordinator(parts, options);
//   coordinator.Join(request, [reactor](absl::StatusOr<v1::JoinResponse> answer) { ... });
//
// Answers come on the loop's thread, or on the caller's if the loop's queue is full (REASON_TOO_MANY); callbacks are
// called once, never under a lock, and must be short: hand over, do not work.
// Every call may answer DRAINING after Abandon.
#ifndef BMUF_SERVER_COORDINATOR_COORDINATOR_H_
#define BMUF_SERVER_COORDINATOR_COORDINATOR_H_

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "bmuf/v1/admin_service.pb.h"
#include "bmuf/v1/coordinator_service.pb.h"
#include "server/coordinator/job.h"
#include "server/coordinator/loop.h"
#include "server/coordinator/observer.h"
#include "server/coordinator/push.h"
#include "server/model/safetensors.h"

namespace bmuf::coordinator {

// The rules a job gets: what `config` sets, else what `defaults` set, else the documented defaults. Errors:
// REASON_INVALID_REQUEST naming the field.
absl::StatusOr<v1::JobConfig> ResolveJobConfig(const v1::JobConfig& defaults, const v1::JobConfig& config);

// A model to export, kept alive by whoever holds this.
struct ExportSource {
  std::shared_ptr<const SafetensorsView> file;
  ModelVersion version;
};

// Ends a subscription. Copyable; thread-safe.
class Watch {
 public:
  // The subscriber hears at most what is already on its way.
  void Cancel();

 private:
  friend class Coordinator;
  struct State {
    Loop* loop = nullptr;
    Job* job = nullptr;      // Loop's thread.
    uint64_t id = 0;         // Loop's thread.
    bool cancelled = false;  // Loop's thread.
  };
  std::shared_ptr<State> state_;
};

// Thread-safe but for what says otherwise.
class Coordinator : private TimerClient {
 public:
  // Everything outlives the coordinator.
  struct Parts {
    Loop& loop;
    Executor executor;
    ThreadPool& pool;
    const Kernels& kernels;
    MemoryBudget& budget;
    storage::Ledger& ledger;
    Epoch epoch;  // Raised from the ledger before anything is served.
    Observer& observer;
    Seams& seams;
    std::function<std::string()> random_token;
  };
  // Why the daemon may end.
  enum class Ending { kDrained, kAllFinished, kSomeFailed };
  struct Options {
    v1::JobConfig job_defaults;  // Not resolved: what jobs leave unset is taken from here first.
    absl::Duration drain_timeout = absl::Seconds(25);
    bool exit_when_done = false;
    std::string build;
    // Loop's thread, at most once; must not call back.
    std::function<void(Ending)> on_ending;
    // The same: a drain has begun.
    std::function<void()> on_draining;
  };

  Coordinator(Parts parts, Options options);
  // The loop must have stopped. Waits for work that the executor still has.
  ~Coordinator() override;
  Coordinator(const Coordinator&) = delete;

  // ---- Workers (coordinator_service.proto has the rules and errors of each).
  void Join(v1::JoinRequest request, Reply<v1::JoinResponse> reply);
  void Heartbeat(v1::HeartbeatRequest request, Reply<v1::HeartbeatResponse> reply);
  void Leave(v1::LeaveRequest request, Reply<v1::LeaveResponse> reply);
  void QueryPush(v1::QueryPushRequest request, Reply<v1::QueryPushResponse> reply);
  // The header of a push. The caller reads on when it is admitted, and stops when it is done.
  std::shared_ptr<Push> OpenPush(v1::PushHeader header, Push::Callbacks callbacks);
  Watch WatchRound(v1::WatchRoundRequest request, Subscriber<v1::WatchRoundResponse> subscriber);
  void OpenPull(v1::PullModelRequest request, Reply<PullSource> reply);

  // ---- Operators (admin_service.proto).
  void CreateJob(v1::CreateJobRequest request, Reply<v1::CreateJobResponse> reply);
  void GetJob(v1::GetJobRequest request, Reply<v1::GetJobResponse> reply);
  void ListJobs(v1::ListJobsRequest request, Reply<v1::ListJobsResponse> reply);
  void UpdateJob(v1::UpdateJobRequest request, Reply<v1::UpdateJobResponse> reply);
  void PauseJob(v1::PauseJobRequest request, Reply<v1::PauseJobResponse> reply);
  void ResumeJob(v1::ResumeJobRequest request, Reply<v1::ResumeJobResponse> reply);
  void ListRounds(v1::ListRoundsRequest request, Reply<v1::ListRoundsResponse> reply);
  void EvictWorker(v1::EvictWorkerRequest request, Reply<v1::EvictWorkerResponse> reply);
  void ReadmitWorker(v1::ReadmitWorkerRequest request, Reply<v1::ReadmitWorkerResponse> reply);
  void OpenExport(v1::ExportModelRequest request, Reply<ExportSource> reply);
  void Drain(v1::DrainRequest request, Reply<v1::DrainResponse> reply);
  void GetStatus(v1::GetStatusRequest request, Reply<v1::GetStatusResponse> reply);
  Watch WatchJob(v1::WatchJobRequest request, Subscriber<v1::WatchJobResponse> subscriber);

  // ---- The daemon.
  // Shown in GetStatus. Call before serving.
  void SetListenAddress(std::string address);
  // A transfer was ended because its reader made no progress.
  void CountSlowReader();
  // Ends every open call with DRAINING, and every later one at once. The loop must go on until the wire is closed.
  void Abandon();

 private:
  MonotonicTime NextDeadline() override;
  void OnDeadline(MonotonicTime now) override;

  // Runs `handle` on the loop unless everything is over; `refuse` gets the reason instead.
  void OnLoop(std::function<void()> handle, std::function<void(absl::Status)> refuse);
  template <typename Request, typename Response>
  void Handle(void (Coordinator::*handler)(Request, Reply<Response>), Request request, Reply<Response> reply);

  // Loop's thread.
  absl::StatusOr<Job*> FindJob(const std::string& name) const;
  absl::StatusOr<Job*> FindSession(const v1::Session& session) const;
  void DoJoin(v1::JoinRequest request, Reply<v1::JoinResponse> reply);
  void DoHeartbeat(v1::HeartbeatRequest request, Reply<v1::HeartbeatResponse> reply);
  void DoLeave(v1::LeaveRequest request, Reply<v1::LeaveResponse> reply);
  void DoQueryPush(v1::QueryPushRequest request, Reply<v1::QueryPushResponse> reply);
  void DoOpenPull(v1::PullModelRequest request, Reply<PullSource> reply);
  void DoCreateJob(v1::CreateJobRequest request, Reply<v1::CreateJobResponse> reply);
  void DoGetJob(v1::GetJobRequest request, Reply<v1::GetJobResponse> reply);
  void DoListJobs(v1::ListJobsRequest request, Reply<v1::ListJobsResponse> reply);
  void DoUpdateJob(v1::UpdateJobRequest request, Reply<v1::UpdateJobResponse> reply);
  void DoPauseJob(v1::PauseJobRequest request, Reply<v1::PauseJobResponse> reply);
  void DoResumeJob(v1::ResumeJobRequest request, Reply<v1::ResumeJobResponse> reply);
  void DoListRounds(v1::ListRoundsRequest request, Reply<v1::ListRoundsResponse> reply);
  void DoEvictWorker(v1::EvictWorkerRequest request, Reply<v1::EvictWorkerResponse> reply);
  void DoReadmitWorker(v1::ReadmitWorkerRequest request, Reply<v1::ReadmitWorkerResponse> reply);
  void DoOpenExport(v1::ExportModelRequest request, Reply<ExportSource> reply);
  void DoDrain(v1::DrainRequest request, Reply<v1::DrainResponse> reply);
  void DoGetStatus(v1::GetStatusRequest request, Reply<v1::GetStatusResponse> reply);
  absl::StatusOr<engine::RequestId> StartPush(const v1::PushHeader& header, const std::shared_ptr<Push>& push,
                                              Job** owner);
  void CheckEnding(MonotonicTime now);
  void End(Ending ending);

  JobContext context_;
  Options options_;
  const MonotonicTime started_;

  // Loop's thread.
  std::map<std::string, std::unique_ptr<Job>> jobs_;
  std::map<std::string, std::vector<std::function<void()>>> creating_;  // Name -> requests that wait for its outcome.
  std::string listen_address_;
  bool abandoned_ = false;
  bool ended_ = false;
  MonotonicTime drain_deadline_;
  std::optional<MonotonicTime> all_ended_since_;
  MonotonicTime next_ending_check_;

  absl::Mutex outstanding_mu_;
  int outstanding_ ABSL_GUARDED_BY(outstanding_mu_) = 0;  // Tasks that the executor has.
};

}  // namespace bmuf::coordinator

#endif  // BMUF_SERVER_COORDINATOR_COORDINATOR_H_
