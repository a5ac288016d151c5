// Transcripts: testdata/*.txt tell a story as events, one a line, each followed by what the engine does ("  " lines).
// The test plays the events and compares the whole file. After a change that is meant:
//   bazel run //server/engine:transcript_test -- --update      rewrites the files in the source tree; read the diff.
//
// Lines (NAME is a worker; requests are numbered from 1 and shown as #n):
//   # text                          comment
//   config TEXTPROTO                a new engine with this JobConfig, resolved (again: another engine)
//   at DURATION                     time since the start; does nothing else
//   tick | next                     TickEvent now | at NextDeadline, which becomes the time
//   join NAME [instance=I] [trajectories=N] | heartbeat NAME | read NAME | leave NAME | evict NAME | readmit NAME
//   open NAME round=R [base=V] [base_digest=D] [digest=D] [samples=S] [tokens=T] [steps=S] [codec=C] [bytes=B] [model]
//   progress NAME BYTES | verified NAME [digest=D] [norm=X] [max=X] | broken NAME | spoilt NAME REASON
//   folded NAME | fold_refused NAME   (all of the push of NAME that was admitted last)
//   push NAME round=R ...           open, verified and folded in one
//   stored [digest=D] | store_failed | committed [digest=D] | commit_failed TEXT
//   update TEXTPROTO | pause TEXT | resume | drain
//   life NAME N                     the session of NAME that later lines use is its N-th
//   watch NAME ROUND                the next events of NAME's watch stream of the round
//   status                          the reason, the next deadline and the counters above 0
// Digests default to 7 for deltas, and to what the last stored or committed said for bases.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "core/base/error.h"
#include "google/protobuf/text_format.h"
#include "server/engine/effect_text.h"
#include "server/engine/engine.h"

namespace bmuf::engine {
namespace {

bool g_update = false;

class Player {
 public:
  // `line` without its comment; returns what it led to, one line each.
  std::vector<std::string> Play(const std::string& line) {
    out_.clear();
    const std::vector<std::string> head = absl::StrSplit(line, absl::MaxSplits(' ', 1));
    rest_ = head.size() > 1 ? head[1] : "";
    words_ = absl::StrSplit(line, ' ', absl::SkipEmpty());
    const std::string& verb = words_[0];
    if (verb == "config") {
      absl::StatusOr<v1::JobConfig> config = ResolveConfig(Config(rest_));
      if (!config.ok()) return {std::string(config.status().message())};
      *this = Player();
      engine_ = std::make_unique<Engine>("job", Epoch(1), *config, now_);
      return {};
    }
    if (engine_ == nullptr) return {"a transcript starts with config"};
    if (verb == "at") {
      absl::Duration at;
      if (!absl::ParseDuration(words_.at(1), &at)) return {"not a duration"};
      now_ = MonotonicTime::FromOrigin(at);
      return {};
    }
    if (!Act(verb)) return {absl::StrCat("not understood: ", line)};
    return out_;
  }

 private:
  struct Session {
    WorkerKey who;
    std::string token;
  };

  static v1::JobConfig Config(const std::string& text) {
    v1::JobConfig config;
    EXPECT_TRUE(google::protobuf::TextFormat::ParseFromString(text, &config)) << text;
    return config;
  }

  std::string Option(const std::string& key, const std::string& otherwise) const {
    for (const std::string& word : words_) {
      if (word.rfind(key + "=", 0) == 0) return word.substr(key.size() + 1);
    }
    return otherwise;
  }
  uint64_t Number(const std::string& key, uint64_t otherwise) const {
    uint64_t value = 0;
    return absl::SimpleAtoi(Option(key, absl::StrCat(otherwise)), &value) ? value : 0;
  }
  double Real(const std::string& key, double otherwise) const {
    double value = 0;
    return absl::SimpleAtod(Option(key, absl::StrCat(otherwise)), &value) ? value : 0;
  }
  const std::string& Name() const { return words_.at(1); }
  RequestId NewRequest() { return RequestId(++requests_); }
  const Session& Of(const std::string& name) {
    auto& lives = sessions_[name];
    if (lives.empty()) lives.push_back({{name, Incarnation(99)}, "unknown"});
    const auto chosen = life_.find(name);
    return chosen == life_.end() ? lives.back() : lives.at(chosen->second - 1);
  }

  void Step(const Event& event) {
    for (const Effect& effect : engine_->Step(now_, event)) {
      if (!std::holds_alternative<NotifyWatchers>(effect)) out_.push_back(EffectText(effect));
      if (const auto* join = std::get_if<ReplyJoin>(&effect); join != nullptr && join->answer.ok()) {
        const v1::Session& s = join->answer->session();
        auto& lives = sessions_[s.worker()];
        const Session session{{s.worker(), Incarnation(s.incarnation())}, s.token()};
        if (lives.empty() || lives.back().who.incarnation < session.who.incarnation) lives.push_back(session);
      }
      if (const auto* admit = std::get_if<AdmitPush>(&effect)) pushes_[opening_] = admit->request;
      if (const auto* store = std::get_if<StoreInitialModel>(&effect)) storing_ = store->request;
    }
    const absl::Status truth = invariants_.Check(*engine_);
    if (!truth.ok()) out_.push_back(absl::StrCat("VIOLATED: ", std::string(truth.message())));
  }

