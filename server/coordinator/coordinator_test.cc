#include "server/coordinator/coordinator.h"

#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/base/crc32c.h"
#include "core/base/error.h"
#include "core/base/limits.h"
#include "gtest/gtest.h"
#include "server/storage/memory_ledger.h"

namespace bmuf::coordinator {
namespace {

template <typename T>
struct Answer {
  std::optional<absl::StatusOr<T>> value;
  Reply<T> reply() {
    return [this](absl::StatusOr<T> v) {
      EXPECT_FALSE(value.has_value()) << "answered twice";
      value = std::move(v);
    };
  }
  const T& ok() {
    EXPECT_TRUE(value.has_value() && value->ok()) << (value.has_value() ? value->status().ToString() : "no answer");
    return **value;
  }
  v1::Reason reason() const { return value.has_value() ? ReasonOf(value->status()) : v1::REASON_UNSPECIFIED; }
};

// What an observer of commits and their steps saw, in order.
class Recorder : public Observer, public Seams {
 public:
  void OnCommitted(const std::string& job, const v1::RoundRecord& record) override {
    events.push_back(absl::StrCat("committed ", job, " ", record.round()));
  }
  void OnFatal(const absl::Status& why) override { events.push_back("fatal " + ReasonName(ReasonOf(why))); }
  void Reached(absl::string_view point) override {
    events.push_back(std::string(point));
    if (on_point) on_point(point);
  }
  std::vector<std::string> events;
  std::function<void(absl::string_view)> on_point;
};

// A coordinator whose loop, clock and executor the test turns by hand.
class CoordinatorTest : public testing::Test {
 protected:
  CoordinatorTest() { Make({}); }
  ~CoordinatorTest() override { Settle(); }

  void Make(Coordinator::Options options) {
    coordinator_.reset();
    epoch_ = *ledger_.RaiseEpoch();
    options.on_ending = [this](Coordinator::Ending ending) { ending_ = ending; };
    coordinator_ = std::make_unique<Coordinator>(
        Coordinator::Parts{loop_, [this](std::function<void()> task) { work_.push_back(std::move(task)); }, pool_,
                           ScalarKernels(), budget_, ledger_, epoch_, recorder_, recorder_,
                           [this] { return absl::StrCat("token-", ++tokens_); }},
        std::move(options));
  }

  // Until nothing is queued anywhere. Time does not move.
  void Settle() {
    while (loop_.Turn() || RunWork()) {
    }
  }
  bool RunWork() {
    if (work_.empty()) return false;
    auto task = std::move(work_.front());
    work_.pop_front();
    task();
    return true;
  }
  void Pass(absl::Duration d) {
    // In steps, as a real timer would see it.
    const MonotonicTime end = clock_.Now() + d;
    while (clock_.Now() < end) {
      clock_.Advance(std::min(absl::Milliseconds(50), end - clock_.Now()));
      Settle();
    }
  }

  void CreateJob(const std::string& name, v1::JobConfig config = {}) {
    v1::CreateJobRequest request;
    request.set_job(name);
    *request.mutable_config() = std::move(config);
    Answer<v1::CreateJobResponse> answer;
    coordinator_->CreateJob(request, answer.reply());
    Settle();
    answer.ok();
  }

  static v1::JobConfig Averaging(uint32_t workers) {
    v1::JobConfig config;
    config.mutable_outer()->set_variant(v1::VARIANT_AVERAGING);
    config.mutable_barrier()->set_min_workers(workers);
    return config;
  }

  static v1::Manifest FlatManifest(uint64_t elements, const std::string& name = "w") {
    v1::Manifest manifest;
    v1::TensorSpec* tensor = manifest.add_tensors();
    tensor->set_name(name);
    tensor->add_shape(elements);
    tensor->set_dtype(v1::DTYPE_F32);
    tensor->set_role(v1::TENSOR_ROLE_BMUF);
    return manifest;
  }

  absl::StatusOr<v1::JoinResponse> Join(const std::string& job, const std::string& worker, uint64_t elements = 2,
                                        const std::string& tensor = "w") {
    v1::JoinRequest request;
    request.set_protocol_min(1);
    request.set_protocol_max(1);
    request.set_job(job);
    request.set_worker(worker);
    request.set_instance("instance of " + worker + " 0123456789");
    *request.mutable_manifest() = FlatManifest(elements, tensor);
    Answer<v1::JoinResponse> answer;
    coordinator_->Join(request, answer.reply());
    Settle();
    EXPECT_TRUE(answer.value.has_value());
    return answer.value.value_or(absl::UnknownError("no answer"));
  }

