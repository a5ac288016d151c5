// Thousands of random histories: joins, crashes, retries, lies, pauses, long silences in any order. After every event
// the invariants hold, and an auditor that sees only events and effects finds every request answered once, every commit
// made of what was folded, no commit too early or too small. At the end everything heals and rounds must commit again.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "server/engine/durations.h"
#include "server/engine/effect_text.h"
#include "server/engine/engine.h"

namespace bmuf::engine {
namespace {

struct Logged {
  MonotonicTime at;
  Event event;
};

class Dice {
 public:
  explicit Dice(uint64_t seed) : bits_(seed) {}
  uint64_t Below(uint64_t n) { return bits_() % n; }
  bool OneIn(uint64_t n) { return Below(n) == 0; }
  template <typename T>
  const T& Of(const std::vector<T>& values) {
    return values[Below(values.size())];
  }

 private:
  std::mt19937_64 bits_;
};

v1::JobConfig RandomConfig(Dice& dice) {
  v1::JobConfig c;
  v1::BarrierPolicy* barrier = c.mutable_barrier();
  barrier->set_min_workers(static_cast<uint32_t>(1 + dice.Below(3)));
  barrier->set_min_fraction(dice.Of<double>({0, 0, 0.5, 1}));
  barrier->set_expected_workers(static_cast<uint32_t>(dice.Below(6)));
  SetDuration(absl::Seconds(dice.Below(20)), barrier->mutable_start_timeout());
  if (dice.OneIn(2)) SetDuration(absl::Seconds(5 + dice.Below(10)), barrier->mutable_soft_timeout());
  if (dice.OneIn(3)) barrier->set_adaptive_soft_factor(1.5);
  SetDuration(absl::Seconds(10 + dice.Below(30)), barrier->mutable_collect_timeout());
  barrier->set_on_timeout(static_cast<v1::OnTimeout>(dice.Below(4)));
  barrier->set_max_extensions(static_cast<uint32_t>(dice.Below(3)));
  SetDuration(absl::Seconds(dice.Below(4)), barrier->mutable_grace());
  if (dice.OneIn(8)) barrier->set_max_failed_attempts(4);
  SetDuration(absl::Seconds(2 + dice.Below(20)), c.mutable_lease());
  SetDuration(absl::Seconds(5 + dice.Below(20)), c.mutable_initial_model_timeout());
  c.set_max_workers(static_cast<uint32_t>(5 + dice.Below(3)));
  c.set_max_inflight_pushes(static_cast<uint32_t>(1 + dice.Below(4)));
  if (dice.OneIn(4)) c.set_max_rounds(1 + dice.Below(30));
  if (dice.OneIn(3)) {
    c.set_weighting(v1::WEIGHTING_SAMPLES);
    c.set_nominal_block(10);
  }
  c.mutable_norm_guard()->set_action(static_cast<v1::NormGuardAction>(dice.Below(4)));
  c.mutable_norm_guard()->set_max_abs(dice.Of<double>({0, 0, 5}));
  if (dice.OneIn(3)) c.mutable_outer()->set_momentum_policy(v1::MOMENTUM_POLICY_FOLLOW_PRESENT_RESCALED);
  absl::StatusOr<v1::JobConfig> resolved = ResolveConfig(c);
  EXPECT_TRUE(resolved.ok()) << resolved.status();
  return *resolved;
}

// Judges effects by what went in, without a look at the engine's state.
class Auditor {
 public:
  std::string fault;

  void Opened(RequestId request, const WorkerKey& who) { pushes_[request] = {who, Stage::kOpened}; }