  void Open() {
    const Session& s = Of(Name());
    PushOpenedEvent e;
    e.request = NewRequest();
    opening_ = Name();
    e.who = s.who;
    e.token = s.token;
    const bool model = std::count(words_.begin(), words_.end(), "model") > 0;
    e.kind = model ? v1::PAYLOAD_KIND_INITIAL_MODEL : v1::PAYLOAD_KIND_DELTA;
    e.round = RoundId(Number("round", 0));
    e.base_version = ModelVersion(Number("base", e.round.value() == 0 ? 0 : e.round.value() - 1));
    e.base_digest = static_cast<uint32_t>(Number("base_digest", model_digest_));
    e.codec = static_cast<v1::Codec>(Number("codec", v1::CODEC_FP32));
    e.total_bytes = Number("bytes", 100);
    if (!Option("digest", "").empty()) e.digest = static_cast<uint32_t>(Number("digest", 0));
    e.facts.set_samples(Number("samples", 0));
    e.facts.set_tokens(Number("tokens", 0));
    e.facts.set_steps(Number("steps", 0));
    Step(e);
  }
  void Verified() {
    Step(PushVerifiedEvent{pushes_[Name()], static_cast<uint32_t>(Number("digest", 7)), Real("norm", 1),
                           Real("max", 0.5)});
  }

  bool Act(const std::string& verb) {
    if (verb == "tick") {
      Step(TickEvent{});
    } else if (verb == "next") {
      if (engine_->NextDeadline().is_infinite_future()) {
        out_.push_back("nothing is timed");
        return true;
      }
      now_ = std::max(now_, engine_->NextDeadline());
      out_.push_back(absl::StrCat("at ", absl::FormatDuration(now_.since_origin())));
      Step(TickEvent{});
    } else if (verb == "join") {
      const std::string instance = Option("instance", Name() + "-1");
      Step(JoinEvent{NewRequest(), Name(), instance, absl::StrCat("t", ++tokens_), "",
                     static_cast<uint32_t>(Number("trajectories", 1))});
    } else if (verb == "heartbeat") {
      Step(HeartbeatEvent{NewRequest(), Of(Name()).who, Of(Name()).token, 5});
    } else if (verb == "read") {
      Step(SignOfLifeEvent{Of(Name()).who, Of(Name()).token});
    } else if (verb == "leave") {
      Step(LeaveEvent{NewRequest(), Of(Name()).who, Of(Name()).token, ""});
    } else if (verb == "evict") {
      Step(EvictEvent{NewRequest(), Name()});
    } else if (verb == "readmit") {
      Step(ReadmitEvent{NewRequest(), Name()});
    } else if (verb == "open") {
      Open();
    } else if (verb == "progress") {
      uint64_t bytes = 0;
      if (!absl::SimpleAtoi(words_.at(2), &bytes)) return false;
      Step(PushProgressEvent{pushes_[Name()], bytes});
    } else if (verb == "verified") {
      Verified();
    } else if (verb == "broken") {
      Step(PushFailedEvent{pushes_[Name()], Error(v1::REASON_TRANSFER_CANCELLED, "the connection broke"), false});
    } else if (verb == "spoilt") {
      v1::Reason reason;
      if (!v1::Reason_Parse(absl::StrCat("REASON_", words_.at(2)), &reason)) return false;
      Step(PushFailedEvent{pushes_[Name()], Error(reason, "element 3 of w is bad"), true});
    } else if (verb == "folded") {
      Step(FoldedEvent{pushes_[Name()]});
    } else if (verb == "fold_refused") {
      Step(FoldRefusedEvent{pushes_[Name()], Error(v1::REASON_OUT_OF_RANGE_DELTA, "the sum leaves the exact range")});
    } else if (verb == "push") {
      Open();
      Verified();
      Step(FoldedEvent{pushes_[Name()]});
    } else if (verb == "stored") {
      model_digest_ = static_cast<uint32_t>(Number("digest", 100));
      Step(InitialModelStoredEvent{storing_, model_digest_});
    } else if (verb == "store_failed") {
      Step(InitialModelFailedEvent{storing_, Error(v1::REASON_NON_FINITE_DELTA, "element 0 of w is NaN")});
    } else if (verb == "committed") {
      const RoundId round = engine_->round();
      model_digest_ = static_cast<uint32_t>(Number("digest", 100 + round.value()));
      Step(CommittedEvent{round, model_digest_, 0.25, absl::UnixEpoch()});
    } else if (verb == "commit_failed") {
      Step(CommitFailedEvent{engine_->round(), rest_});
    } else if (verb == "update") {
      absl::StatusOr<v1::JobConfig> next = ApplyChanges(engine_->config(), Config(rest_), engine_->has_model());
      if (!next.ok()) {
        out_.push_back(std::string(next.status().message()));
      } else {
        Step(UpdateConfigEvent{NewRequest(), *next});
      }
    } else if (verb == "pause") {
      Step(PauseEvent{NewRequest(), rest_});
    } else if (verb == "resume") {
      Step(ResumeEvent{NewRequest()});
    } else if (verb == "drain") {
      Step(DrainEvent{});
    } else if (verb == "life") {
      return absl::SimpleAtoi(words_.at(2), &life_[Name()]);
    } else if (verb == "watch") {
      uint64_t round = 0;
      if (!absl::SimpleAtoi(words_.at(2), &round)) return false;
      const auto key = absl::StrCat(Name(), "/", Of(Name()).who.incarnation.value(), "/", round);
      WatchCursor& cursor = cursors_[key];
      cursor.round = RoundId(round);
      cursor.who = Of(Name()).who;
      for (const auto& event : engine_->NextWatchEvents(now_, cursor)) out_.push_back(WatchText(event));
    } else if (verb == "status") {
      Status();
    } else {
      return false;
    }
    return true;
  }