  static std::string Payload(const std::vector<float>& values) {
    return std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float));
  }

  struct Stream {
    bool admitted = false;
    Answer<v1::PushDeltaResponse> answer;
    std::shared_ptr<Push> push;
  };

  v1::PushHeader Header(const v1::Session& session, uint64_t round, uint64_t bytes, uint32_t base_digest) {
    v1::PushHeader header;
    *header.mutable_session() = session;
    header.set_kind(round == 0 ? v1::PAYLOAD_KIND_INITIAL_MODEL : v1::PAYLOAD_KIND_DELTA);
    header.set_round(round);
    header.set_base_version(round == 0 ? 0 : round - 1);
    header.set_base_digest(base_digest);
    header.set_codec(v1::CODEC_FP32);
    header.set_payload_bytes(bytes);
    return header;
  }

  std::unique_ptr<Stream> Open(const v1::PushHeader& header) {
    auto stream = std::make_unique<Stream>();
    Stream* raw = stream.get();
    stream->push = coordinator_->OpenPush(header, {[raw] { raw->admitted = true; }, stream->answer.reply()});
    Settle();
    return stream;
  }

  static bool Send(Stream& stream, const std::string& payload, uint64_t offset = 0) {
    v1::Chunk chunk;
    chunk.set_offset(offset);
    chunk.set_data(payload.substr(offset));
    chunk.set_crc32c(Crc32c(chunk.data().data(), chunk.data().size()));
    return stream.push->Append(chunk);
  }

  std::unique_ptr<Stream> PushAll(const v1::Session& session, uint64_t round, const std::string& payload,
                                  uint32_t base_digest = 0) {
    auto stream = Open(Header(session, round, payload.size(), base_digest));
    if (stream->admitted) {
      Send(*stream, payload);
      stream->push->End(Crc32c(payload.data(), payload.size()));
      Settle();
    }
    return stream;
  }

  struct RoundLog {
    std::vector<v1::WatchRoundResponse> events;
    std::optional<absl::Status> end;
    bool Has(v1::WatchRoundResponse::EventCase kind) const {
      return std::any_of(events.begin(), events.end(), [&](const auto& e) { return e.event_case() == kind; });
    }
    int Count(v1::WatchRoundResponse::EventCase kind) const {
      return std::count_if(events.begin(), events.end(), [&](const auto& e) { return e.event_case() == kind; });
    }
  };

  std::unique_ptr<RoundLog> WatchRound(const v1::Session& session, uint64_t round) {
    auto log = std::make_unique<RoundLog>();
    v1::WatchRoundRequest request;
    *request.mutable_session() = session;
    request.set_round(round);
    coordinator_->WatchRound(request, [raw = log.get()](auto events, auto end) {
      EXPECT_FALSE(raw->end.has_value()) << "news after the end";
      for (auto& event : events) raw->events.push_back(std::move(event));
      if (end.has_value()) raw->end = std::move(end);
    });
    Settle();
    return log;
  }

  absl::StatusOr<std::vector<float>> Pull(const std::string& job, std::optional<uint64_t> version = std::nullopt) {
    v1::PullModelRequest request;
    request.set_job(job);
    if (version.has_value()) request.set_version(*version);
    Answer<PullSource> answer;
    coordinator_->OpenPull(request, answer.reply());
    Settle();
    if (!answer.value->ok()) return answer.value->status();
    const PullSource& source = answer.ok();
    std::string bytes;
    while (bytes.size() < source.length) {
      const auto piece = source.payload.At(source.offset + bytes.size(), source.length - bytes.size());
      bytes.append(reinterpret_cast<const char*>(piece.data()), piece.size());
    }
    EXPECT_EQ(Crc32c(bytes.data(), bytes.size()), source.header.payload_digest());
    std::vector<float> values(bytes.size() / 4);
    std::memcpy(values.data(), bytes.data(), bytes.size());
    return values;
  }

