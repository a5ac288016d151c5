// What people and waiting workers are told. Reads the state, never changes it.
#include <algorithm>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "server/engine/state.h"

namespace bmuf::engine {
namespace {

// Awaited workers listed in a RoundStatus; its comment promises this number.
constexpr int kMaxAwaitedListed = 100;

bool Expected(const Worker& worker) {
  return worker.seat == Seat::kAwaited || worker.seat == Seat::kFolding || worker.seat == Seat::kFolded;
}

v1::WorkerStatus::State WireState(WorkerState state) {
  switch (state) {
    case WorkerState::kActive:
      return v1::WorkerStatus::STATE_ACTIVE;
    case WorkerState::kExpired:
      return v1::WorkerStatus::STATE_EXPIRED;
    case WorkerState::kLeft:
      return v1::WorkerStatus::STATE_LEFT;
    case WorkerState::kEvicted:
      return v1::WorkerStatus::STATE_EVICTED;
  }
  return v1::WorkerStatus::STATE_UNSPECIFIED;
}

v1::WorkerStatus::Part WirePart(const Worker& worker) {
  switch (worker.seat) {
    case Seat::kFolded:
      return v1::WorkerStatus::PART_FOLDED;
    case Seat::kFolding:
      return v1::WorkerStatus::PART_UPLOADING;
    case Seat::kAwaited:
      return worker.push.has_value() ? v1::WorkerStatus::PART_UPLOADING : v1::WorkerStatus::PART_TRAINING;
    case Seat::kExcused:
    case Seat::kNone:
      break;
  }
  return v1::WorkerStatus::PART_NONE;
}

v1::RoundPhase WirePhase(const Engine::State& s);

}  // namespace

const char* CounterName(Counter counter) {
  switch (counter) {
    case Counter::kJoined:
      return "workers_joined_total";
    case Counter::kExpired:
      return "workers_expired_total";
    case Counter::kLeft:
      return "workers_left_total";
    case Counter::kReplaced:
      return "workers_replaced_total";
    case Counter::kEvicted:
      return "workers_evicted_total";
    case Counter::kPushAccepted:
      return "pushes_accepted_total";
    case Counter::kPushDuplicate:
      return "pushes_duplicate_total";
    case Counter::kPushStale:
      return "pushes_stale_total";
    case Counter::kPushRejected:
      return "pushes_rejected_total";
    case Counter::kPushRefused:
      return "pushes_refused_total";
    case Counter::kPushBroken:
      return "pushes_broken_total";
    case Counter::kPushCancelled:
      return "pushes_cancelled_total";
    case Counter::kNonFinite:
      return "deltas_non_finite_total";
    case Counter::kOutOfRange:
      return "deltas_out_of_range_total";
    case Counter::kClipped:
      return "deltas_clipped_total";
    case Counter::kCommitted:
      return "rounds_committed_total";
    case Counter::kRestarted:
      return "rounds_restarted_total";
    case Counter::kExtended:
      return "rounds_extended_total";
    case Counter::kElected:
      return "initializers_elected_total";
    case Counter::kCount:
      break;
  }
  return "";
}

v1::JobState Engine::State::job_state() const {
  if (phase == Phase::kEnded) return ended_as;
  if (paused) return v1::JOB_STATE_PAUSED;
  return has_model ? v1::JOB_STATE_RUNNING : v1::JOB_STATE_INITIALIZING;
}

size_t Engine::State::ActiveWorkers() const {
  return std::count_if(workers.begin(), workers.end(), [](const auto& entry) { return entry.second.active(); });
}

size_t Engine::State::InflightPushes() const {
  size_t count = storing.has_value() ? 1 : 0;
  for (const auto& [name, worker] : workers) {
    count += worker.push.has_value() ? 1 : 0;
    count += worker.seat == Seat::kFolding ? 1 : 0;
  }
  return count;
}

BarrierInput Engine::State::BarrierInputAt(absl::Duration elapsed) const {
  BarrierInput input;
  for (const auto& [name, worker] : workers) {
    if (!Expected(worker)) continue;
    ++input.expected;
    if (worker.seat == Seat::kFolded) ++input.have;
    if (worker.seat == Seat::kFolding) ++input.folding;
    if (worker.seat == Seat::kAwaited && worker.push.has_value()) ++input.uploading;
    if (worker.seat != Seat::kFolded) input.awaited.push_back(name);
  }
  input.elapsed = elapsed;
  input.extension = extension;
  input.extensions = extensions;
  if (config.barrier().adaptive_soft_factor() > 0 && block_time_p95.has_value()) {
    input.adaptive_soft = config.barrier().adaptive_soft_factor() * *block_time_p95;
  }
  return input;
}

BarrierDecision Engine::State::DecideAt(absl::Duration elapsed) const {
  v1::BarrierPolicy policy = config.barrier();
  // A drain ends at the deadline: nobody may join whom an extension could wait for.
  if (draining && policy.on_timeout() == v1::ON_TIMEOUT_EXTEND) policy.set_on_timeout(v1::ON_TIMEOUT_COMMIT_IF_QUORUM);
  return DecideBarrier(BarrierInputAt(elapsed), policy);
}

absl::Duration Engine::State::JudgedElapsed() const { return std::max(ticked - collect_from, absl::ZeroDuration()); }

std::optional<double> Engine::State::MomentumInForce() const {
  if (config.outer().variant() == v1::VARIANT_AVERAGING) return 0.0;
  if (config.outer().has_block_momentum()) return config.outer().block_momentum();
  if (config.outer().momentum_policy() != v1::MOMENTUM_POLICY_FROZEN && last_momentum.has_value()) {
    return last_momentum;
  }
  return auto_momentum;
}

const v1::RoundRecord* Engine::State::RecordOf(RoundId asked) const {
  if (records.empty() || asked.value() < records.front().round()) return nullptr;
  const uint64_t index = asked.value() - records.front().round();
  return index < records.size() ? &records[index] : nullptr;
}

bool Engine::State::WatchdogRuns() const { return !paused && phase != Phase::kEnded && ActiveWorkers() > 0; }

Situation Engine::State::SituationAt(MonotonicTime now) const {
  Situation s;
  const auto timed = [&](const std::string& what, absl::Duration left, const std::string& then) {
    s.time_left = std::max(left, absl::ZeroDuration());
    s.reason = absl::StrCat(what, " for up to ", ForPeople(s.time_left), " more, then ", then);
    s.gist = absl::StrCat(what, ", then ", then);
  };
  const size_t present = ActiveWorkers();
  const uint32_t least = config.barrier().min_workers();
  if (phase == Phase::kEnded) {
    s.reason = absl::StrCat(ended_as == v1::JOB_STATE_FINISHED ? "finished: " : "failed: ", end_reason);
  } else if (paused) {
    s.reason = absl::StrCat("paused", pause_reason.empty() ? "" : ": ", pause_reason);
  } else if (phase == Phase::kInitializing) {
    if (storing.has_value()) {
      s.reason = absl::StrCat("storing the initial model from ", storing->worker);
    } else if (initializer.empty()) {
      s.reason = draining ? "draining: no worker may join" : "waiting for a worker to join";
    } else {
      timed(absl::StrCat("waiting for ", initializer, " to send the initial model"),
            elected_at + ToDuration(config.initial_model_timeout()) - now, "asks the next worker");
    }
  } else if (phase == Phase::kGathering) {
    if (draining) {
      s.reason = "draining: no new round starts";
    } else if (present < least) {
      s.reason = absl::StrCat(present, present == 1 ? " worker is" : " workers are", " present, ", least,
                              " are needed to start");
    } else if (enough_since.has_value()) {
      timed(
          absl::StrCat(present, " of ", config.barrier().expected_workers(), " workers are present, waiting for more"),
          *enough_since + ToDuration(config.barrier().start_timeout()) - now, "starts with those present");
    } else {
      s.reason = absl::StrCat(present, present == 1 ? " worker is" : " workers are", " present, about to start");
    }
  } else if (phase == Phase::kCommitting) {
    s.reason = absl::StrCat("committing: ", committing->reason());
  } else {
    const absl::Duration elapsed = std::max(now - collect_from, absl::ZeroDuration());
    BarrierDecision decision = DecideAt(elapsed);
    if (decision.kind != BarrierDecision::Kind::kWait) {
      // A deadline is over but no tick has judged it: still the situation before.
      decision = DecideAt(JudgedElapsed());
    }
    if (decision.next_deadline != absl::InfiniteDuration()) {
      s.time_left = std::max(decision.next_deadline - elapsed, absl::ZeroDuration());
    }
    s.reason = std::move(decision.reason);
    s.gist = std::move(decision.gist);
  }
  if (s.gist.empty()) s.gist = s.reason;
  if (phase == Phase::kEnded) return s;
  const std::string prefix =
      absl::StrCat("round ", round.value(), attempt > 1 ? absl::StrCat(" attempt ", attempt) : "", ": ");
  s.reason = prefix + s.reason;
  s.gist = prefix + s.gist;
  return s;
}

namespace {

v1::RoundPhase WirePhase(const Engine::State& s) {
  if (s.phase == Phase::kEnded) return v1::ROUND_PHASE_ENDED;
  if (s.paused) return v1::ROUND_PHASE_PAUSED;
  switch (s.phase) {
    case Phase::kInitializing:
      return v1::ROUND_PHASE_INITIALIZING;
    case Phase::kGathering:
      return v1::ROUND_PHASE_GATHERING;
    case Phase::kCollecting:
      return v1::ROUND_PHASE_COLLECTING;
    case Phase::kCommitting:
      return v1::ROUND_PHASE_COMMITTING;
    case Phase::kEnded:
      break;
  }
  return v1::ROUND_PHASE_ENDED;
}

}  // namespace

void Engine::State::FillRound(MonotonicTime now, v1::RoundStatus* status) const {
  const Situation situation = SituationAt(now);
  status->set_round(round.value());
  status->set_attempt(attempt);
  status->set_phase(WirePhase(*this));
  status->set_reason(situation.reason);
  if (situation.time_left != absl::InfiniteDuration()) {
    SetDuration(situation.time_left, status->mutable_time_to_deadline());
  }
  SetDuration(now - opened, status->mutable_open_for());
  uint32_t have = 0, expected = 0;
  for (const auto& [name, worker] : workers) {
    const bool asked = phase == Phase::kInitializing ? IsInitializer(name, worker) : Expected(worker);
    if (!asked) continue;
    ++expected;
    if (worker.seat == Seat::kFolded) {
      ++have;
      continue;
    }
    if (status->awaited_size() == kMaxAwaitedListed) {
      status->set_awaited_more(status->awaited_more() + 1);
      continue;
    }
    v1::AwaitedWorker* awaited = status->add_awaited();
    awaited->set_worker(name);
    if (worker.push.has_value()) {
      awaited->set_received_bytes(worker.push->received_bytes);
      awaited->set_total_bytes(worker.push->total_bytes);
    }
    SetDuration(now - worker.last_seen, awaited->mutable_silent_for());
  }
  status->set_have(have);
  status->set_expected(expected);
  status->set_need(phase == Phase::kInitializing ? 1 : Quorum(config.barrier(), expected));
}

std::vector<v1::WatchRoundResponse> Engine::NextWatchEvents(MonotonicTime now, WatchCursor& cursor) const {
  const State& s = *state_;
  std::vector<v1::WatchRoundResponse> events;
  if (cursor.done) return events;
  const auto add = [&]() -> v1::WatchRoundResponse& {
    events.emplace_back();
    events.back().set_epoch(s.epoch.value());
    return events.back();
  };
  if (s.has_model && cursor.round.value() <= s.version.value()) {
    v1::RoundCommitted* committed = add().mutable_committed();
    committed->set_version(cursor.round.value());
    if (const v1::RoundRecord* record = s.RecordOf(cursor.round); record != nullptr) {
      committed->set_model_digest(record->model_digest());
      for (const auto& part : record->contributions()) committed->add_contributors(part.worker());
      committed->set_block_learning_rate(record->block_learning_rate());
      committed->set_block_momentum(record->block_momentum());
    } else if (cursor.round.value() == s.version.value()) {  // The initial model.
      committed->set_model_digest(s.model_digest);
      if (s.stored.has_value()) committed->add_contributors(s.stored->worker);
    }
    committed->set_reset_inner_state(s.config.reset_inner_state());
    committed->set_next_round(s.round.value());
    committed->set_newest_version(s.version.value());
    committed->set_total_samples(s.total_samples);
    committed->set_job_finished(s.ended_as == v1::JOB_STATE_FINISHED);
    cursor.done = true;
    return events;
  }
  if (s.phase == Phase::kEnded) {
    v1::RoundEnded* ended = add().mutable_ended();
    ended->set_job_state(s.ended_as);
    ended->set_reason(s.end_reason);
    cursor.done = true;
    return events;
  }
  if (cursor.round == s.round) {
    if (cursor.attempt_seen != 0 && cursor.attempt_seen < s.attempt) {
      v1::RoundRestarted* restarted = add().mutable_restarted();
      restarted->set_attempt(s.attempt);
      restarted->set_reason(s.restart_reason);
    }
    cursor.attempt_seen = s.attempt;
    const auto it = s.workers.find(cursor.who.worker);
    const bool asked = s.phase == Phase::kCollecting && it != s.workers.end() && it->second.active() &&
                       it->second.incarnation == cursor.who.incarnation &&
                       (it->second.seat == Seat::kAwaited || it->second.seat == Seat::kExcused);
    if (asked && cursor.attempt_started < s.attempt) {
      v1::RoundStarted* started = add().mutable_started();
      started->set_base_version(s.version.value());
      started->set_base_digest(s.model_digest);
      started->set_rank(it->second.first_trajectory);
      started->set_size(s.trajectories);
      started->set_block_steps(s.config.block_steps());
      started->set_attempt(s.attempt);
      started->set_total_samples(s.total_samples);
      cursor.attempt_started = s.attempt;
    }
  }
  v1::RoundStatus waiting;
  std::string gist = s.SituationAt(now).gist;
  s.FillRound(now, &waiting);
  if (cursor.round > s.round) {
    gist = absl::StrCat("round ", cursor.round.value(), " follows; ", gist);
    waiting.set_reason(absl::StrCat("round ", cursor.round.value(), " follows; ", waiting.reason()));
  }
  // What runs by itself (times, bytes) is no reason for another message.
  std::string key =
      absl::StrCat(gist, "\n", waiting.attempt(), " ", waiting.phase(), " ", waiting.have(), " ", waiting.expected());
  for (const auto& awaited : waiting.awaited()) absl::StrAppend(&key, "\n", awaited.worker());
  if (key != cursor.waiting_sent) {
    *add().mutable_waiting() = std::move(waiting);
    cursor.waiting_sent = std::move(key);
  }
  return events;
}

void Engine::FillStatus(MonotonicTime now, absl::Time wall_now, v1::JobStatus* status) const {
  const State& s = *state_;
  status->set_job(s.job);
  status->set_state(s.job_state());
  status->set_state_reason(state_reason());
  v1::RoundStatus* round = status->mutable_round();
  s.FillRound(now, round);
  if (round->has_time_to_deadline()) {
    const absl::Duration at = wall_now + ToDuration(round->time_to_deadline()) - absl::UnixEpoch();
    google::protobuf::Duration parts;
    SetDuration(at, &parts);
    round->mutable_deadline()->set_seconds(parts.seconds());
    round->mutable_deadline()->set_nanos(parts.nanos());
  }
  status->set_version(s.version.value());
  status->set_has_model(s.has_model);
  status->set_model_digest(s.model_digest);
  for (const auto& [name, worker] : s.workers) {
    v1::WorkerStatus* w = status->add_workers();
    w->set_worker(name);
    w->set_incarnation(worker.incarnation.value());
    w->set_state(WireState(worker.state));
    w->set_part(WirePart(worker));
    w->set_trajectories(worker.trajectories);
    SetDuration(now - worker.last_seen, w->mutable_silent_for());
    w->set_contributions(worker.contributions);
    w->set_rejected(worker.rejected);
    *w->mutable_last_block() = worker.last_block;
    if (worker.push.has_value()) {
      w->set_received_bytes(worker.push->received_bytes);
      w->set_total_bytes(worker.push->total_bytes);
    }
    w->set_steps_done(worker.steps_done);
    w->set_client_info(worker.client_info);
  }
  if (!s.records.empty()) *status->mutable_last_commit() = s.records.back();
  status->set_total_samples(s.total_samples);
  status->set_block_momentum(s.MomentumInForce().value_or(0.0));
  status->set_block_learning_rate(s.config.outer().block_learning_rate());
  for (size_t i = 0; i < s.counters.size(); ++i) {
    (*status->mutable_counters())[CounterName(static_cast<Counter>(i))] = s.counters[i];
  }
}

namespace {

std::string Text(absl::Duration d) { return absl::FormatDuration(d); }
std::string Text(MonotonicTime t) { return absl::FormatDuration(t.since_origin()); }
std::string Text(double d) { return absl::StrFormat("%.17g", d); }
// Deterministic as long as no map has two entries whose order may differ, hence the metrics are left out.
std::string Text(v1::BlockFacts facts) {
  facts.clear_metrics();
  return facts.ShortDebugString();
}
std::string Text(v1::RoundRecord record) {
  for (auto& part : *record.mutable_contributions()) part.mutable_facts()->clear_metrics();
  return record.ShortDebugString();
}
std::string Text(v1::JobConfig config) {
  std::map<std::string, std::string> labels(config.labels().begin(), config.labels().end());
  config.clear_labels();
  std::string text = config.ShortDebugString();
  for (const auto& [key, value] : labels) absl::StrAppend(&text, " ", absl::CEscape(key), "=", absl::CEscape(value));
  return text;
}
std::string Text(const std::optional<InitialModel>& model) {
  if (!model.has_value()) return "-";
  return absl::StrCat(model->worker, "/", model->incarnation.value(), " request=", model->request.value(),
                      " digest=", model->digest);
}
template <typename T>
std::string TextOr(const std::optional<T>& value) {
  return value.has_value() ? Text(*value) : "-";
}
template <typename T>
std::string List(const T& values) {
  std::string text;
  for (const auto& value : values) absl::StrAppend(&text, text.empty() ? "" : ",", Text(value));
  return text;
}

}  // namespace

std::string Engine::DebugString() const {
  const State& s = *state_;
  std::string text;
  const auto line = [&](const auto&... parts) { absl::StrAppend(&text, parts..., "\n"); };
  static constexpr const char* kPhases[] = {"initializing", "gathering", "collecting", "committing", "ended"};
  static constexpr const char* kSeats[] = {"none", "excused", "awaited", "folding", "folded"};
  static constexpr const char* kStates[] = {"active", "expired", "left", "evicted"};
  line("job ", s.job, " epoch ", s.epoch.value(), " ", kPhases[static_cast<int>(s.phase)], s.paused ? " paused" : "",
       s.draining ? " draining" : "");
  line("round ", s.round.value(), " attempt ", s.attempt, " failed ", s.failed_attempts, " version ",
       s.has_model ? absl::StrCat(s.version.value()) : "none", " digest ", s.model_digest);
  line("ticked ", Text(s.ticked), " opened ", Text(s.opened), " started ", Text(s.started), " from ",
       Text(s.collect_from), " enough ", TextOr(s.enough_since), " extension ", Text(s.extension), " x", s.extensions,
       " last_fold ", Text(s.last_fold));
  line("places ", s.places, " trajectories ", s.trajectories, " incarnations ", s.last_incarnation);
  line("initializer ", s.initializer, "/", s.initializer_life.value(), " elected ", Text(s.elected_at), " storing ",
       Text(s.storing), " stored ", Text(s.stored));
  line("momentum auto ", TextOr(s.auto_momentum), " of ", s.auto_trajectories, " last ", TextOr(s.last_momentum));
  line("texts pause=", absl::CEscape(s.pause_reason), " end=", absl::CEscape(s.end_reason), " as ", s.ended_as,
       " restart=", absl::CEscape(s.restart_reason));
  line("announced ", Text(s.announced_at), " ", absl::CEscape(s.announced_gist), " watchdog ", Text(s.watchdog_from));
  line("samples ", s.total_samples, " norms ", List(s.norms), " block_times ", List(s.block_times), " p95 ",
       TextOr(s.block_time_p95));
  line("config ", Text(s.config));
  line("next_config ", TextOr(s.next_config));
  line("committing ", TextOr(s.committing));
  for (const auto& [name, w] : s.workers) {
    line("worker ", name, "/", w.incarnation.value(), " ", kStates[static_cast<int>(w.state)], " ",
         kSeats[static_cast<int>(w.seat)], " place ", w.place, " first ", w.first_trajectory, " of ", w.trajectories,
         " seated ", Text(w.seated_at), " seen ", Text(w.last_seen), " instance ", absl::CEscape(w.instance), " token ",
         absl::CEscape(w.token), " info ", absl::CEscape(w.client_info), " contributions ", w.contributions,
         " rejected ", w.rejected, " steps ", w.steps_done, " takeovers ", List(w.takeovers), " block {",
         Text(w.last_block), "}");
    for (const std::string& former : w.former_instances) line("  former ", absl::CEscape(former));
    if (w.push.has_value()) {
      line("  push ", w.push->request.value(), " kind ", w.push->kind, " codec ", w.push->codec, " weight ",
           Text(w.push->weight), " ", w.push->received_bytes, "/", w.push->total_bytes, " {", Text(w.push->facts), "}");
    }
    if (w.delta.has_value()) {
      v1::RoundRecord holder;
      *holder.add_contributions() = w.delta->record;
      line("  delta ", w.delta->request.value(), " twin ",
           w.delta->twin.has_value() ? absl::StrCat(w.delta->twin->value()) : "-", " took ", Text(w.delta->took),
           " of ", w.delta->trajectories, " ", Text(holder));
    }
  }
  for (const v1::RoundRecord& record : s.records) line("record ", Text(record));
  for (size_t i = 0; i < s.counters.size(); ++i) {
    line("counter ", CounterName(static_cast<Counter>(i)), " ", s.counters[i]);
  }
  return text;
}

}  // namespace bmuf::engine
