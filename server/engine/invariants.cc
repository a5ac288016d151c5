// The truths that hold after every event, whatever the events were.
#include <set>

#include "absl/strings/str_cat.h"
#include "core/base/limits.h"
#include "server/engine/state.h"

namespace bmuf::engine {

absl::Status Invariants::Check(const Engine& engine) {
  const Engine::State& s = *engine.state_;
  std::string broken;
  const auto require = [&](bool truth, const std::string& name) {
    if (!truth && broken.empty()) broken = name;
  };

  // Counters of the job never fall, and a step takes at most one commit.
  require(s.round.value() >= last_round_ && s.round.value() <= last_round_ + 1, "round rises by at most one");
  require(s.version.value() >= last_version_ && s.version.value() <= last_version_ + 1, "version rises by at most one");
  require(s.has_model || !had_model_, "a model is never lost");
  require(s.has_model ? s.round == RoundFrom(s.version) : s.round == RoundId(0),
          "the open round starts from the version");
  require(s.attempt >= 1, "attempts count from one");

  const bool attempt_open = s.phase == Phase::kCollecting || s.phase == Phase::kCommitting;
  std::set<uint32_t> places;
  std::set<uint64_t> requests;
  std::set<uint64_t> incarnations;
  uint32_t folding = 0, folded = 0, expected = 0;
  for (const auto& [name, w] : s.workers) {
    uint64_t& highest = highest_incarnation_[name];
    require(w.incarnation.value() >= highest, "incarnations never fall: " + name);
    highest = w.incarnation.value();
    require(w.incarnation.value() > 0 && w.incarnation.value() <= s.last_incarnation,
            "incarnations come from the counter");
    require(incarnations.insert(w.incarnation.value()).second, "incarnations are unique");
    require(w.delta.has_value() == (w.seat == Seat::kFolding || w.seat == Seat::kFolded),
            "a delta has its seat: " + name);
    require(attempt_open || w.seat == Seat::kNone, "seats exist only in an open attempt: " + name);
    if (w.seat != Seat::kNone) {
      require(w.place < s.places && places.insert(w.place).second, "places are distinct: " + name);
      require(w.first_trajectory < s.trajectories, "trajectory ranks are below the size: " + name);
    }
    const bool finishing = w.state == WorkerState::kLeft && w.push.has_value() && w.push->whole();
    if (w.seat == Seat::kAwaited) require(w.active() || finishing, "only members are waited for: " + name);
    if (w.push.has_value()) {
      require(w.active() || finishing, "only members upload: " + name);
      require(requests.insert(w.push->request.value()).second, "requests are distinct");
      require(s.phase != Phase::kEnded && s.phase != Phase::kGathering, "uploads belong to an open attempt: " + name);
      require(w.push->kind != v1::PAYLOAD_KIND_INITIAL_MODEL || s.IsInitializer(name, w) || !s.has_model,
              "only the initialiser sends a model: " + name);
    }
    if (w.delta.has_value()) {
      require(requests.insert(w.delta->request.value()).second, "requests are distinct");
      require(w.delta->record.incarnation() <= w.incarnation.value(), "no delta of a future life: " + name);
      require(w.delta->record.worker() == name && w.delta->record.rank() == w.place,
              "a delta is its worker's: " + name);
      require(!w.delta->twin.has_value() || w.seat == Seat::kFolding, "nobody waits for what is done: " + name);
    }
    folding += w.seat == Seat::kFolding ? 1 : 0;
    folded += w.seat == Seat::kFolded ? 1 : 0;
    expected += w.seat == Seat::kAwaited || w.delta.has_value() ? 1 : 0;
    require(w.former_instances.size() <= kMaxFormerInstances, "former instances are bounded");
    require(w.takeovers.size() <= kMaxTakeoversPerMinute, "takeovers are bounded");
  }
  require(s.committing.has_value() == (s.phase == Phase::kCommitting), "a commit is open iff committing");
  if (s.phase == Phase::kCollecting && !s.paused) require(expected > 0, "a collecting round expects somebody");
  if (s.phase == Phase::kCommitting) {
    require(folding == 0, "a commit waits for what is being folded");
    require(folded >= s.config.barrier().min_workers(), "no commit below min_workers");
    require(s.committing->contributions_size() == static_cast<int>(folded), "a commit uses what is folded");
    require(s.committing->total_weight() > 0, "a commit has weight");
    require(s.committing->round() == s.round.value(), "a commit is of the open round");
  }
  require((s.phase == Phase::kInitializing) == (!s.has_model), "rounds run iff there is a model");
  require((s.phase == Phase::kEnded) == (s.ended_as != v1::JOB_STATE_UNSPECIFIED), "an ended job says how");
  if (!s.initializer.empty() && !s.paused && !s.storing.has_value()) {
    const auto it = s.workers.find(s.initializer);
    require(it != s.workers.end() && s.IsInitializer(it->first, it->second), "the initialiser is a member");
  }
  require(s.InflightPushes() <= s.config.max_inflight_pushes(), "slots are bounded");
  require(s.workers.size() <= limits::kMaxWorkersPerJob, "workers are bounded");
  require(s.records.size() <= limits::kMaxRoundRecords, "records are bounded");
  require(s.kept_contributions <= kMaxKeptContributions || s.records.size() == 1, "kept contributions are bounded");
  require(s.records.empty() || s.records.back().round() == s.version.value(), "the newest record is the version's");
  require(s.norms.size() <= kMaxNorms && s.block_times.size() <= kMaxBlockTimes, "histories are bounded");

  last_round_ = s.round.value();
  last_version_ = s.version.value();
  had_model_ = s.has_model;
  if (broken.empty()) return absl::OkStatus();
  return absl::InternalError(broken);
}

}  // namespace bmuf::engine