  v1::JobStatus Status(const std::string& job) {
    v1::GetStatusRequest request;
    request.set_job(job);
    Answer<v1::GetStatusResponse> answer;
    coordinator_->GetStatus(request, answer.reply());
    Settle();
    return answer.ok().jobs(0);
  }

  // A job with `names` as members, a model of zeros, and round 1 open.
  std::vector<v1::Session> Ready(const std::string& job, const std::vector<std::string>& names, uint64_t elements = 2) {
    std::vector<v1::Session> sessions;
    for (const std::string& name : names) {
      auto joined = Join(job, name, elements);
      EXPECT_TRUE(joined.ok()) << joined.status();
      sessions.push_back(joined->session());
    }
    auto initial = PushAll(sessions[0], 0, Payload(std::vector<float>(elements, 0)));
    EXPECT_EQ(initial->answer.ok().outcome(), v1::PUSH_OUTCOME_ACCEPTED);
    return sessions;
  }

  ManualClock clock_;
  Loop loop_{clock_, {}};
  ThreadPool pool_{"test", 1};
  MemoryBudget budget_{uint64_t{1} << 24};
  storage::MemoryLedger ledger_{Epoch(6)};
  Recorder recorder_;
  Epoch epoch_;
  int tokens_ = 0;
  std::deque<std::function<void()>> work_;
  std::optional<Coordinator::Ending> ending_;
  std::unique_ptr<Coordinator> coordinator_;
};

TEST_F(CoordinatorTest, ARoundFromJoinToTheNewModel) {
  CreateJob("j", Averaging(2));
  auto sessions = Ready("j", {"a", "b"});
  EXPECT_EQ(sessions[0].epoch(), epoch_.value());
  const uint32_t digest = Status("j").model_digest();
  auto watch = WatchRound(sessions[0], 1);
  ASSERT_TRUE(watch->Has(v1::WatchRoundResponse::kStarted));
  EXPECT_EQ(PushAll(sessions[0], 1, Payload({2, 4}), digest)->answer.ok().outcome(), v1::PUSH_OUTCOME_ACCEPTED);
  EXPECT_FALSE(watch->Has(v1::WatchRoundResponse::kCommitted));
  EXPECT_EQ(PushAll(sessions[1], 1, Payload({4, 8}), digest)->answer.ok().outcome(), v1::PUSH_OUTCOME_ACCEPTED);
  ASSERT_TRUE(watch->Has(v1::WatchRoundResponse::kCommitted));
  EXPECT_EQ(watch->end, absl::OkStatus());
  EXPECT_EQ(*Pull("j"), (std::vector<float>{3, 6}));
  EXPECT_EQ(*Pull("j", 0), (std::vector<float>{0, 0}));
  // What was kept is what was published.
  const auto kept = *ledger_.ReadAll();
  ASSERT_EQ(kept.jobs.at("j").rounds.size(), 1u);
  EXPECT_EQ(kept.jobs.at("j").rounds[0].model_digest(), Status("j").model_digest());
  EXPECT_TRUE(kept.jobs.at("j").job.manifest.has_value());
}

TEST_F(CoordinatorTest, CommitIsDurableThenPublishedThenAcknowledged) {
  CreateJob("j", Averaging(1));
  auto sessions = Ready("j", {"a"});
  auto watch = WatchRound(sessions[0], 1);
  recorder_.on_point = [&](absl::string_view point) {
    const size_t kept = ledger_.ReadAll()->jobs.at("j").rounds.size();
    EXPECT_EQ(kept, point == kCommitComputed ? 0u : 1u) << std::string(point);
    EXPECT_FALSE(watch->Has(v1::WatchRoundResponse::kCommitted)) << std::string(point);
  };
  PushAll(sessions[0], 1, Payload({1, 1}), Status("j").model_digest());
  EXPECT_EQ(recorder_.events,
            (std::vector<std::string>{"commit.computed", "commit.durable", "commit.published", "committed j 1"}));
}

