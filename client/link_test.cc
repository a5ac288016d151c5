#include "client/link.h"

#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <variant>
#include <vector>

#include "client/fake_coordinator.h"
#include "core/base/crc32c.h"
#include "core/base/error.h"
#include "gtest/gtest.h"

namespace bmuf::client {
namespace {

constexpr uint64_t kElements = 64;  // 256 bytes: four chunks of the fake's pulls.

v1::Manifest ManifestOf(uint64_t elements, uint64_t means = 0) {
  v1::Manifest manifest;
  v1::TensorSpec* spec = manifest.add_tensors();
  spec->set_name("w");
  spec->add_shape(elements);
  spec->set_dtype(v1::DTYPE_F32);
  spec->set_role(v1::TENSOR_ROLE_BMUF);
  if (means > 0) {
    spec = manifest.add_tensors();
    spec->set_name("mean");
    spec->add_shape(means);
    spec->set_dtype(v1::DTYPE_F32);
    spec->set_role(v1::TENSOR_ROLE_MEAN);
  }
  return manifest;
}

std::string PayloadOf(const std::vector<float>& values) {
  return std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float));
}

absl::Span<const uint8_t> Bytes(const std::string& payload) {
  return absl::MakeConstSpan(reinterpret_cast<const uint8_t*>(payload.data()), payload.size());
}

uint32_t DigestOf(const std::string& payload) { return Crc32c(payload.data(), payload.size()); }

// Lines of the log that tests wait for. Thread-safe.
class Lines {
 public:
  void Add(const std::string& line) {
    absl::MutexLock lock(&mu_);
    lines_.push_back(line);
  }
  int Count(const std::string& part) const {
    absl::MutexLock lock(&mu_);
    return CountLocked(part);
  }
  bool Await(const std::string& part) const {
    const auto there = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return CountLocked(part) > 0; };
    absl::MutexLock lock(&mu_);
    return mu_.AwaitWithTimeout(absl::Condition(&there), absl::Seconds(10));
  }

 private:
  int CountLocked(const std::string& part) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    int count = 0;
    for (const std::string& line : lines_) count += line.find(part) != std::string::npos;
    return count;
  }
  mutable absl::Mutex mu_;
  std::vector<std::string> lines_ ABSL_GUARDED_BY(mu_);
};

class LinkTest : public testing::Test {
 protected:
  std::unique_ptr<Link> MakeLink(uint64_t elements = kElements, uint64_t means = 0) {
    LinkOptions options;
    options.target = server_.target();
    options.job = "lm";
    options.worker = "w0";
    options.patience = patience_;
    options.log = [this](const std::string& line) { lines_.Add(line); };
    auto link = Link::Create(options, ManifestOf(elements, means));
    EXPECT_TRUE(link.ok()) << link.status();
    return *std::move(link);
  }

  // Pushes `payload` as the delta of `round` against the fake's model.
  absl::StatusOr<PushNews> PushDelta(Link& link, uint64_t round, const std::string& payload) {
    return link.Push(v1::PAYLOAD_KIND_DELTA, round, DigestOf(fake_.payload()), v1::CODEC_FP32, Bytes(payload), {});
  }

  absl::Duration patience_ = absl::Seconds(20);
  Lines lines_;
  FakeCoordinator fake_{1};
  FakeServer server_;
};

TEST_F(LinkTest, NamesAndManifestsThatWouldBeRefusedAreRefusedWithoutANetwork) {
  LinkOptions options;
  options.target = server_.target();
  options.job = "a/b";
  options.worker = "w0";
  EXPECT_EQ(ReasonOf(Link::Create(options, ManifestOf(4)).status()), v1::REASON_INVALID_NAME);
  options.job = "lm";
  EXPECT_EQ(ReasonOf(Link::Create(options, v1::Manifest()).status()), v1::REASON_INVALID_REQUEST);
}

TEST_F(LinkTest, WaitsForACoordinatorThatIsNotThereYetAndSaysSoOnce) {
  std::unique_ptr<Link> link = MakeLink();
  std::thread later([this] {
    ASSERT_TRUE(lines_.Await("waiting for the coordinator"));
    server_.Start(&fake_);
  });
  const auto answer = link->Join();
  later.join();
  ASSERT_TRUE(answer.ok()) << answer.status();
  EXPECT_TRUE(answer->need_initial_model());
  EXPECT_EQ(lines_.Count("waiting for the coordinator"), 1);
}

