// Everything the engine knows of one job. Only Stepper (stepper.h) changes it; Invariants and the status read it.
#ifndef BMUF_SERVER_ENGINE_STATE_H_
#define BMUF_SERVER_ENGINE_STATE_H_

#include <array>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>

#include "server/engine/durations.h"
#include "server/engine/engine.h"

namespace bmuf::engine {

// Norms from which the guard's median is taken, and how many it needs to say anything.
inline constexpr size_t kMaxNorms = 64;
inline constexpr size_t kLeastNorms = 8;
// Block times from which the adaptive soft deadline is taken: a few rounds of a large job, many of a small one.
inline constexpr size_t kMaxBlockTimes = 256;
inline constexpr size_t kLeastBlockTimes = 8;
// Contributions in all kept records: bounds the memory of limits::kMaxRoundRecords rounds of a large job.
inline constexpr size_t kMaxKeptContributions = 200'000;
// Processes that may take over one name within a minute; more are replicas that were given the same name.
inline constexpr size_t kMaxTakeoversPerMinute = 5;
// Former processes of a name that are recognised when they join once more.
inline constexpr size_t kMaxFormerInstances = 8;
// An open round says what it waits for this often.
inline constexpr absl::Duration kWatchdogPeriod = absl::Seconds(30);
// Changes of the barrier's reason are announced at most this often.
inline constexpr absl::Duration kReasonPeriod = absl::Seconds(1);

enum class Counter {
  kJoined,
  kExpired,
  kLeft,
  kReplaced,
  kEvicted,
  kPushAccepted,
  kPushDuplicate,
  kPushStale,
  kPushRejected,
  kPushRefused,
  kPushBroken,
  kPushCancelled,
  kNonFinite,
  kOutOfRange,
  kClipped,
  kCommitted,
  kRestarted,
  kExtended,
  kElected,
  kCount,
};
// As listed in engine.h.
const char* CounterName(Counter counter);

enum class WorkerState { kActive, kExpired, kLeft, kEvicted };

// A worker's part in the attempt.
enum class Seat {
  kNone,     // Not in this attempt: counts from the next round.
  kExcused,  // Has a place but is not waited for: its lease ran out, or what it sent was refused.
  kAwaited,  // Waited for.
  kFolding,  // Its delta is being added; cannot be undone.
  kFolded,   // Its delta is in. Stays so if the worker leaves or is replaced.
};

enum class Phase { kInitializing, kGathering, kCollecting, kCommitting, kEnded };

// A push whose payload is coming in or being verified.
struct OpenPush {
  RequestId request;
  v1::PayloadKind kind = v1::PAYLOAD_KIND_DELTA;
  v1::Codec codec = v1::CODEC_FP32;
  v1::BlockFacts facts;
  double weight = 1;
  uint64_t received_bytes = 0;
  uint64_t total_bytes = 0;

  bool whole() const { return total_bytes > 0 && received_bytes >= total_bytes; }
};

// A delta that is in the accumulator or on its way into it.
struct Delta {
  RequestId request;
  std::optional<RequestId> twin;  // A retry that waits for the same answer.
  v1::Contribution record;
  uint32_t trajectories = 1;
  absl::Duration took;  // From its seat in the attempt to here.
};

struct Worker {
  WorkerState state = WorkerState::kActive;
  Incarnation incarnation;
  std::string instance;
  std::string token;
  std::string client_info;
  uint32_t trajectories = 1;
  MonotonicTime last_seen;
  std::deque<std::string> former_instances;
  std::deque<MonotonicTime> takeovers;  // Of the last minute.
  uint64_t contributions = 0;
  uint64_t rejected = 0;
  uint64_t steps_done = 0;
  v1::BlockFacts last_block;
  std::optional<OpenPush> push;

  // The open attempt.
  Seat seat = Seat::kNone;
  uint32_t place = 0;             // Position among the expected, by name; later entrants follow.
  uint32_t first_trajectory = 0;  // Of this worker among all of the attempt's.
  MonotonicTime seated_at;
  std::optional<Delta> delta;  // Iff kFolding or kFolded.