TEST_F(CoordinatorTest, WhatCannotBeKeptIsNeverAcknowledged) {
  CreateJob("j", Averaging(1));
  auto sessions = Ready("j", {"a"});
  auto watch = WatchRound(sessions[0], 1);
  ASSERT_TRUE(ledger_.RaiseEpoch().ok());  // Another daemon took over.
  PushAll(sessions[0], 1, Payload({1, 1}), Status("j").model_digest());
  EXPECT_EQ(recorder_.events.back(), "fatal EPOCH_CHANGED");
  EXPECT_FALSE(watch->Has(v1::WatchRoundResponse::kCommitted));
  EXPECT_EQ(*Pull("j"), (std::vector<float>{0, 0}));
}

TEST_F(CoordinatorTest, TheFirstManifestIsTheJobsAndOthersAreRefused) {
  CreateJob("j", Averaging(1));
  ASSERT_TRUE(Join("j", "a", 2).ok());
  EXPECT_EQ(ReasonOf(Join("j", "b", 3).status()), v1::REASON_MANIFEST_MISMATCH);
  EXPECT_EQ(ReasonOf(Join("j", "b", 2, "other").status()), v1::REASON_MANIFEST_MISMATCH);
  EXPECT_TRUE(Join("j", "b", 2).ok());
  EXPECT_EQ(ReasonOf(Join("nobody", "a").status()), v1::REASON_JOB_NOT_FOUND);
}

TEST_F(CoordinatorTest, AManifestThatWasAMistakeLeavesWithItsWorker) {
  CreateJob("j", Averaging(1));
  auto joined = Join("j", "a", 3);
  ASSERT_TRUE(joined.ok());
  v1::LeaveRequest leave;
  *leave.mutable_session() = joined->session();
  Answer<v1::LeaveResponse> left;
  coordinator_->Leave(leave, left.reply());
  Settle();
  left.ok();
  const uint64_t before = budget_.used_bytes();
  EXPECT_TRUE(Join("j", "b", 2).ok());
  EXPECT_LT(budget_.used_bytes(), before);
}

TEST_F(CoordinatorTest, AModelThatDoesNotFitIsRefusedWithBothNumbers) {
  CreateJob("j", Averaging(1));
  const absl::Status refused = Join("j", "a", uint64_t{1} << 22).status();
  EXPECT_EQ(ReasonOf(refused), v1::REASON_MODEL_TOO_LARGE);
  EXPECT_EQ(MetadataOf(refused, "limit_bytes"), "16777216");
  EXPECT_FALSE(MetadataOf(refused, "required_bytes").empty());
  EXPECT_EQ(budget_.used_bytes(), 0u);
  EXPECT_TRUE(Join("j", "a", 2).ok());
}

TEST_F(CoordinatorTest, APushThatBreaksIsResumedAtItsOffset) {
  CreateJob("j", Averaging(1));
  auto sessions = Ready("j", {"a"}, 8);
  const uint32_t digest = Status("j").model_digest();
  const std::string payload = Payload({1, 2, 3, 4, 5, 6, 7, 8});
  auto stream = Open(Header(sessions[0], 1, payload.size(), digest));
  ASSERT_TRUE(stream->admitted);
  ASSERT_TRUE(Send(*stream, payload.substr(0, 12)));
  stream->push->Fail(Error(v1::REASON_TRANSFER_CANCELLED, "the connection broke"), true);
  Settle();

  v1::QueryPushRequest query;
  *query.mutable_session() = sessions[0];
  query.set_round(1);
  Answer<v1::QueryPushResponse> where;
  coordinator_->QueryPush(query, where.reply());
  Settle();
  EXPECT_EQ(where.ok().committed_offset(), 12u);
  EXPECT_EQ(where.ok().crc32c(), Crc32c(payload.data(), 12));

  v1::PushHeader header = Header(sessions[0], 1, payload.size(), digest);
  header.set_resume_offset(8);
  auto wrong = Open(header);
  EXPECT_EQ(wrong->answer.reason(), v1::REASON_OFFSET_MISMATCH);
  EXPECT_EQ(MetadataOf(wrong->answer.value->status(), "offset"), "12");
  header.set_resume_offset(12);
  auto resumed = Open(header);
  ASSERT_TRUE(resumed->admitted);
  ASSERT_TRUE(Send(*resumed, payload, 12));
  resumed->push->End(Crc32c(payload.data(), payload.size()));
  Settle();
  EXPECT_EQ(resumed->answer.ok().outcome(), v1::PUSH_OUTCOME_ACCEPTED);
  EXPECT_EQ(*Pull("j"), (std::vector<float>{1, 2, 3, 4, 5, 6, 7, 8}));
}