TEST_F(LinkTest, GivesUpOnACoordinatorThatDoesNotComeInTime) {
  patience_ = absl::Milliseconds(300);
  EXPECT_TRUE(absl::IsUnavailable(MakeLink()->Join().status()));
}

TEST_F(LinkTest, AJoinRetriesWhatPassesAndReportsWhatDoesNot) {
  server_.Start(&fake_);
  fake_.Set([](Faults& f) {
    f.join = {Error(v1::REASON_RECOVERING, "restoring"), absl::UnavailableError("x"),
              Error(v1::REASON_JOB_NOT_FOUND, "no job")};
  });
  EXPECT_EQ(ReasonOf(MakeLink()->Join().status()), v1::REASON_JOB_NOT_FOUND);
  const Seen seen = fake_.seen();
  ASSERT_EQ(seen.joins.size(), 3u);
  EXPECT_GE(seen.joins[0].instance().size(), 16u);
  EXPECT_EQ(seen.joins[0].instance(), seen.joins[2].instance());
}

TEST_F(LinkTest, TwoPhases_TheInitialModelGoesUpAndTheFirstRoundStarts) {
  server_.Start(&fake_);
  std::unique_ptr<Link> link = MakeLink();
  const auto joined = link->Join();
  ASSERT_TRUE(joined.ok() && joined->need_initial_model());
  const std::string model = PayloadOf(std::vector<float>(kElements, 1.5f));
  ASSERT_TRUE(link->Push(v1::PAYLOAD_KIND_INITIAL_MODEL, 0, 0, v1::CODEC_FP32, Bytes(model), {}).ok());
  // Told of its election by Join, it is not told again, or it would bring a second model.
  auto news = link->AwaitRound(0);
  ASSERT_TRUE(news.ok()) << news.status();
  EXPECT_TRUE(std::holds_alternative<v1::RoundCommitted>(*news));
  news = link->AwaitRound(1);
  ASSERT_TRUE(news.ok()) << news.status();
  ASSERT_TRUE(std::holds_alternative<v1::RoundStarted>(*news));
  EXPECT_EQ(std::get<v1::RoundStarted>(*news).base_digest(), DigestOf(model));
}

TEST_F(LinkTest, AnElectionDuringTheWaitIsTold) {
  server_.Start(&fake_);
  fake_.ElectAtJoin(false);
  std::unique_ptr<Link> link = MakeLink();
  ASSERT_TRUE(link->Join().ok());
  std::thread later([this] {
    ASSERT_TRUE(fake_.Await([](const Seen& s) { return s.heartbeats > 1; }));
    fake_.ElectNow();
  });
  const auto news = link->AwaitRound(0);
  later.join();
  ASSERT_TRUE(news.ok()) << news.status();
  EXPECT_TRUE(std::holds_alternative<Elected>(*news));
}

TEST_F(LinkTest, ABrokenPushGoesOnWhereTheCoordinatorStands) {
  constexpr uint64_t kLarge = 700'000;  // Three chunks.
  server_.Start(&fake_);
  fake_.Publish(0, PayloadOf(std::vector<float>(kLarge, 0.0f)));
  std::unique_ptr<Link> link = MakeLink(kLarge);
  ASSERT_TRUE(link->Join().ok());
  fake_.Set([](Faults& f) { f.broken_pushes = 1; });
  const std::string delta = PayloadOf(std::vector<float>(kLarge, 0.25f));
  const auto pushed = PushDelta(*link, 1, delta);
  ASSERT_TRUE(pushed.ok()) << pushed.status();
  const Seen seen = fake_.seen();
  ASSERT_EQ(seen.pushes.size(), 2u);
  EXPECT_EQ(seen.pushes[0].resume_offset(), 0u);
  EXPECT_EQ(seen.pushes[1].resume_offset(), uint64_t{1} << 20);
  EXPECT_EQ(seen.pushes[0].push_id(), seen.pushes[1].push_id());
  EXPECT_EQ(seen.payload_bytes, delta.size());
  EXPECT_EQ(fake_.payload(), delta);  // The base was zero.
}

