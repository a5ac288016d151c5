// The life of one worker as decisions, without a network, a thread or a clock.
//
// Problem: join, warm-up, training, exchange, late answers, a coordinator that restarts and SIGTERM meet in any order;
// written into the calls themselves, no test reaches the combinations.
// Idea: a state machine. `Step` takes what happened and says what to do next. The caller does it, in order; the last
// action of an answer leads to the next event. An empty answer means: go on with what you are doing.
//
//   Start -> Join -> Joined -+-> [TrainWarmup ->] UploadInitial -> AwaitRound(0) -> Committed -> ...
//                            +-> AwaitRound -> RoundStarted -> [Pull ->] Train -> Push -> AwaitCommit -> Committed
//                                    ^                                                                     |
//                                    +---------------- [Evaluate <-] Pulled <- Pull [, ResetInner] <-------+
//
// Usage:  BlockLoop loop(options);
//         for (auto actions = loop.Step(Start{}); !loop.done();) actions = loop.Step(Perform(actions));
#ifndef BMUF_WORKER_BLOCK_LOOP_H_
#define BMUF_WORKER_BLOCK_LOOP_H_

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

namespace bmuf::worker {

// --- What happened. Names of fields as in proto/bmuf/v1/coordinator_service.proto. ---

struct Start {};
// The first Join, or a new one after the coordinator restarted.
struct Joined {
  uint64_t round = 0;  // To watch next; 0 while there is no model.
  bool need_initial_model = false;
  uint32_t warmup_steps = 0;
  uint64_t max_rounds = 0;  // 0: no end.
  bool reset_inner_state = true;
  uint64_t seed = 0;  // Of the sample stream.
};
// While the initial model is awaited: the former initialiser is gone, this worker is the next.
struct Elected {};
struct WarmedUp {};
struct InitialUploaded {};
struct RoundStarted {
  uint64_t round = 0;
  uint64_t base_version = 0;
  uint32_t rank = 0;
  uint32_t size = 0;
  uint32_t block_steps = 0;
  uint64_t total_samples = 0;
};
// The version is loaded into the trainers.
struct Pulled {
  uint64_t version = 0;
};
struct Trained {};
struct PushAccepted {};
// The delta came too late, or is for a model that the coordinator no longer has: it is worth nothing.
struct PushStale {
  uint64_t round = 0;  // To take part in next.
};
struct Committed {
  uint64_t round = 0;
  uint64_t next_round = 0;
  bool reset_inner_state = true;
  bool job_finished = false;
};
// The round failed and starts again from the same version.
struct Restarted {};
// No commit will come.
struct Ended {
  bool finished = false;  // By its round limit; otherwise it failed.
  std::string reason;
};
struct Evaluated {};
struct Left {};
// A permanent error; nothing helps but a person.
struct Refused {
  std::string reason;
  bool unreachable = false;  // No refusal, but no answer for too long.
};
// SIGTERM. Takes effect at the next block boundary.
struct StopRequested {};
// A call was cut short because of it; no answer of its own will come.
struct Interrupted {};

using Event =
    std::variant<Start, Joined, Elected, WarmedUp, InitialUploaded, RoundStarted, Pulled, Trained, PushAccepted,
                 PushStale, Committed, Restarted, Ended, Evaluated, Left, Refused, StopRequested, Interrupted>;

// --- What to do. ---

// Become a member; waits for a coordinator that is not there yet. -> Joined, Refused
struct Join {};
// Train alone from the fresh parameters. -> WarmedUp
struct TrainWarmup {
  uint32_t steps = 0;
};
// -> InitialUploaded, Refused
struct UploadInitial {};
// -> RoundStarted, Committed (it is over), Elected, Ended, Restarted
struct AwaitRound {
  uint64_t round = 0;
};
// Fetch a version and load it; no version: the newest. -> Pulled
struct Pull {
  std::optional<uint64_t> version;
};
// Forget momentum and moments of the inner optimizer. No event.
struct ResetInner {};
// -> Trained
struct Train {
  uint64_t round = 0;
  uint32_t rank = 0;
  uint32_t size = 0;
  uint32_t steps = 0;
  uint64_t total_samples = 0;
  uint64_t seed = 0;
  double progress_begin = 0;  // Of the whole job, in [0, 1]; both 0 if the job has no end.
  double progress_end = 0;
};
// Send the delta of `round`; the same bytes if it is sent again. -> PushAccepted, PushStale, Joined, Refused
struct Push {
  uint64_t round = 0;
};
// -> Committed, Restarted, Ended, Joined
struct AwaitCommit {
  uint64_t round = 0;
};
// Loss and accuracy of the model loaded last. -> Evaluated
struct Evaluate {
  uint64_t version = 0;
  bool final = false;
};
// End membership. -> Left
struct Leave {
  std::string reason;
};
// The process ends. No event.
struct Finish {
  enum class Outcome { kDone, kStopped, kRefused, kUnreachable, kJobFailed };
  Outcome outcome = Outcome::kDone;
  std::string reason;
};

using Action = std::variant<Join, TrainWarmup, UploadInitial, AwaitRound, Pull, ResetInner, Train, Push, AwaitCommit,
                            Evaluate, Leave, Finish>;

// One line each, for logs and transcripts.
std::string ToString(const Event& event);
std::string ToString(const Action& action);

// Thread-compatible.
class BlockLoop {
 public:
  struct Options {
    uint64_t rounds = 0;      // Leave after this many rounds of a job without an end of its own; 0: never.
    uint64_t eval_every = 0;  // Evaluate every so many rounds; 0: at the end only.
  };

