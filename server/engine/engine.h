// The decisions of one job: who is a member, which round is open, when it closes, what each request is answered.
//
// Problem: membership, leases, barriers, retries and operators' commands interleave in every order, for weeks, and each
// order must lead to one explainable state.
// Idea: a pure state machine. Step(now, event) -> effects, performed in order by the caller. No thread, lock, socket,
// file, clock, log or random number in here; bulk bytes never enter: the engine sees names, sizes, digests, weights.
// The same events at the same times give the same effects, so a transcript is a test and a log can be replayed.
// Usage:
//   Engine engine(name, epoch, config, now);
//   for (const Effect& effect : engine.Step(clock.Now(), HeartbeatEvent{...})) Perform(effect);
//   timer.Set(engine.NextDeadline());   // then Step(now, TickEvent{})
//
// Time. Leases, deadlines and time-outs are judged by TickEvent alone, never by another event that happens to come
// late. So after a pause of the process nobody is expired whose heartbeat is already waiting in the caller's queue,
// provided the caller handles every event that is queued before it handles a tick. That order is the caller's duty.
//
// Counters (FillStatus puts them into JobStatus.counters, all of them from the start):
//   workers_joined_total         new incarnations given out
//   workers_expired_total        leases that ran out
//   workers_left_total           Leave accepted
//   workers_replaced_total       a new process took over the name of one that had not left
//   workers_evicted_total        removed by an operator
//   pushes_accepted_total        deltas folded
//   pushes_duplicate_total       answered DUPLICATE
//   pushes_stale_total           refused with STALE_ROUND, before or after their payload
//   pushes_rejected_total        refused for their content (also counted per worker)
//   pushes_refused_total         refused at their header for any other reason than STALE_ROUND
//   pushes_broken_total          ended without becoming whole, not for their content
//   pushes_cancelled_total       ended by the coordinator
//   deltas_non_finite_total      of the rejected: NaN or infinity
//   deltas_out_of_range_total    of the rejected: norm guard or exact range
//   deltas_clipped_total         scaled down by the norm guard
//   rounds_committed_total       commits
//   rounds_restarted_total       attempts that ended without a commit
//   rounds_extended_total        hard deadlines moved by ON_TIMEOUT_EXTEND
//   initializers_elected_total   workers asked for the initial model
#ifndef BMUF_SERVER_ENGINE_ENGINE_H_
#define BMUF_SERVER_ENGINE_ENGINE_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "bmuf/v1/admin_service.pb.h"
#include "bmuf/v1/coordinator_service.pb.h"
#include "bmuf/v1/types.pb.h"
#include "core/base/clock.h"
#include "core/base/ids.h"