TEST_F(CoordinatorTest, AskingWhereAPushStandsEndsItsOldStream) {
  CreateJob("j", Averaging(1));
  auto sessions = Ready("j", {"a"});
  const std::string payload = Payload({1, 2});
  auto stream = Open(Header(sessions[0], 1, payload.size(), Status("j").model_digest()));
  ASSERT_TRUE(Send(*stream, payload.substr(0, 4)));
  v1::QueryPushRequest query;
  *query.mutable_session() = sessions[0];
  query.set_round(1);
  Answer<v1::QueryPushResponse> where;
  coordinator_->QueryPush(query, where.reply());
  Settle();
  EXPECT_EQ(where.ok().committed_offset(), 4u);
  EXPECT_EQ(stream->answer.reason(), v1::REASON_TRANSFER_CANCELLED);
  EXPECT_FALSE(Send(*stream, payload, 4));
}

TEST_F(CoordinatorTest, ProtocolFaultsOfAStreamLeaveNothingBehind) {
  CreateJob("j", Averaging(1));
  auto sessions = Ready("j", {"a"});
  const uint32_t digest = Status("j").model_digest();
  const std::string payload = Payload({1, 2});
  auto gap = Open(Header(sessions[0], 1, 8, digest));
  ASSERT_TRUE(Send(*gap, payload.substr(0, 4)));
  v1::Chunk chunk;
  chunk.set_offset(6);
  chunk.set_data("xx");
  EXPECT_FALSE(gap->push->Append(chunk));
  Settle();
  EXPECT_EQ(gap->answer.reason(), v1::REASON_OFFSET_MISMATCH);
  v1::PushHeader header = Header(sessions[0], 1, 8, digest);
  header.set_resume_offset(4);
  EXPECT_EQ(Open(header)->answer.reason(), v1::REASON_OFFSET_MISMATCH);

  auto early = Open(Header(sessions[0], 1, 8, digest));
  Send(*early, payload.substr(0, 4));
  early->push->End(0);
  Settle();
  EXPECT_EQ(early->answer.reason(), v1::REASON_BAD_CHUNK);
  EXPECT_EQ(Open(Header(sessions[0], 1, 12, digest))->answer.reason(), v1::REASON_SIZE_MISMATCH);
  EXPECT_EQ(PushAll(sessions[0], 1, payload, digest)->answer.ok().outcome(), v1::PUSH_OUTCOME_ACCEPTED);
  EXPECT_EQ(*Pull("j"), (std::vector<float>{1, 2}));
}

TEST_F(CoordinatorTest, NonFiniteContentIsRefusedAndNamed) {
  CreateJob("j", Averaging(2));
  auto sessions = Ready("j", {"a", "b"});
  const uint32_t digest = Status("j").model_digest();
  auto bad = PushAll(sessions[0], 1, Payload({1, std::numeric_limits<float>::quiet_NaN()}), digest);
  EXPECT_EQ(bad->answer.reason(), v1::REASON_NON_FINITE_DELTA);
  EXPECT_EQ(MetadataOf(bad->answer.value->status(), "tensor"), "w");
  EXPECT_EQ(MetadataOf(bad->answer.value->status(), "index"), "1");
  EXPECT_EQ(*Pull("j"), (std::vector<float>{0, 0}));
}

TEST_F(CoordinatorTest, ASilentPushIsEndedAndCounted) {
  v1::JobConfig config = Averaging(1);
  config.mutable_lease()->set_seconds(600);
  CreateJob("j", config);
  auto sessions = Ready("j", {"a"});
  auto stream = Open(Header(sessions[0], 1, 8, Status("j").model_digest()));
  ASSERT_TRUE(stream->admitted);
  Pass(absl::Seconds(9));
  EXPECT_FALSE(stream->answer.value.has_value());
  Pass(absl::Seconds(2));
  EXPECT_EQ(stream->answer.reason(), v1::REASON_TOO_SLOW);
  Answer<v1::GetStatusResponse> status;
  coordinator_->GetStatus({}, status.reply());
  Settle();
  EXPECT_EQ(status.ok().counters().at("transfers_too_slow_total"), 1u);
}