  explicit BlockLoop(const Options& options) : options_(options) {}

  // The next actions. An event that does not belong to what was asked for is ignored (empty answer): it is late news.
  std::vector<Action> Step(const Event& event);

  // After Finish.
  bool done() const { return phase_ == Phase::kDone; }
  // Of the job, or else of the options; 0: no end.
  uint64_t round_limit() const { return job_.max_rounds > 0 ? job_.max_rounds : options_.rounds; }

 private:
  enum class Phase {
    kNew,
    kJoining,
    kWarmingUp,
    kUploading,
    kAwaitingRound,
    kPullingBase,    // Before a block.
    kPullingCommit,  // After one.
    kTraining,
    kPushing,
    kAwaitingCommit,
    kEvaluating,
    kLeaving,
    kDone,
  };

  std::vector<Action> On(const Start&);
  std::vector<Action> On(const Joined& joined);
  std::vector<Action> On(const Elected&);
  std::vector<Action> On(const WarmedUp&);
  std::vector<Action> On(const InitialUploaded&);
  std::vector<Action> On(const RoundStarted& started);
  std::vector<Action> On(const Pulled& pulled);
  std::vector<Action> On(const Trained&);
  std::vector<Action> On(const PushAccepted&);
  std::vector<Action> On(const PushStale& stale);
  std::vector<Action> On(const Committed& committed);
  std::vector<Action> On(const Restarted&);
  std::vector<Action> On(const Ended& ended);
  std::vector<Action> On(const Evaluated&);
  std::vector<Action> On(const Left&);
  std::vector<Action> On(const Refused& refused);
  std::vector<Action> On(const StopRequested&);
  std::vector<Action> On(const Interrupted&);

  std::vector<Action> MakeInitialModel();
  std::vector<Action> GoToRound(uint64_t round);
  std::vector<Action> TrainBlock();
  std::vector<Action> LeaveAs(Finish::Outcome outcome, const std::string& reason);

  const Options options_;
  Phase phase_ = Phase::kNew;
  Joined job_;          // The last answer to Join.
  RoundStarted round_;  // The round of the block at hand.
  uint64_t next_round_ = 0;
  std::optional<uint64_t> held_version_;  // In the trainers, untouched by training.
  bool delta_kept_ = false;               // A delta of round_ exists whose commit was not seen.
  bool stopping_ = false;
  bool finished_ = false;  // The job is; what is left is to evaluate its last version.
  Finish finish_;
};

}  // namespace bmuf::worker

#endif  // BMUF_WORKER_BLOCK_LOOP_H_