TEST_F(LinkTest, ABusyCoordinatorIsTriedAgain) {
  server_.Start(&fake_);
  fake_.Publish(0, PayloadOf(std::vector<float>(kElements, 0.0f)));
  std::unique_ptr<Link> link = MakeLink();
  ASSERT_TRUE(link->Join().ok());
  fake_.Set([](Faults& f) {
    f.push = {Error(v1::REASON_UPLOAD_BUDGET, "busy").RetryAfter(absl::Milliseconds(10)),
              absl::UnavailableError("the connection broke"), Error(v1::REASON_TRANSFER_CANCELLED, "x"),
              absl::CancelledError("by a proxy")};
  });
  const auto pushed = PushDelta(*link, 1, PayloadOf(std::vector<float>(kElements, 1.0f)));
  ASSERT_TRUE(pushed.ok()) << pushed.status();
  EXPECT_EQ(fake_.seen().pushes.size(), 5u);
}

TEST_F(LinkTest, APushSentTwiceIsASuccess) {
  server_.Start(&fake_);
  fake_.Publish(0, PayloadOf(std::vector<float>(kElements, 0.0f)));
  fake_.HoldCommits(true);
  std::unique_ptr<Link> link = MakeLink();
  ASSERT_TRUE(link->Join().ok());
  const std::string delta = PayloadOf(std::vector<float>(kElements, 1.0f));
  ASSERT_TRUE(PushDelta(*link, 1, delta).ok());
  const auto again = PushDelta(*link, 1, delta);
  ASSERT_TRUE(again.ok()) << again.status();
  ASSERT_TRUE(std::holds_alternative<v1::PushDeltaResponse>(*again));
  EXPECT_EQ(std::get<v1::PushDeltaResponse>(*again).outcome(), v1::PUSH_OUTCOME_DUPLICATE);
}

TEST_F(LinkTest, APushThatIsAlwaysDamagedEnds) {
  server_.Start(&fake_);
  fake_.Publish(0, PayloadOf(std::vector<float>(kElements, 0.0f)));
  fake_.Set([](Faults& f) { f.push.assign(7, Error(v1::REASON_CHECKSUM_MISMATCH, "damaged").With("offset", 0)); });
  std::unique_ptr<Link> link = MakeLink();
  ASSERT_TRUE(link->Join().ok());
  const auto pushed = PushDelta(*link, 1, PayloadOf(std::vector<float>(kElements, 1.0f)));
  EXPECT_EQ(ReasonOf(pushed.status()), v1::REASON_CHECKSUM_MISMATCH) << pushed.status();
  EXPECT_EQ(fake_.seen().pushes.size(), 5u);
}

TEST_F(LinkTest, ALateDeltaIsNewsAndNotAnError) {
  server_.Start(&fake_);
  fake_.Publish(0, PayloadOf(std::vector<float>(kElements, 0.0f)));
  std::unique_ptr<Link> link = MakeLink();
  ASSERT_TRUE(link->Join().ok());
  fake_.CommitWithout(3);
  const auto pushed = PushDelta(*link, 1, PayloadOf(std::vector<float>(kElements, 1.0f)));
  ASSERT_TRUE(pushed.ok()) << pushed.status();
  ASSERT_TRUE(std::holds_alternative<Stale>(*pushed));
  EXPECT_EQ(std::get<Stale>(*pushed).round, 4u);
  EXPECT_EQ(std::get<Stale>(*pushed).version, 3u);
}

TEST_F(LinkTest, ABrokenPullGoesOnAtItsOffset) {
  server_.Start(&fake_);
  std::vector<float> model(kElements);
  for (size_t i = 0; i < model.size(); ++i) model[i] = static_cast<float>(i);
  fake_.Publish(5, PayloadOf(model));
  std::unique_ptr<Link> link = MakeLink();
  ASSERT_TRUE(link->Join().ok());
  fake_.Set([](Faults& f) { f.broken_pulls = 2; });
  const auto pulled = link->Pull(std::nullopt);
  ASSERT_TRUE(pulled.ok()) << pulled.status();
  EXPECT_EQ(pulled->header.version(), 5u);
  EXPECT_EQ(std::memcmp(pulled->bmuf.data(), model.data(), model.size() * sizeof(float)), 0);
  const Seen seen = fake_.seen();
  ASSERT_EQ(seen.pulls.size(), 3u);
  EXPECT_EQ(seen.pulls[1].offset(), 64u);
  EXPECT_EQ(seen.pulls[1].version(), 5u);
  EXPECT_EQ(seen.pulls[2].offset(), 128u);
}