  void See(MonotonicTime now, const Event& event, const Effects& effects, const v1::JobConfig& config) {
    if (const auto* folded = std::get_if<FoldedEvent>(&event)) {
      if (folding_.erase(folded->request) > 0) folded_[pushes_[folded->request].who.worker] = folded->request;
    }
    if (const auto* refused = std::get_if<FoldRefusedEvent>(&event)) folding_.erase(refused->request);
    if (std::holds_alternative<ResumeEvent>(event) && std::get<ReplyStatus>(effects.front()).status.ok()) {
      deadlines_from_ = now;
    }
    for (const Effect& effect : effects) {
      if (const auto* e = std::get_if<AdmitPush>(&effect)) {
        Require(pushes_[e->request].stage == Stage::kOpened, "a push is admitted once");
        pushes_[e->request].stage = Stage::kAdmitted;
      } else if (const auto* e = std::get_if<ReplyPush>(&effect)) {
        Require(pushes_[e->request].stage != Stage::kEnded, "a push is answered once");
        pushes_[e->request].stage = Stage::kEnded;
      } else if (const auto* e = std::get_if<CancelPush>(&effect)) {
        Require(pushes_[e->request].stage != Stage::kEnded, "a push is cancelled before it is answered");
        pushes_[e->request].stage = Stage::kEnded;
      } else if (const auto* e = std::get_if<Fold>(&effect)) {
        Require(pushes_[e->request].stage == Stage::kAdmitted, "only admitted pushes are folded");
        Require(std::make_pair(e->round.value(), e->attempt) == attempt_, "a fold is of the open attempt");
        Require(folding_.insert(e->request).second, "a push is folded once");
        Require(e->weight >= 0 && e->scale > 0 && e->scale <= 1, "weights and scales are sane");
      } else if (const auto* e = std::get_if<BeginAttempt>(&effect)) {
        const auto next = std::make_pair(e->round.value(), e->attempt);
        Require(next > attempt_, "attempts only rise");
        Require(folding_.empty(), "an attempt begins when nothing is being folded");
        attempt_ = next;
        began_ = deadlines_from_ = now;
        folded_.clear();
        rules_ = config;
      } else if (const auto* e = std::get_if<Commit>(&effect)) {
        SeeCommit(now, *e);
      }
    }
  }

  // Pushes without an end.
  std::vector<uint64_t> Unanswered() const {
    std::vector<uint64_t> found;
    for (const auto& [request, push] : pushes_) {
      if (push.stage != Stage::kEnded) found.push_back(request.value());
    }
    return found;
  }

 private:
  enum class Stage { kUnknown, kOpened, kAdmitted, kEnded };
  struct Push {
    WorkerKey who;
    Stage stage = Stage::kUnknown;
  };

  void Require(bool truth, const std::string& name) {
    if (!truth && fault.empty()) fault = name;
  }

  void SeeCommit(MonotonicTime now, const Commit& commit) {
    const v1::RoundRecord& record = commit.record;
    Require(record.round() == attempt_.first && record.attempts() == attempt_.second,
            "a commit is of the open attempt");
    Require(committed_.insert(attempt_).second, "an attempt commits once");
    Require(folding_.empty(), "a commit waits for folds");
    Require(record.contributions_size() == static_cast<int>(folded_.size()), "a commit uses all that is folded");
    double weight = 0;
    for (const auto& part : record.contributions()) {
      const auto it = folded_.find(part.worker());
      Require(it != folded_.end(), "a commit uses nothing else");
      if (it == folded_.end()) continue;
      Require(pushes_[it->second].who.incarnation.value() == part.incarnation(), "the incarnation is the pusher's");
      weight += part.weight();
    }
    Require(weight > 0 && weight == record.total_weight(), "the weight is the sum");
    const v1::BarrierPolicy& policy = rules_.barrier();
    Require(static_cast<uint32_t>(record.contributions_size()) >= policy.min_workers(), "no commit below min_workers");
    Require(record.expected() >= static_cast<uint32_t>(record.contributions_size()), "contributors were expected");
    if (record.contributions_size() < static_cast<int>(record.expected()) && policy.adaptive_soft_factor() == 0) {
      absl::Duration earliest = ToDuration(policy.collect_timeout());
      if (policy.has_soft_timeout()) earliest = std::min(earliest, ToDuration(policy.soft_timeout()));
      Require(now - deadlines_from_ >= earliest, "no early close");
      Require(static_cast<uint32_t>(record.contributions_size()) >= Quorum(policy, record.expected()),
              "a quorum is in");
    }
    Require(commit.outer.block_momentum() >= 0 && commit.outer.block_momentum() < 1, "momentum is in [0, 1)");
    Require(record.momentum_rescale() >= 0 && record.momentum_rescale() < 1e9, "the rescaling is finite");
  }

