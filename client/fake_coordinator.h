// A coordinator for tests of the clients: one job, in process, over a real socket, with faults on demand.
//
// Problem: what a client does about a broken push or a restarted coordinator shows only against one that breaks.
// Idea: a small CoordinatorService that keeps the protocol for a job of one contributor (a round commits when one delta
// is in; version = base + delta) and a table of faults that tests switch on. It shares no code with the daemon, so that
// a misreading of the protocol does not cancel out.
#ifndef BMUF_CLIENT_FAKE_COORDINATOR_H_
#define BMUF_CLIENT_FAKE_COORDINATOR_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "bmuf/v1/coordinator_service.grpc.pb.h"
#include "core/layout/layout.h"
#include "grpcpp/grpcpp.h"

namespace bmuf::client {

// What to do wrong. Counts are used up one by one.
struct Faults {
  std::vector<absl::Status> join;        // Answers of the next Joins.
  std::vector<absl::Status> push;        // Answers of the next pushes, on their header.
  std::vector<absl::Status> heartbeat;   // Answers of the next heartbeats.
  int broken_pushes = 0;                 // End with UNAVAILABLE after the first chunk, which is kept.
  int broken_pulls = 0;                  // End with UNAVAILABLE after the first chunk.
  bool other_version_on_resume = false;  // A resumed pull is answered with another version's header.
  bool wrong_payload_digest = false;
  bool nan_in_broadcast = false;
  bool nan_in_auxiliary = false;
  uint64_t pull_epoch = 0;  // If set, what PullHeader says.
  bool silent = false;      // Unary calls of members hang until they are cancelled.
  bool hold_pulls = false;  // Pulls wait until this is false.
  int no_model_pulls = 0;   // As a coordinator that lost its model answers.
};

// What was asked of it, in order of arrival.
struct Seen {
  std::vector<v1::JoinRequest> joins;
  std::vector<v1::PushHeader> pushes;
  std::vector<v1::PullModelRequest> pulls;
  std::vector<std::string> initial_models;  // Payloads.
  std::vector<uint64_t> folded_rounds;
  int heartbeats = 0;
  int leaves = 0;
  uint64_t payload_bytes = 0;  // Of all chunks of all pushes.
};

// Thread-safe.
class FakeCoordinator final : public v1::CoordinatorService::Service {
 public:
  explicit FakeCoordinator(uint64_t epoch, v1::JobConfig config = {}) : epoch_(epoch), config_(std::move(config)) {}

  // Runs `change` on the faults, and wakes who waits for them.
  void Set(const std::function<void(Faults&)>& change) ABSL_LOCKS_EXCLUDED(mu_);
  Seen seen() const ABSL_LOCKS_EXCLUDED(mu_);
  // Blocks until `reached` holds of what was seen; false after 10 s.
  bool Await(const std::function<bool(const Seen&)>& reached) ABSL_LOCKS_EXCLUDED(mu_);

  // Somebody else's model: the caller need not bring one. The payload is of the manifest's FP32 layout.
  void Publish(uint64_t version, std::string payload) ABSL_LOCKS_EXCLUDED(mu_);
  // Goes on from another coordinator's model, as a restart over a kept state does.
  void ContinueFrom(const FakeCoordinator& former) ABSL_LOCKS_EXCLUDED(mu_);
  // Answers accepted deltas without committing while true.
  void HoldCommits(bool hold) ABSL_LOCKS_EXCLUDED(mu_);
  // The attempt failed: the delta is gone and the round gathers until StartRound.
  void FailAttempt() ABSL_LOCKS_EXCLUDED(mu_);
  void StartRound() ABSL_LOCKS_EXCLUDED(mu_);
  // Commits the open round without the caller, `count` times.
  void CommitWithout(int count) ABSL_LOCKS_EXCLUDED(mu_);
  // Forgets all sessions, as when a lease ran out.
  void ForgetSessions() ABSL_LOCKS_EXCLUDED(mu_);
  void Finish() ABSL_LOCKS_EXCLUDED(mu_);
  // Whether joiners without a model are elected at Join (default) or only told so by a heartbeat later.
  void ElectAtJoin(bool at_join) ABSL_LOCKS_EXCLUDED(mu_);
  void ElectNow() ABSL_LOCKS_EXCLUDED(mu_);