TEST_F(CoordinatorTest, ProgressIsShownWhileBytesComeIn) {
  CreateJob("j", Averaging(1));
  auto sessions = Ready("j", {"a"}, 4);
  auto stream = Open(Header(sessions[0], 1, 16, Status("j").model_digest()));
  Send(*stream, std::string(4, '\0'));
  Pass(absl::Milliseconds(200));
  EXPECT_EQ(Status("j").workers(0).received_bytes(), 4u);
}

TEST_F(CoordinatorTest, WaitingIsToldAtMostEvery100Milliseconds) {
  CreateJob("j", Averaging(3));
  auto sessions = Ready("j", {"a", "b", "c"});
  const uint32_t digest = Status("j").model_digest();
  Pass(absl::Seconds(2));
  auto watch = WatchRound(sessions[0], 1);
  const int before = watch->Count(v1::WatchRoundResponse::kWaiting);
  PushAll(sessions[0], 1, Payload({1, 1}), digest);
  PushAll(sessions[1], 1, Payload({1, 1}), digest);
  EXPECT_EQ(watch->Count(v1::WatchRoundResponse::kWaiting), before);
  Pass(absl::Milliseconds(150));
  EXPECT_EQ(watch->Count(v1::WatchRoundResponse::kWaiting), before + 1);
  EXPECT_EQ(watch->events.back().waiting().have(), 2u);
}

TEST_F(CoordinatorTest, AWatchEndsWithItsSession) {
  CreateJob("j", Averaging(2));
  auto sessions = Ready("j", {"a", "b"});
  auto watch = WatchRound(sessions[0], 1);
  v1::EvictWorkerRequest evict;
  evict.set_job("j");
  evict.set_worker("a");
  Answer<v1::EvictWorkerResponse> evicted;
  coordinator_->EvictWorker(evict, evicted.reply());
  Pass(absl::Milliseconds(200));
  evicted.ok();
  ASSERT_TRUE(watch->end.has_value());
  EXPECT_EQ(ReasonOf(*watch->end), v1::REASON_WORKER_EVICTED);
}

TEST_F(CoordinatorTest, SessionsOfAnotherEpochOrWithAGuessedTokenAreRefused) {
  CreateJob("j", Averaging(1));
  v1::HeartbeatRequest beat;
  *beat.mutable_session() = Ready("j", {"a"})[0];
  beat.mutable_session()->set_token("guess");
  Answer<v1::HeartbeatResponse> guessed, old;
  coordinator_->Heartbeat(beat, guessed.reply());
  beat.mutable_session()->set_epoch(1);
  coordinator_->Heartbeat(beat, old.reply());
  Settle();
  EXPECT_EQ(guessed.reason(), v1::REASON_SESSION_NOT_FOUND);
  EXPECT_EQ(old.reason(), v1::REASON_EPOCH_CHANGED);
}

TEST_F(CoordinatorTest, TheSameJobTwiceIsOneAndAnotherOfItsNameIsRefused) {
  v1::CreateJobRequest request;
  request.set_job("j");
  *request.mutable_config() = Averaging(2);
  Answer<v1::CreateJobResponse> first, second, other;
  coordinator_->CreateJob(request, first.reply());
  coordinator_->CreateJob(request, second.reply());  // While the first one is being written down.
  request.mutable_config()->mutable_barrier()->set_min_workers(3);
  coordinator_->CreateJob(request, other.reply());
  Settle();
  first.ok();
  second.ok();
  EXPECT_EQ(other.reason(), v1::REASON_JOB_EXISTS);
}

TEST_F(CoordinatorTest, UpdatesInARowAllCount) {
  CreateJob("j", Averaging(1));
  v1::UpdateJobRequest request;
  request.set_job("j");
  request.mutable_changes()->set_block_steps(7);
  Answer<v1::UpdateJobResponse> first, second;
  coordinator_->UpdateJob(request, first.reply());
  request.mutable_changes()->Clear();
  request.mutable_changes()->set_max_rounds(9);
  coordinator_->UpdateJob(request, second.reply());
  Settle();
  first.ok();
  EXPECT_EQ(second.ok().job().config().block_steps(), 7u);
  EXPECT_EQ(second.ok().job().config().max_rounds(), 9u);
  EXPECT_EQ(ledger_.ReadAll()->jobs.at("j").job.config.block_steps(), 7u);
}