namespace bmuf::engine {

// Names the request that an effect answers; chosen by the caller, unique while the request is open.
using RequestId = StrongId<struct RequestTag>;

// One life of a worker.
struct WorkerKey {
  std::string worker;
  Incarnation incarnation;
};

// ---------------------------------------------------------------------------------------------------------- events

struct JoinEvent {
  RequestId request;
  std::string worker;       // Validated name.
  std::string instance;     // Nonce of the process.
  std::string token;        // Random session token to hand out if this becomes a new incarnation.
  std::string client_info;  // Escaped.
  uint32_t trajectories = 1;
};
struct HeartbeatEvent {
  RequestId request;
  WorkerKey who;
  std::string token;
  uint64_t steps_done = 0;
};
// A call that only reads (WatchRound, PullModel) was accepted for this session: renews its lease. Not answered.
struct SignOfLifeEvent {
  WorkerKey who;
  std::string token;
};
struct LeaveEvent {
  RequestId request;
  WorkerKey who;
  std::string token;
  std::string reason;
};
// The header of a push arrived; nothing else of it was read.
struct PushOpenedEvent {
  RequestId request;
  WorkerKey who;
  std::string token;
  v1::PayloadKind kind = v1::PAYLOAD_KIND_DELTA;
  RoundId round;
  ModelVersion base_version;
  uint32_t base_digest = 0;
  v1::Codec codec = v1::CODEC_FP32;
  uint64_t total_bytes = 0;
  std::optional<uint32_t> digest;
  v1::BlockFacts facts;
};
// How far an admitted push is; for display, and a sign of life. A push whose bytes are all here (received_bytes = its
// total_bytes) waits for the coordinator, not for its worker: it keeps the lease until it is verified.
struct PushProgressEvent {
  RequestId request;
  uint64_t received_bytes = 0;
};
// All bytes of an admitted push are there and passed every check of their content.
struct PushVerifiedEvent {
  RequestId request;
  uint32_t digest = 0;
  double norm = 0;     // L2 of the decoded delta.
  double max_abs = 0;  // Largest magnitude of the decoded delta.
};
// An admitted push ended without becoming whole (broken stream, too slow) or its content was refused.
struct PushFailedEvent {
  RequestId request;
  absl::Status status;         // What the worker is told.
  bool content_fault = false;  // Its content was refused (counted against the worker), not the connection's fault.
};
// A Fold effect was performed.
struct FoldedEvent {
  RequestId request;
};
// A Fold effect was refused: the sum would leave the exact range. The accumulator is unchanged.
struct FoldRefusedEvent {
  RequestId request;
  absl::Status status;
};
// The initial model (StoreInitialModel) is version 0 now.
struct InitialModelStoredEvent {
  RequestId request;  // The push that carried it, or 0 if it came from a file.
  uint32_t model_digest = 0;
};
struct InitialModelFailedEvent {
  RequestId request;
  absl::Status status;
};
// A Commit effect was performed: durable and published.
struct CommittedEvent {
  RoundId round;
  uint32_t model_digest = 0;
  double mean_norm = 0;
  absl::Time wall_time;  // For the record only.
};
// A Commit effect failed without a change of state (for instance a non-finite result).
struct CommitFailedEvent {
  RoundId round;
  std::string reason;
};
struct TickEvent {};
struct UpdateConfigEvent {
  RequestId request;
  v1::JobConfig config;  // Whole, resolved and validated (ValidateConfig); takes effect at the next round.
};
struct PauseEvent {
  RequestId request;
  std::string reason;
};
struct ResumeEvent {
  RequestId request;
};
struct EvictEvent {
  RequestId request;
  std::string worker;
};
struct ReadmitEvent {
  RequestId request;
  std::string worker;
};
// No new members or rounds; the open round ends by commit or deadline.
struct DrainEvent {};

using Event = std::variant<JoinEvent, HeartbeatEvent, LeaveEvent, PushOpenedEvent, PushProgressEvent, PushVerifiedEvent,
                           PushFailedEvent, FoldedEvent, FoldRefusedEvent, InitialModelStoredEvent,
                           InitialModelFailedEvent, CommittedEvent, CommitFailedEvent, TickEvent, UpdateConfigEvent,
                           PauseEvent, ResumeEvent, EvictEvent, ReadmitEvent, DrainEvent, SignOfLifeEvent>;

// --------------------------------------------------------------------------------------------------------- effects

// Answers a Join. The engine fills everything it knows; the caller adds protocol and chunk size.
struct ReplyJoin {
  RequestId request;
  absl::StatusOr<v1::JoinResponse> answer;
};
struct ReplyHeartbeat {
  RequestId request;
  absl::StatusOr<v1::HeartbeatResponse> answer;
};
// Answers Leave and the operators' requests.
struct ReplyStatus {
  RequestId request;
  absl::Status status;
};
// The push may send its payload. `weight` is what its delta will count.
struct AdmitPush {
  RequestId request;
  double weight = 1;
};
// Ends a push: the final answer. Its staging, if any, is released unless `keep_staging`. The stream may be gone already
// (a delta that is being folded when its connection breaks still counts); then the answer has no addressee.
struct ReplyPush {
  RequestId request;
  absl::StatusOr<v1::PushDeltaResponse> answer;
  // The connection broke while the round is still open for this worker: what arrived may be resumed (QueryPush).
  bool keep_staging = false;
};
// Ends the push that is open, if it still is, because its worker or round is gone. Its staging is released. No
// ReplyPush follows, and the caller sends no more events of this request (they are ignored).
struct CancelPush {
  RequestId request;
  absl::Status status;
};
// Adds the staged delta of `request` to the round's accumulator: weight * scale * delta. Irrevocable within the
// attempt.
struct Fold {
  RequestId request;
  RoundId round;
  uint32_t attempt = 1;
  uint32_t rank = 0;  // Position among the expected workers; decides role FIRST.
  double weight = 1;
  double scale = 1;  // Below 1 if the norm guard clips.
};
// Makes the staged payload of `request` version 0.
struct StoreInitialModel {
  RequestId request;
};
// A round (or a new attempt of it) starts: empty accumulator.
struct BeginAttempt {
  RoundId round;
  uint32_t attempt = 1;
};
// Compute the outer update from the accumulator, make it durable, publish it, then report CommittedEvent.
struct Commit {
  // Complete but for model_digest, mean_norm, commit_time and committed_at.
  v1::RoundRecord record;
  v1::OuterOptimizer outer;         // Resolved rule of this round; variant AVERAGING in warm-up rounds.
  uint32_t trajectories_total = 0;  // N of the CNTK rules.
};
// Something a watcher would want to see changed.
struct NotifyWatchers {};
// The barrier's reason changed (for the log), or something a person should know happened.
struct Announce {
  enum class Level { kInfo, kWarning };
  Level level = Level::kInfo;
  std::string text;
  std::string worker;  // May be empty.
};
// The job is FINISHED or FAILED.
struct JobEnded {
  v1::JobState state;
  std::string reason;
};

using Effect = std::variant<ReplyJoin, ReplyHeartbeat, ReplyStatus, AdmitPush, ReplyPush, CancelPush, Fold,
                            StoreInitialModel, BeginAttempt, Commit, NotifyWatchers, Announce, JobEnded>;
using Effects = std::vector<Effect>;

// --------------------------------------------------------------------------------------------------------- barrier

// What the barrier is asked; plain values, so that it can be tested as a table.
struct BarrierInput {
  uint32_t have = 0;                 // Folded.
  uint32_t folding = 0;              // Irrevocably being folded: a commit waits for them.
  uint32_t uploading = 0;            // Admitted, bytes coming in.
  uint32_t expected = 0;             // Still expected, including have, folding and uploading.
  std::vector<std::string> awaited;  // Names of the expected that are not folded, by name.
  absl::Duration elapsed;            // Since collecting started.
  absl::Duration extension;          // Added to the hard deadline so far.
  uint32_t extensions = 0;
  std::optional<absl::Duration> adaptive_soft;  // From observed block times.
};
struct BarrierDecision {
  enum class Kind { kWait, kCommit, kExtend, kFailAttempt, kRegather };
  Kind kind = Kind::kWait;
  std::string reason;  // One sentence for people: what is waited for, until when, what happens then.
  std::string gist;    // The reason without running times: changes only when the situation does.
  absl::Duration next_deadline = absl::InfiniteDuration();  // Since collecting started: when to ask again.
};
// quorum = max(min_workers, ceil(min_fraction * expected)).
uint32_t Quorum(const v1::BarrierPolicy& policy, uint32_t expected);
BarrierDecision DecideBarrier(const BarrierInput& input, const v1::BarrierPolicy& policy);

// ---------------------------------------------------------------------------------------------------------- config

// `config` with every unset field at its documented default. Errors: REASON_INVALID_REQUEST naming the field.
absl::StatusOr<v1::JobConfig> ResolveConfig(const v1::JobConfig& config);
// `current` with the set fields of `changes`. Errors: INVALID_REQUEST; WRONG_STATE for a field fixed at creation
// (variant, momentum policy, pull codec, warm-up, durability, expected trajectories, seed) if `has_model`.
absl::StatusOr<v1::JobConfig> ApplyChanges(const v1::JobConfig& current, const v1::JobConfig& changes, bool has_model);

// ---------------------------------------------------------------------------------------------------------- engine

// What a WatchRound stream has already told its client.
struct WatchCursor {
  RoundId round;
  WorkerKey who;
  uint32_t attempt_seen = 0;     // Newest attempt the client knows of; 0: none.
  uint32_t attempt_started = 0;  // Newest attempt for which `started` was sent.
  std::string waiting_sent;      // Serialized last `waiting`, without its running times.
  bool done = false;             // A final event was sent.
};

class Invariants;

// Confined to one thread. Copyable state lives inside; nothing outside holds a reference to it.
class Engine {
 public:
  // A new job without a model. `config` is resolved (ResolveConfig). Incarnations come from one counter of the job that
  // only rises, so that a name that was forgotten and comes back gets a higher one than it ever had.
  Engine(std::string job, Epoch epoch, v1::JobConfig config, MonotonicTime now);
  ~Engine();
  Engine(Engine&&) noexcept;