TEST_F(LinkTest, AResumedPullIsNotPatchedTogetherFromTwoVersions) {
  server_.Start(&fake_);
  fake_.Publish(5, PayloadOf(std::vector<float>(kElements, 2.0f)));
  std::unique_ptr<Link> link = MakeLink();
  ASSERT_TRUE(link->Join().ok());
  fake_.Set([](Faults& f) {
    f.broken_pulls = 1;
    f.other_version_on_resume = true;
  });
  const auto pulled = link->Pull(std::nullopt);
  ASSERT_TRUE(pulled.ok()) << pulled.status();
  const Seen seen = fake_.seen();
  ASSERT_EQ(seen.pulls.size(), 3u);
  EXPECT_EQ(seen.pulls[2].offset(), 0u);  // From the start.
}

TEST_F(LinkTest, AModelWithAnotherDigestThanItsOwnIsRefused) {
  server_.Start(&fake_);
  fake_.Publish(5, PayloadOf(std::vector<float>(kElements, 2.0f)));
  fake_.Set([](Faults& f) { f.wrong_payload_digest = true; });
  std::unique_ptr<Link> link = MakeLink();
  ASSERT_TRUE(link->Join().ok());
  const auto pulled = link->Pull(std::nullopt);
  EXPECT_TRUE(absl::IsDataLoss(pulled.status())) << pulled.status();
}

TEST_F(LinkTest, ANonFiniteModelIsRefusedByTheNameOfItsTensor) {
  server_.Start(&fake_);
  fake_.Publish(5, PayloadOf(std::vector<float>(kElements + 2, 2.0f)));
  std::unique_ptr<Link> link = MakeLink(kElements, /*means=*/2);
  ASSERT_TRUE(link->Join().ok());
  ASSERT_TRUE(link->Pull(std::nullopt).ok());
  fake_.Set([](Faults& f) { f.nan_in_broadcast = true; });
  auto pulled = link->Pull(std::nullopt);
  ASSERT_TRUE(absl::IsDataLoss(pulled.status())) << pulled.status();
  EXPECT_NE(pulled.status().message().find("w[0]"), absl::string_view::npos) << pulled.status();
  fake_.Set([](Faults& f) {
    f.nan_in_broadcast = false;
    f.nan_in_auxiliary = true;
  });
  pulled = link->Pull(std::nullopt);
  ASSERT_TRUE(absl::IsDataLoss(pulled.status())) << pulled.status();
  EXPECT_NE(pulled.status().message().find("mean[1]"), absl::string_view::npos) << pulled.status();
}

TEST_F(LinkTest, AModelFromAnOlderLifeOfTheCoordinatorIsNotTaken) {
  patience_ = absl::Milliseconds(500);
  FakeCoordinator fake(7);
  server_.Start(&fake);
  fake.Publish(5, PayloadOf(std::vector<float>(kElements, 2.0f)));
  std::unique_ptr<Link> link = MakeLink();
  ASSERT_TRUE(link->Join().ok());
  fake.Set([](Faults& f) { f.pull_epoch = 6; });
  EXPECT_TRUE(absl::IsUnavailable(link->Pull(std::nullopt).status()));
}

TEST_F(LinkTest, AnOlderCoordinatorIsNotJoinedAgain) {
  patience_ = absl::Milliseconds(1500);
  FakeCoordinator newer(2), older(1);
  newer.Publish(5, PayloadOf(std::vector<float>(kElements, 2.0f)));
  older.Publish(5, PayloadOf(std::vector<float>(kElements, 2.0f)));
  server_.Start(&newer);
  std::unique_ptr<Link> link = MakeLink();
  ASSERT_TRUE(link->Join().ok());
  server_.Stop();
  server_.Start(&older);
  std::thread guard([&] {
    older.Await([](const Seen& s) { return s.joins.size() > 1; });
    link->Cancel();
  });
  const auto news = link->AwaitRound(6);
  guard.join();
  EXPECT_FALSE(news.ok());
  EXPECT_EQ(link->joined().session().epoch(), 2u);
}