  std::map<RequestId, Push> pushes_;
  std::set<RequestId> folding_;
  std::map<std::string, RequestId> folded_;
  std::pair<uint64_t, uint32_t> attempt_{0, 0};
  std::set<std::pair<uint64_t, uint32_t>> committed_;
  MonotonicTime began_, deadlines_from_;
  v1::JobConfig rules_;
};

// A caller of the engine, workers and network in one, that does what the dice say.
class World {
 public:
  explicit World(uint64_t seed)
      : dice_(seed), config_(RandomConfig(dice_)), engine_("job", Epoch(1), config_, now_), rules_(config_) {}

  // Returns the first fault, or "".
  std::string Run(int events) {
    for (int i = 0; i < events && fault_.empty(); ++i) Act();
    if (fault_.empty()) Heal();
    return fault_;
  }

  const std::vector<Logged>& log() const { return log_; }
  const v1::JobConfig& config() const { return config_; }
  const Engine& engine() const { return engine_; }
  const std::vector<std::string>& effects() const { return effects_; }
  uint64_t commits() const { return commits_; }

 private:
  struct Life {
    WorkerKey who;
    std::string token;
  };

  void Fail(const std::string& fault) {
    if (fault_.empty()) fault_ = absl::StrCat(fault, " (event ", log_.size(), ")");
  }

  Effects Step(const Event& event) {
    log_.push_back({now_, event});
    Effects effects = engine_.Step(now_, event);
    const absl::Status truth = invariants_.Check(engine_);
    if (!truth.ok()) Fail(std::string(truth.message()));
    // Rules change when an attempt of a new round begins; until then the newest accepted are not in force.
    auditor_.See(now_, event, effects, engine_.config());
    if (!auditor_.fault.empty()) Fail(auditor_.fault);
    for (const Effect& effect : effects) {
      effects_.push_back(EffectText(effect));
      if (const auto* e = std::get_if<ReplyJoin>(&effect)) {
        if (e->answer.ok()) {
          const v1::Session& s = e->answer->session();
          lives_.push_back({{s.worker(), Incarnation(s.incarnation())}, s.token()});
          newest_[s.worker()] = lives_.back();
        }
      } else if (const auto* e = std::get_if<AdmitPush>(&effect)) {
        uploading_.push_back(e->request);
      } else if (const auto* e = std::get_if<ReplyPush>(&effect)) {
        Forget(uploading_, e->request);
      } else if (const auto* e = std::get_if<CancelPush>(&effect)) {
        Forget(uploading_, e->request);
      } else if (const auto* e = std::get_if<Fold>(&effect)) {
        Forget(uploading_, e->request);
        folding_.push_back(e->request);
      } else if (const auto* e = std::get_if<StoreInitialModel>(&effect)) {
        Forget(uploading_, e->request);
        storing_ = e->request;
      } else if (const auto* e = std::get_if<Commit>(&effect)) {
        committing_ = RoundId(e->record.round());
        ++commits_;
      }
    }
    return effects;
  }

  static void Forget(std::vector<RequestId>& list, RequestId request) {
    list.erase(std::remove(list.begin(), list.end(), request), list.end());
  }

  RequestId NewRequest() { return RequestId(++requests_); }

  template <typename Reply>
  void ExpectOne(const Effects& effects, RequestId request) {
    int answers = 0;
    for (const Effect& effect : effects) {
      if (const auto* reply = std::get_if<Reply>(&effect); reply != nullptr && reply->request == request) ++answers;
    }
    if (answers != 1) Fail(absl::StrCat("a request was answered ", answers, " times"));
  }

