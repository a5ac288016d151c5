// One step: the only code that changes Engine::State.
//
// Idea: each event does its own small change, then Settle() draws every conclusion there is to draw (elect, start,
// seat, commit, extend, restart), so that no event needs to know what its change means for the barrier.
#ifndef BMUF_SERVER_ENGINE_STEPPER_H_
#define BMUF_SERVER_ENGINE_STEPPER_H_

#include <string>
#include <utility>

#include "core/base/error.h"
#include "server/engine/state.h"

namespace bmuf::engine {

// Lives for one Engine::Step. Confined to its thread.
class Stepper {
 public:
  Stepper(Engine::State& state, MonotonicTime now) : s_(state), now_(now) {}

  // membership.cc
  void On(const JoinEvent& e);
  void On(const HeartbeatEvent& e);
  void On(const SignOfLifeEvent& e);
  void On(const LeaveEvent& e);
  void On(const EvictEvent& e);
  void On(const ReadmitEvent& e);
  // push.cc
  void On(const PushOpenedEvent& e);
  void On(const PushProgressEvent& e);
  void On(const PushVerifiedEvent& e);
  void On(const PushFailedEvent& e);
  void On(const FoldedEvent& e);
  void On(const FoldRefusedEvent& e);
  // round.cc
  void On(const InitialModelStoredEvent& e);
  void On(const InitialModelFailedEvent& e);
  void On(const CommittedEvent& e);
  void On(const CommitFailedEvent& e);
  // engine.cc
  void On(const TickEvent& e);
  void On(const UpdateConfigEvent& e);
  void On(const PauseEvent& e);
  void On(const ResumeEvent& e);
  void On(const DrainEvent& e);

  // Concludes the step.
  Effects Finish();

 private:
  using Entry = std::pair<const std::string, Worker>;

  // ---- membership.cc
  // The session's worker with its lease renewed and, if it had run out, its place restored; else a typed error.
  absl::StatusOr<Entry*> Accept(const WorkerKey& who, const std::string& token);
  absl::Status Touch(Entry& entry);
  // Takes `entry` out of what is awaited and ends its upload; `why` is what the upload is told.
  void Depart(Entry& entry, WorkerState state, const absl::Status& why);
  absl::StatusOr<Entry*> NewLife(const JoinEvent& e);
  absl::Status MakeRoom();  // For one more remembered worker.
  v1::JoinResponse JoinAnswer(const Entry& entry) const;
  void ExpireLeases();

  // ---- push.cc
  absl::Status AdmitInitialModel(const PushOpenedEvent& e, const Entry& entry) const;
  // OK to admit, else the refusal.
  absl::Status AdmitDelta(const PushOpenedEvent& e, const Entry& entry) const;
  absl::Status StaleRound(const Entry& entry, const std::string& what) const;
  // Answers a push whose delta is already there; true if it did.
  bool AnswerFromRecord(RequestId request, Worker& worker, std::optional<uint32_t> digest);
  // The scale that the norm guard asks for, or its refusal.
  absl::StatusOr<double> GuardNorm(const PushVerifiedEvent& e) const;
  void RejectDelta(Entry& entry, RequestId request, const absl::Status& why);
  OpenPush TakePush(Worker& worker);
  void CancelUpload(Worker& worker, const absl::Status& why);
  Entry* FindPush(RequestId request);
  Entry* FindDelta(RequestId request);
  v1::PushDeltaResponse PushAnswer(v1::PushOutcome outcome, RoundId round, double weight) const;

  // ---- round.cc
  void Settle();
  void ElectInitializer();
  bool TryStart();  // True if an attempt started.
  bool Collect();   // True if the attempt ended otherwise than by commit.
  void SeatWorker(Entry& entry);
  void SeatJoiners();
  void CommitRound(const std::string& reason);
  v1::OuterOptimizer EffectiveOuter(uint32_t trajectories, uint32_t* cntk_n) const;
  void Restart(const std::string& reason, bool failed);
  void ClearAttempt();
  void OpenRound(RoundId round);
  void EnterPhase(Phase phase);
  void End(v1::JobState state, const std::string& reason);

  // ---- engine.cc
  // Says what is waited for when that changed or was not said for long.
  void AnnounceReason();
  void Say(const std::string& text, const std::string& worker = "") {
    Emit(Announce{Announce::Level::kInfo, text, worker});
  }
  void Warn(const std::string& text, const std::string& worker = "") {
    Emit(Announce{Announce::Level::kWarning, text, worker});
  }
  void Count(Counter counter) { ++s_.counters[static_cast<size_t>(counter)]; }
  void Emit(Effect effect) { effects_.push_back(std::move(effect)); }
  void Changed() { changed_ = true; }

  Engine::State& s_;
  const MonotonicTime now_;
  Effects effects_;
  bool changed_ = false;  // Watchers would see a difference.
};

}  // namespace bmuf::engine

#endif  // BMUF_SERVER_ENGINE_STEPPER_H_