  bool active() const { return state == WorkerState::kActive; }
};

// The initial model, handed over to be stored.
struct InitialModel {
  RequestId request;
  std::string worker;
  Incarnation incarnation;
  uint32_t digest = 0;
};

// What the job waits for, for people.
struct Situation {
  std::string reason;
  std::string gist;                                     // Without running times.
  absl::Duration time_left = absl::InfiniteDuration();  // To the next deadline.
};

struct Engine::State {
  std::string job;
  Epoch epoch;
  v1::JobConfig config;                      // In force.
  std::optional<v1::JobConfig> next_config;  // From the next round on.
  MonotonicTime ticked;                      // The last tick: deadlines are judged by it.

  std::map<std::string, Worker> workers;
  uint64_t last_incarnation = 0;  // Of any worker; also the order of joining.

  Phase phase = Phase::kInitializing;
  bool paused = false;
  std::string pause_reason;
  bool draining = false;
  v1::JobState ended_as = v1::JOB_STATE_UNSPECIFIED;  // FINISHED or FAILED in kEnded.
  std::string end_reason;

  // Round 0.
  std::string initializer;  // Empty: nobody to ask.
  Incarnation initializer_life;
  MonotonicTime elected_at;
  std::optional<InitialModel> storing;
  std::optional<InitialModel> stored;

  // The open round.
  RoundId round;
  uint32_t attempt = 1;
  uint32_t failed_attempts = 0;               // In a row, of this round.
  std::string restart_reason;                 // Of the newest attempt above 1.
  MonotonicTime opened;                       // The round.
  MonotonicTime started;                      // The attempt.
  MonotonicTime collect_from;                 // Zero of the barrier's deadlines: `started`, or the end of a pause.
  std::optional<MonotonicTime> enough_since;  // Gathering: since min_workers are present.
  absl::Duration extension;
  uint32_t extensions = 0;
  uint32_t places = 0;        // Given in the attempt.
  uint32_t trajectories = 0;  // Of all places.
  MonotonicTime last_fold;
  std::optional<v1::RoundRecord> committing;  // Iff kCommitting.

  bool has_model = false;
  ModelVersion version;
  uint32_t model_digest = 0;
  std::optional<double> auto_momentum;  // Resolved when round 1 first started.
  uint32_t auto_trajectories = 0;       // The N it was resolved with.
  std::optional<double> last_momentum;  // Of the last commit under block momentum.
  std::deque<v1::RoundRecord> records;  // Consecutive rounds, oldest first.
  size_t kept_contributions = 0;        // In `records`.
  uint64_t total_samples = 0;
  std::deque<double> norms;
  std::deque<absl::Duration> block_times;
  std::optional<absl::Duration> block_time_p95;

  std::array<uint64_t, static_cast<size_t>(Counter::kCount)> counters{};
  std::string shown_gist;  // Watchers know of it.
  std::string announced_gist;
  MonotonicTime announced_at;
  MonotonicTime watchdog_from;

  // status.cc
  v1::JobState job_state() const;
  size_t ActiveWorkers() const;
  size_t InflightPushes() const;  // Staging slots in use.
  BarrierInput BarrierInputAt(absl::Duration elapsed) const;
  BarrierDecision DecideAt(absl::Duration elapsed) const;
  absl::Duration JudgedElapsed() const;  // Of the collecting attempt, by the last tick.
  Situation SituationAt(MonotonicTime now) const;
  bool WatchdogRuns() const;
  void FillRound(MonotonicTime now, v1::RoundStatus* status) const;
  std::optional<double> MomentumInForce() const;
  const v1::RoundRecord* RecordOf(RoundId round) const;  // Null if not kept.

  // membership.cc
  absl::Status CheckSession(const WorkerKey& who, const std::string& token) const;
  bool IsInitializer(const std::string& name, const Worker& worker) const;
  // Whether time alone can expire `worker`.
  bool LeaseRuns(const Worker& worker) const;
};

}  // namespace bmuf::engine

#endif  // BMUF_SERVER_ENGINE_STATE_H_