TEST_F(CoordinatorTest, ADrainWaitsForTheOpenRoundAndRefusesNewcomers) {
  CreateJob("j", Averaging(2));
  auto sessions = Ready("j", {"a", "b"});
  const uint32_t digest = Status("j").model_digest();
  auto watch = WatchRound(sessions[0], 1);
  PushAll(sessions[0], 1, Payload({1, 1}), digest);
  Answer<v1::DrainResponse> drain;
  coordinator_->Drain({}, drain.reply());
  Pass(absl::Seconds(1));
  EXPECT_FALSE(ending_.has_value());
  EXPECT_EQ(ReasonOf(Join("j", "c").status()), v1::REASON_DRAINING);
  PushAll(sessions[1], 1, Payload({1, 1}), digest);
  EXPECT_TRUE(watch->Has(v1::WatchRoundResponse::kCommitted));
  Pass(absl::Milliseconds(100));
  EXPECT_EQ(ending_, Coordinator::Ending::kDrained);
}

TEST_F(CoordinatorTest, ADrainDoesNotWaitLongerThanItMay) {
  CreateJob("j", Averaging(2));
  auto sessions = Ready("j", {"a", "b"});
  Answer<v1::DrainResponse> drain;
  coordinator_->Drain({}, drain.reply());
  Pass(absl::Seconds(24));
  EXPECT_FALSE(ending_.has_value());
  Pass(absl::Seconds(2));
  EXPECT_EQ(ending_, Coordinator::Ending::kDrained);
}

TEST_F(CoordinatorTest, TheDaemonMayEndWithItsJobs) {
  Coordinator::Options options;
  options.exit_when_done = true;
  Make(options);
  v1::JobConfig config = Averaging(1);
  config.set_max_rounds(1);
  config.mutable_lease()->set_seconds(600);
  CreateJob("j", config);
  auto sessions = Ready("j", {"a"});
  Pass(absl::Seconds(30));
  EXPECT_FALSE(ending_.has_value());
  PushAll(sessions[0], 1, Payload({1, 1}), Status("j").model_digest());
  Pass(absl::Seconds(9));
  EXPECT_FALSE(ending_.has_value());  // The worker may still want to read the model.
  Pass(absl::Seconds(2));
  EXPECT_EQ(ending_, Coordinator::Ending::kAllFinished);
}

TEST_F(CoordinatorTest, AbandonAnswersEverythingThatIsOpenAndEverythingLater) {
  CreateJob("j", Averaging(2));
  auto sessions = Ready("j", {"a", "b"});
  auto watch = WatchRound(sessions[0], 1);
  auto stream = Open(Header(sessions[0], 1, 8, Status("j").model_digest()));
  ASSERT_TRUE(stream->admitted);
  coordinator_->Abandon();
  Settle();
  EXPECT_EQ(stream->answer.reason(), v1::REASON_DRAINING);
  ASSERT_TRUE(watch->end.has_value());
  EXPECT_EQ(ReasonOf(*watch->end), v1::REASON_DRAINING);
  EXPECT_EQ(ReasonOf(Join("j", "c").status()), v1::REASON_DRAINING);
}

TEST_F(CoordinatorTest, ALeaseRunsOutOnlyAfterQueuedHeartbeatsWereHeard) {
  CreateJob("j", Averaging(2));
  auto sessions = Ready("j", {"a", "b"});
  clock_.Advance(absl::Hours(1));  // The process slept.
  v1::HeartbeatRequest beat;
  *beat.mutable_session() = sessions[0];
  Answer<v1::HeartbeatResponse> answer;
  coordinator_->Heartbeat(beat, answer.reply());
  Settle();
  answer.ok();
  std::map<std::string, v1::WorkerStatus::State> states;
  const v1::JobStatus status = Status("j");
  for (const auto& worker : status.workers()) states[worker.worker()] = worker.state();
  EXPECT_EQ(states["a"], v1::WorkerStatus::STATE_ACTIVE);
  EXPECT_EQ(states["b"], v1::WorkerStatus::STATE_EXPIRED);
}

}  // namespace
}  // namespace bmuf::coordinator