  void Tick() {
    Step(TickEvent{});
    if (engine_.NextDeadline() <= now_) Fail("a tick does what is due");
  }

  std::string RandomName() { return std::string(1, static_cast<char>('a' + dice_.Below(7))); }
  // Mostly somebody's present life, at times a former one or a forged token.
  std::optional<Life> SomeLife() {
    if (lives_.empty()) return std::nullopt;
    Life life = dice_.Of(lives_);
    if (!dice_.OneIn(6)) life = newest_[life.who.worker];
    if (dice_.OneIn(40)) life.token = "forged";
    if (dice_.OneIn(80)) life.who.incarnation = life.who.incarnation.Next();
    return life;
  }

  void Join(const std::string& name, uint64_t process) {
    const RequestId request = NewRequest();
    ExpectOne<ReplyJoin>(Step(JoinEvent{request, name, absl::StrCat(name, process), absl::StrCat("t", requests_), "",
                                        static_cast<uint32_t>(1 + dice_.Below(3))}),
                         request);
  }

  void Open(const Life& life, bool honest) {
    PushOpenedEvent e;
    e.request = NewRequest();
    e.who = life.who;
    e.token = life.token;
    e.round = engine_.round();
    e.kind = engine_.has_model() ? v1::PAYLOAD_KIND_DELTA : v1::PAYLOAD_KIND_INITIAL_MODEL;
    e.base_digest = engine_.model_digest();
    e.total_bytes = 100;
    e.facts.set_samples(honest ? 10 : dice_.Below(3) * 10);
    if (!honest && dice_.OneIn(6)) e.round = RoundId(e.round.value() + dice_.Below(3) - (e.round.value() > 0 ? 1 : 0));
    if (e.round.value() > 0) e.base_version = BaseVersionOf(e.round);
    if (!honest && dice_.OneIn(20)) e.base_version = ModelVersion(dice_.Below(4));
    if (!honest && dice_.OneIn(20)) e.base_digest = 1;
    if (!honest && dice_.OneIn(20)) e.codec = static_cast<v1::Codec>(dice_.Below(8));
    if (!honest && dice_.OneIn(20)) e.kind = static_cast<v1::PayloadKind>(dice_.Below(3));
    if (dice_.OneIn(2)) e.digest = DigestOf(life);
    auditor_.Opened(e.request, e.who);
    digests_[e.request] = honest || !dice_.OneIn(10) ? DigestOf(life) : 3;
    Step(e);
  }
  uint32_t DigestOf(const Life& life) const {
    return static_cast<uint32_t>(1000 * engine_.round().value() + life.who.incarnation.value());
  }