TEST_F(LinkTest, ARestartedCoordinatorIsJoinedAgainWithTheSameInstance) {
  server_.Start(&fake_);
  fake_.Publish(5, PayloadOf(std::vector<float>(kElements, 2.0f)));
  fake_.HoldCommits(true);
  std::unique_ptr<Link> link = MakeLink();
  ASSERT_TRUE(link->Join().ok());
  ASSERT_TRUE(PushDelta(*link, 6, PayloadOf(std::vector<float>(kElements, 1.0f))).ok());
  FakeCoordinator successor(2);
  successor.ContinueFrom(fake_);
  std::thread restart([&] {
    ASSERT_TRUE(fake_.Await([](const Seen& s) { return s.heartbeats > 0; }));
    server_.Stop();
    server_.Start(&successor);
  });
  const auto news = link->AwaitRound(6);
  restart.join();
  ASSERT_TRUE(news.ok()) << news.status();
  ASSERT_TRUE(std::holds_alternative<Rejoined>(*news));
  EXPECT_EQ(std::get<Rejoined>(*news).answer.session().epoch(), 2u);
  EXPECT_EQ(std::get<Rejoined>(*news).answer.round(), 6u);
  EXPECT_EQ(successor.seen().joins[0].instance(), fake_.seen().joins[0].instance());
  link.reset();
  server_.Stop();
}

TEST_F(LinkTest, AMembershipThatLapsedWhileTrainingIsRenewedByTheHeartbeat) {
  server_.Start(&fake_);
  fake_.Publish(5, PayloadOf(std::vector<float>(kElements, 2.0f)));
  std::unique_ptr<Link> link = MakeLink();
  ASSERT_TRUE(link->Join().ok());
  fake_.ForgetSessions();
  ASSERT_TRUE(fake_.Await([](const Seen& s) { return s.joins.size() == 2; }));
  const auto news = link->AwaitRound(6);
  ASSERT_TRUE(news.ok()) << news.status();
  EXPECT_TRUE(std::holds_alternative<Rejoined>(*news));
}

TEST_F(LinkTest, AHeartbeatUnderWayDoesNotUndoALeave) {
  server_.Start(&fake_);
  fake_.Publish(5, PayloadOf(std::vector<float>(kElements, 2.0f)));
  std::unique_ptr<Link> link = MakeLink();
  ASSERT_TRUE(link->Join().ok());
  // The heartbeat is held, the worker leaves, and the heartbeat is then answered as one of a stranger.
  fake_.Set([](Faults& f) { f.silent = true; });
  const int before = fake_.seen().heartbeats;
  ASSERT_TRUE(fake_.Await([&](const Seen& s) { return s.heartbeats > before; }));
  std::thread release([this] {
    ASSERT_TRUE(fake_.Await([](const Seen& s) { return s.leaves == 1; }));
    fake_.Set([](Faults& f) { f.silent = false; });
  });
  EXPECT_TRUE(link->Leave("done").ok());
  release.join();
  link.reset();  // Whatever the heartbeat does, it has done it.
  EXPECT_EQ(fake_.seen().joins.size(), 1u);
}

TEST_F(LinkTest, CancelEndsEveryWait) {
  server_.Start(&fake_);
  fake_.Publish(5, PayloadOf(std::vector<float>(kElements, 2.0f)));
  fake_.FailAttempt();  // The round does not start.
  std::unique_ptr<Link> link = MakeLink();
  ASSERT_TRUE(link->Join().ok());
  std::thread later([&] {
    ASSERT_TRUE(fake_.Await([](const Seen& s) { return s.heartbeats > 0; }));
    link->Cancel();
  });
  EXPECT_TRUE(absl::IsCancelled(link->AwaitRound(6).status()));
  later.join();
  EXPECT_TRUE(absl::IsCancelled(link->Pull(std::nullopt).status()));
  EXPECT_TRUE(absl::IsCancelled(link->Join().status()));
}

TEST_F(LinkTest, ALinkToASilentCoordinatorEndsAtOnce) {
  server_.Start(&fake_);
  fake_.Publish(5, PayloadOf(std::vector<float>(kElements, 2.0f)));
  std::unique_ptr<Link> link = MakeLink();
  ASSERT_TRUE(link->Join().ok());
  const int before = fake_.seen().heartbeats;
  fake_.Set([](Faults& f) { f.silent = true; });
  ASSERT_TRUE(fake_.Await([&](const Seen& s) { return s.heartbeats > before; }));
  const absl::Time begin = absl::Now();
  link.reset();
  EXPECT_LT(absl::Now() - begin, absl::Milliseconds(150));  // The heartbeat alone would take 200 ms.
}

}  // namespace
}  // namespace bmuf::client