  uint64_t version() const ABSL_LOCKS_EXCLUDED(mu_);
  std::string payload() const ABSL_LOCKS_EXCLUDED(mu_);

  grpc::Status Join(grpc::ServerContext*, const v1::JoinRequest*, v1::JoinResponse*) override;
  grpc::Status Heartbeat(grpc::ServerContext*, const v1::HeartbeatRequest*, v1::HeartbeatResponse*) override;
  grpc::Status PushDelta(grpc::ServerContext*, grpc::ServerReader<v1::PushDeltaRequest>*,
                         v1::PushDeltaResponse*) override;
  grpc::Status QueryPush(grpc::ServerContext*, const v1::QueryPushRequest*, v1::QueryPushResponse*) override;
  grpc::Status WatchRound(grpc::ServerContext*, const v1::WatchRoundRequest*,
                          grpc::ServerWriter<v1::WatchRoundResponse>*) override;
  grpc::Status PullModel(grpc::ServerContext*, const v1::PullModelRequest*,
                         grpc::ServerWriter<v1::PullModelResponse>*) override;
  grpc::Status Leave(grpc::ServerContext*, const v1::LeaveRequest*, v1::LeaveResponse*) override;

 private:
  absl::Status Check(const v1::Session& session) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status Admit(const v1::PushHeader& header) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status TakeChunk(const v1::PushHeader& header, const v1::Chunk& chunk) ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status Fold(const v1::PushHeader& header) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Commit(std::string next) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void MaybeCommit() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Waits for `condition`, at most until the caller has gone.
  template <typename Condition>
  bool AwaitOrGone(grpc::ServerContext* context, Condition condition) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const uint64_t epoch_;
  const v1::JobConfig config_;

  mutable absl::Mutex mu_;
  Faults faults_ ABSL_GUARDED_BY(mu_);
  Seen seen_ ABSL_GUARDED_BY(mu_);
  std::shared_ptr<const Layout> layout_ ABSL_GUARDED_BY(mu_);
  std::string instance_ ABSL_GUARDED_BY(mu_);
  v1::Session session_ ABSL_GUARDED_BY(mu_);
  uint64_t tokens_ ABSL_GUARDED_BY(mu_) = 0;
  bool elected_ ABSL_GUARDED_BY(mu_) = true;
  bool has_model_ ABSL_GUARDED_BY(mu_) = false;
  uint64_t version_ ABSL_GUARDED_BY(mu_) = 0;
  std::string model_ ABSL_GUARDED_BY(mu_);
  uint32_t attempt_ ABSL_GUARDED_BY(mu_) = 1;
  bool collecting_ ABSL_GUARDED_BY(mu_) = true;
  bool hold_commits_ ABSL_GUARDED_BY(mu_) = false;
  bool finished_ ABSL_GUARDED_BY(mu_) = false;
  std::string kept_ ABSL_GUARDED_BY(mu_);    // Bytes of the push in progress.
  std::string folded_ ABSL_GUARDED_BY(mu_);  // Payload of the delta that is in.
  uint32_t folded_digest_ ABSL_GUARDED_BY(mu_) = 0;
  v1::Codec folded_codec_ ABSL_GUARDED_BY(mu_) = v1::CODEC_UNSPECIFIED;
};

// An address that outlives the servers on it: a Unix socket in a folder of its own. Confined to one thread.
class FakeServer {
 public:
  FakeServer();
  ~FakeServer();
  FakeServer(const FakeServer&) = delete;
  FakeServer& operator=(const FakeServer&) = delete;

  std::string target() const { return "unix:" + folder_ + "/s"; }
  // Requires that none is running. `service` must live until Stop.
  void Start(FakeCoordinator* service);
  // As a killed process: connections break.
  void Stop();

 private:
  std::string folder_;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace bmuf::client

#endif  // BMUF_CLIENT_FAKE_COORDINATOR_H_