  void Act() {
    if (dice_.OneIn(3)) now_ = now_ + absl::Milliseconds(dice_.Below(2000));
    if (dice_.OneIn(60)) now_ = now_ + absl::Seconds(dice_.Below(60));
    const std::optional<Life> life = SomeLife();
    switch (dice_.Below(22)) {
      case 0:
      case 1:
        return Join(RandomName(), dice_.Below(3) == 0 ? log_.size() : dice_.Below(2));
      case 2:
      case 3:
      case 4: {
        if (!life.has_value()) return;
        const RequestId request = NewRequest();
        ExpectOne<ReplyHeartbeat>(Step(HeartbeatEvent{request, life->who, life->token, dice_.Below(100)}), request);
        return;
      }
      case 5: {
        if (!life.has_value() || !dice_.OneIn(4)) return;
        const RequestId request = NewRequest();
        ExpectOne<ReplyStatus>(Step(LeaveEvent{request, life->who, life->token, "done"}), request);
        return;
      }
      case 6:
      case 7:
      case 8:
      case 9:
        if (life.has_value()) Open(*life, /*honest=*/dice_.OneIn(2));
        return;
      case 10:
        if (!uploading_.empty()) Step(PushProgressEvent{dice_.Of(uploading_), dice_.Below(5) * 25});
        return;
      case 11:
      case 12:
      case 13:
        if (!uploading_.empty()) {
          const RequestId request = dice_.Of(uploading_);
          const double norm = dice_.OneIn(20) ? std::numeric_limits<double>::infinity() : dice_.OneIn(10) ? 1000 : 1;
          Step(PushVerifiedEvent{request, digests_[request], norm, dice_.OneIn(20) ? 6.0 : 0.5});
        }
        return;
      case 14:
        if (!uploading_.empty() && dice_.OneIn(2)) {
          const bool content = dice_.OneIn(2);
          Step(PushFailedEvent{dice_.Of(uploading_),
                               Error(content ? v1::REASON_NON_FINITE_DELTA : v1::REASON_TOO_SLOW, "failed"), content});
        }
        return;
      case 15:
      case 16:
        return PerformFold(/*honest=*/!dice_.OneIn(10));
      case 17:
        return PerformSlow(/*honest=*/!dice_.OneIn(8));
      case 18:
      case 19:
        return Tick();
      case 20:
        return Operate();
      default:
        // Of requests that never were or are over, and of rounds that are not open.
        Step(FoldedEvent{RequestId(dice_.Below(requests_ + 2))});
        Step(PushFailedEvent{RequestId(requests_ + 7), absl::OkStatus(), true});
        Step(CommittedEvent{RoundId(engine_.round().value() + 1), 1, 1, absl::UnixEpoch()});
        if (life.has_value()) Step(SignOfLifeEvent{life->who, life->token});
        if (life.has_value()) Watch(*life);
    }
  }

  void PerformFold(bool honest) {
    if (folding_.empty()) return;
    const RequestId request = dice_.Of(folding_);
    Forget(folding_, request);
    if (honest) {
      Step(FoldedEvent{request});
    } else {
      Step(FoldRefusedEvent{request, Error(v1::REASON_OUT_OF_RANGE_DELTA, "out of range")});
    }
  }

  void PerformSlow(bool honest) {
    if (storing_.has_value()) {
      const RequestId request = *std::exchange(storing_, std::nullopt);
      if (honest) {
        Step(InitialModelStoredEvent{request, 100});
      } else {
        Step(InitialModelFailedEvent{request, Error(v1::REASON_NON_FINITE_DELTA, "NaN")});
      }
    } else if (committing_.has_value()) {
      const RoundId round = *std::exchange(committing_, std::nullopt);
      if (honest) {
        Step(CommittedEvent{round, static_cast<uint32_t>(100 + round.value()), 0.5, absl::UnixEpoch()});
      } else {
        Step(CommitFailedEvent{round, "not finite"});
      }
    }
  }

  void Operate() {
    const RequestId request = NewRequest();
    switch (dice_.Below(8)) {
      case 0:
        return ExpectOne<ReplyStatus>(Step(PauseEvent{request, "maintenance"}), request);
      case 1:
      case 2:
        return ExpectOne<ReplyStatus>(Step(ResumeEvent{request}), request);
      case 3:
        return ExpectOne<ReplyStatus>(Step(EvictEvent{request, RandomName()}), request);
      case 4:
      case 5:
        return ExpectOne<ReplyStatus>(Step(ReadmitEvent{request, RandomName()}), request);
      case 6: {
        v1::JobConfig changes;
        changes.mutable_outer()->set_block_learning_rate(0.5 + 0.1 * static_cast<double>(dice_.Below(5)));
        changes.set_block_steps(static_cast<uint32_t>(1 + dice_.Below(50)));
        absl::StatusOr<v1::JobConfig> next = ApplyChanges(engine_.config(), changes, engine_.has_model());
        if (next.ok()) ExpectOne<ReplyStatus>(Step(UpdateConfigEvent{request, *next}), request);
        return;
      }
      default:
        if (!dice_.OneIn(30)) return;
        draining_ = true;
        Step(DrainEvent{});
    }
  }