  // Handles one event; the only way state changes. Never fails: refusals are effects. Effects are to be performed in
  // order. Requires `now` not before the `now` of the step before. Events of requests and rounds that are over are
  // ignored.
  Effects Step(MonotonicTime now, const Event& event);

  // When TickEvent is due; InfiniteFuture if nothing is timed.
  MonotonicTime NextDeadline() const;

  // Whether `who` with `token` is a current session; else the typed error a call of it gets. For calls that only read.
  absl::Status CheckSession(const WorkerKey& who, const std::string& token) const;

  // The next events for a watcher, in order; updates the cursor. Empty if there is nothing new.
  std::vector<v1::WatchRoundResponse> NextWatchEvents(MonotonicTime now, WatchCursor& cursor) const;

  // Fills state, round, workers, counters, last commit. `wall_now` is used for displayed deadlines only.
  void FillStatus(MonotonicTime now, absl::Time wall_now, v1::JobStatus* status) const;

  // The newest rules: those of the next round. The open round ends under the rules it started with.
  const v1::JobConfig& config() const;
  v1::JobState state() const;
  std::string state_reason() const;
  RoundId round() const;
  bool has_model() const;
  ModelVersion version() const;
  uint32_t model_digest() const;
  // Newest first, rounds below `before` (0: all), at most `limit`.
  std::vector<v1::RoundRecord> Records(uint64_t before, size_t limit) const;
  // No push is open and no round is committing (a drain is complete when additionally no round is collecting).
  bool Idle() const;

  // A text of the whole state with every field, for transcripts and state comparison.
  std::string DebugString() const;

  // Defined inside the package only.
  struct State;

 private:
  friend class Invariants;
  std::unique_ptr<State> state_;
};

// Truths about the state that hold after every event; a violation is a fault of this code, never of a peer.
class Invariants {
 public:
  // Checks `engine` against what was seen before; returns the first violated truth by name, or OK.
  absl::Status Check(const Engine& engine);

 private:
  uint64_t last_round_ = 0;
  uint64_t last_version_ = 0;
  bool had_model_ = false;
  std::map<std::string, uint64_t> highest_incarnation_;
};

}  // namespace bmuf::engine

#endif  // BMUF_SERVER_ENGINE_ENGINE_H_