  void Status() {
    v1::JobStatus status;
    engine_->FillStatus(now_, absl::UnixEpoch() + now_.since_origin(), &status);
    out_.push_back(absl::StrCat(v1::JobState_Name(status.state()), " \"", status.round().reason(), "\""));
    const MonotonicTime next = engine_->NextDeadline();
    out_.push_back(absl::StrCat("next tick at ", absl::FormatDuration(next.since_origin())));
    for (const auto& w : status.workers()) {
      out_.push_back(absl::StrCat(w.worker(), "/", w.incarnation(), " ", v1::WorkerStatus::State_Name(w.state()), " ",
                                  v1::WorkerStatus::Part_Name(w.part())));
    }
    const std::map<std::string, uint64_t> counters(status.counters().begin(), status.counters().end());
    for (const auto& [name, value] : counters) {
      if (value > 0) out_.push_back(absl::StrCat(name, " ", value));
    }
  }

  std::unique_ptr<Engine> engine_;
  Invariants invariants_;
  MonotonicTime now_;
  uint64_t requests_ = 0, tokens_ = 0;
  uint32_t model_digest_ = 0;
  RequestId storing_;
  std::string opening_;  // Whose push was opened last.
  std::map<std::string, std::vector<Session>> sessions_;
  std::map<std::string, size_t> life_;
  std::map<std::string, RequestId> pushes_;
  std::map<std::string, WatchCursor> cursors_;
  std::vector<std::string> out_;
  std::vector<std::string> words_;
  std::string rest_;
};

std::string ReadFile(const std::filesystem::path& path) {
  std::ifstream in(path);
  std::stringstream text;
  text << in.rdbuf();
  return text.str();
}

std::string Replay(const std::string& text) {
  Player player;
  std::string played;
  const std::vector<std::string> lines = absl::StrSplit(text, '\n');
  for (const std::string& line : lines) {
    if (line.rfind("  ", 0) == 0) continue;  // What it said before.
    absl::StrAppend(&played, line, "\n");
    if (line.empty() || line[0] == '#') continue;
    for (const std::string& result : player.Play(line)) absl::StrAppend(&played, "  ", result, "\n");
  }
  if (!played.empty()) played.pop_back();  // The split ends with an empty piece.
  return played;
}

TEST(TranscriptTest, EveryStoryIsToldAsWritten) {
  const char* workspace = std::getenv("BUILD_WORKSPACE_DIRECTORY");
  std::filesystem::path root = workspace != nullptr ? workspace : ".";
  int count = 0;
  for (const auto& file : std::filesystem::directory_iterator(root / "server/engine/testdata")) {
    if (file.path().extension() != ".txt") continue;
    ++count;
    const std::string text = ReadFile(file.path());
    const std::string played = Replay(text);
    EXPECT_EQ(played.find("not understood"), std::string::npos) << file.path();
    EXPECT_EQ(played.find("VIOLATED"), std::string::npos) << file.path() << "\n" << played;
    if (g_update) {
      std::ofstream(file.path()) << played;
    } else {
      EXPECT_EQ(played, text) << file.path() << ": run with --update if the change is meant";
    }
  }
  EXPECT_GE(count, 10) << "the stories were not found";
}

}  // namespace
}  // namespace bmuf::engine

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  for (int i = 1; i < argc; ++i) {
    if (std::string(argv[i]) == "--update") bmuf::engine::g_update = true;
  }
  return RUN_ALL_TESTS();
}