  // A watcher is told each final event once and no attempt twice.
  void Watch(const Life& life) {
    WatchCursor& cursor = cursors_[{life.who.worker, life.who.incarnation.value()}];
    if (cursor.done || cursor.who.worker.empty()) {
      cursor = WatchCursor();
      cursor.round = engine_.round();
      cursor.who = life.who;
    }
    engine_.NextWatchEvents(now_, cursor);
    if (!engine_.NextWatchEvents(now_, cursor).empty()) Fail("a watcher is told things once");
    v1::JobStatus status;
    engine_.FillStatus(now_, absl::UnixEpoch(), &status);
  }

  // Everybody behaves from now on: unless the job has ended or drains, rounds commit again.
  void Heal() {
    if (engine_.state() == v1::JOB_STATE_PAUSED) Step(ResumeEvent{NewRequest()});
    while (!folding_.empty()) PerformFold(true);
    for (const RequestId request : std::vector<RequestId>(uploading_)) {
      Step(PushFailedEvent{request, Error(v1::REASON_TOO_SLOW, "stalled"), false});
    }
    const uint64_t before = commits_;
    now_ = now_ + absl::Minutes(2);  // Takeover limits and leases of the dead run out.
    Tick();
    if (engine_.state() == v1::JOB_STATE_RUNNING || engine_.state() == v1::JOB_STATE_INITIALIZING) {
      for (int second = 0; second < 400 && commits_ < before + 3 && fault_.empty(); ++second) {
        for (char c = 'a'; c < 'd'; ++c) {
          const std::string name(1, c);
          if (second == 0) Step(ReadmitEvent{NewRequest(), name});
          if (second == 0) Join(name, 1'000'000);
          if (newest_.count(name) == 0) continue;  // A drain refused it.
          Step(HeartbeatEvent{NewRequest(), newest_[name].who, newest_[name].token, 1});
          Open(newest_[name], /*honest=*/true);
          for (const RequestId request : std::vector<RequestId>(uploading_)) {
            Step(PushVerifiedEvent{request, digests_[request], 1, 0.5});
          }
          while (!folding_.empty()) PerformFold(true);
          PerformSlow(true);
        }
        now_ = now_ + absl::Seconds(1);
        Tick();
        const v1::JobState state = engine_.state();
        if (state == v1::JOB_STATE_FINISHED || state == v1::JOB_STATE_FAILED) break;
      }
      const v1::JobState state = engine_.state();
      const bool ended = state == v1::JOB_STATE_FINISHED || state == v1::JOB_STATE_FAILED;
      if (commits_ < before + 3 && !ended && !draining_) Fail("rounds commit once faults stop");
    }
    if (committing_.has_value()) PerformSlow(true);
    for (const RequestId request : std::vector<RequestId>(uploading_)) {
      Step(PushFailedEvent{request, Error(v1::REASON_TOO_SLOW, "stalled"), false});
    }
    for (uint64_t request : auditor_.Unanswered()) {
      if (RequestId(request) != storing_) Fail(absl::StrCat("push #", request, " is never answered"));
    }
    if (!storing_.has_value() && !engine_.Idle()) Fail("when nothing is open the engine is idle");
  }

  Dice dice_;
  MonotonicTime now_;
  v1::JobConfig config_;
  Engine engine_;
  v1::JobConfig rules_;
  Invariants invariants_;
  Auditor auditor_;
  std::string fault_;
  std::vector<Logged> log_;
  std::vector<std::string> effects_;
  std::vector<Life> lives_;
  std::map<std::string, Life> newest_;
  std::vector<RequestId> uploading_, folding_;
  std::optional<RequestId> storing_;
  std::optional<RoundId> committing_;
  bool draining_ = false;
  std::map<RequestId, uint32_t> digests_;
  std::map<std::pair<std::string, uint64_t>, WatchCursor> cursors_;
  uint64_t requests_ = 0;
  uint64_t commits_ = 0;
};

constexpr int kHistories = 1000;
constexpr int kEvents = 200;

TEST(EnginePropertyTest, NoHistoryBreaksAnInvariant) {
  uint64_t commits = 0;
  for (int seed = 1; seed <= kHistories; ++seed) {
    World world(seed);
    const std::string fault = world.Run(kEvents);
    ASSERT_EQ(fault, "") << "seed " << seed << "\n" << world.engine().DebugString();
    commits += world.commits();
  }
  EXPECT_GT(commits, uint64_t{3} * kHistories) << "the histories get nowhere, so that they test little";
}

TEST(EnginePropertyTest, TheSameEventsGiveTheSameEffectsAndState) {
  for (int seed = 1; seed <= kHistories / 50; ++seed) {
    World world(seed);
    world.Run(kEvents);
    Engine again("job", Epoch(1), world.config(), MonotonicTime());
    std::vector<std::string> effects;
    for (const Logged& logged : world.log()) {
      for (const Effect& effect : again.Step(logged.at, logged.event)) effects.push_back(EffectText(effect));
    }
    ASSERT_EQ(effects, world.effects()) << "seed " << seed;
    ASSERT_EQ(again.DebugString(), world.engine().DebugString()) << "seed " << seed;
  }
}

// A second stream of a push replaces the first, by design; every other message is delivered twice, and every push that
// is in is sent once more.
TEST(EnginePropertyTest, HandlingAMessageTwiceIsHandlingItOnce) {
  for (int seed = 1; seed <= kHistories / 50; ++seed) {
    World world(seed);
    world.Run(kEvents);
    Engine once("job", Epoch(1), world.config(), MonotonicTime());
    Engine twice("job", Epoch(1), world.config(), MonotonicTime());
    int count = 0;
    for (const Logged& logged : world.log()) {
      once.Step(logged.at, logged.event);
      twice.Step(logged.at, logged.event);
      if (!std::holds_alternative<PushOpenedEvent>(logged.event)) twice.Step(logged.at, logged.event);
      if (++count % 50 == 0) {
        ASSERT_EQ(twice.DebugString(), once.DebugString()) << "seed " << seed << " event " << count;
      }
    }
    ASSERT_EQ(twice.DebugString(), once.DebugString()) << "seed " << seed;
  }
}

// The order in which deltas of a round arrive changes nothing of what is committed but their times.
TEST(EnginePropertyTest, TheOrderOfDeltasDoesNotShowInTheCommit) {
  std::vector<std::string> names = {"a", "b", "c", "d"};
  std::set<std::string> commits;
  do {
    v1::JobConfig config;
    config.mutable_barrier()->set_expected_workers(4);
    Engine engine("job", Epoch(1), *ResolveConfig(config), MonotonicTime());
    std::map<std::string, WorkerKey> who;
    uint64_t request = 0;
    for (const std::string name : {"a", "b", "c", "d"}) {
      engine.Step(MonotonicTime(), JoinEvent{RequestId(++request), name, name, name, "", 1});
      who[name] = {name, Incarnation(request)};
    }
    engine.Step(MonotonicTime(), InitialModelStoredEvent{RequestId(0), 9});
    for (const std::string& name : names) {
      PushOpenedEvent open;
      open.request = RequestId(++request);
      open.who = who[name];
      open.token = name;
      open.round = RoundId(1);
      open.base_digest = 9;
      engine.Step(MonotonicTime(), open);
      engine.Step(MonotonicTime(), PushVerifiedEvent{open.request, static_cast<uint32_t>(name[0]), 1, 1});
      for (const Effect& effect : engine.Step(MonotonicTime(), FoldedEvent{open.request})) {
        if (const auto* commit = std::get_if<Commit>(&effect)) commits.insert(commit->record.DebugString());
      }
    }
  } while (std::next_permutation(names.begin(), names.end()));
  EXPECT_EQ(commits.size(), 1u);
}

}  // namespace
}  // namespace bmuf::engine
