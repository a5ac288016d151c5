#include <atomic>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "client/bmuf.h"
#include "client/fake_coordinator.h"
#include "core/base/error.h"
#include "gtest/gtest.h"

namespace bmuf {
namespace {

using client::FakeCoordinator;
using client::FakeServer;
using client::Faults;
using client::Seen;

std::string PayloadOf(const std::vector<float>& values) {
  return std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float));
}

v1::JobConfig Rules(uint64_t max_rounds = 0, uint32_t warmup_steps = 0) {
  v1::JobConfig config;
  config.set_block_steps(7);
  config.set_max_rounds(max_rounds);
  config.set_warmup_steps(warmup_steps);
  config.set_reset_inner_state(true);
  (*config.mutable_labels())["owner"] = "ml";
  return config;
}

class SessionTest : public testing::Test {
 protected:
  absl::StatusOr<std::unique_ptr<Session>> Join(std::function<absl::Status(uint32_t)> train_alone = nullptr) {
    options_.target = server_.target();
    options_.job = "lm";
    options_.worker = "w0";
    options_.patience = absl::Seconds(20);
    options_.log = [this](const std::string& line) {
      absl::MutexLock lock(&mu_);
      log_ += line + "\n";
    };
    return Session::Join(options_,
                         {{"w", {4}, w_.data()}, {"mean", {2}, mean_.data(), v1::DTYPE_F32, v1::TENSOR_ROLE_MEAN}},
                         std::move(train_alone));
  }
  std::string log() const {
    absl::MutexLock lock(&mu_);
    return log_;
  }
  // A block: what training would do to the parameters.
  void Train(float step) {
    for (float& x : w_) x += step;
  }

  Options options_;
  std::vector<float> w_ = {1, 2, 3, 4};
  std::vector<float> mean_ = {10, 20};
  mutable absl::Mutex mu_;
  std::string log_ ABSL_GUARDED_BY(mu_);
  FakeServer server_;
};

TEST_F(SessionTest, TheLoopOfTheHeaderTrainsToTheEnd) {
  FakeCoordinator fake(1, Rules(3));
  server_.Start(&fake);
  auto session = Join();
  ASSERT_TRUE(session.ok()) << session.status();
  EXPECT_EQ((*session)->round(), 1u);
  EXPECT_EQ((*session)->version(), 0u);
  EXPECT_EQ((*session)->size(), 1u);
  EXPECT_EQ((*session)->block_steps(), 7u);
  EXPECT_EQ((*session)->config().labels().at("owner"), "ml");
  EXPECT_FALSE((*session)->reset_inner_state());  // There is nothing to reset before the first block.
  int blocks = 0;
  while (!(*session)->done()) {
    Train(1);
    ASSERT_TRUE((*session)->Sync({}).ok());
    EXPECT_TRUE((*session)->reset_inner_state());
    ++blocks;
  }
  EXPECT_EQ(blocks, 3);
  EXPECT_EQ(w_, (std::vector<float>{4, 5, 6, 7}));
  EXPECT_EQ((*session)->version(), 3u);
  EXPECT_EQ(fake.seen().folded_rounds, (std::vector<uint64_t>{1, 2, 3}));
  EXPECT_TRUE((*session)->Sync({}).ok());  // No effect.
  EXPECT_EQ(fake.seen().pushes.size(), 4u);
  session->reset();
  EXPECT_EQ(fake.seen().leaves, 1);
  server_.Stop();
}

TEST_F(SessionTest, TheInitialModelIsBroughtOnceAndAfterOneWarmUp) {
  FakeCoordinator fake(1, Rules(0, /*warmup_steps=*/5));
  server_.Start(&fake);
  int warm_ups = 0;
  auto session = Join([&](uint32_t steps) {
    EXPECT_EQ(steps, 5u);
    ++warm_ups;
    Train(0.5f);
    return absl::OkStatus();
  });
  ASSERT_TRUE(session.ok()) << session.status();
  EXPECT_EQ(warm_ups, 1);
  const Seen seen = fake.seen();
  ASSERT_EQ(seen.initial_models.size(), 1u);
  EXPECT_EQ(seen.initial_models[0], PayloadOf({1.5f, 2.5f, 3.5f, 4.5f, 10, 20}));
  EXPECT_EQ(seen.pushes.size(), 1u);
  session->reset();
  server_.Stop();
}

TEST_F(SessionTest, AnInitialisersLossOfItsElectionIsNoError) {
  FakeCoordinator fake(1, Rules());
  server_.Start(&fake);
  fake.Set([](Faults& f) { f.push = {Error(v1::REASON_NOT_INITIALIZER, "another one")}; });
  std::thread other([&] {
    ASSERT_TRUE(fake.Await([](const Seen& s) { return s.pushes.size() == 1; }));
    fake.Publish(0, PayloadOf({5, 5, 5, 5, 1, 1}));
  });
  auto session = Join();
  other.join();
  ASSERT_TRUE(session.ok()) << session.status();
  EXPECT_EQ(w_, (std::vector<float>{5, 5, 5, 5}));
  session->reset();
  server_.Stop();
}

TEST_F(SessionTest, ALateJoinerTakesTheGlobalModel) {
  FakeCoordinator fake(1, Rules());
  server_.Start(&fake);
  fake.Publish(9, PayloadOf({5, 6, 7, 8, 1, 2}));
  auto session = Join();
  ASSERT_TRUE(session.ok()) << session.status();
  EXPECT_EQ((*session)->round(), 10u);
  EXPECT_EQ(w_, (std::vector<float>{5, 6, 7, 8}));
  EXPECT_EQ(mean_, (std::vector<float>{1, 2}));
  EXPECT_TRUE(fake.seen().initial_models.empty());
  session->reset();
  server_.Stop();
}

TEST_F(SessionTest, ALateBlockIsDroppedAndTheNewestModelLoaded) {
  FakeCoordinator fake(1, Rules());
  server_.Start(&fake);
  auto session = Join();
  ASSERT_TRUE(session.ok()) << session.status();
  fake.CommitWithout(2);
  Train(100);
  ASSERT_TRUE((*session)->Sync({}).ok());
  EXPECT_EQ(w_, (std::vector<float>{1, 2, 3, 4}));
  EXPECT_EQ((*session)->round(), 3u);
  EXPECT_EQ((*session)->version(), 2u);
  EXPECT_TRUE(fake.seen().folded_rounds.empty());
  Train(1);
  ASSERT_TRUE((*session)->Sync({}).ok());
  EXPECT_EQ(fake.seen().folded_rounds, (std::vector<uint64_t>{3}));
  session->reset();
  server_.Stop();
}

// The attempt fails after the delta was in; while the round gathers again a push would be refused as early.
TEST_F(SessionTest, ARoundThatStartsAgainGetsTheSameDeltaAgain) {
  FakeCoordinator fake(1, Rules());
  server_.Start(&fake);
  auto session = Join();
  ASSERT_TRUE(session.ok()) << session.status();
  fake.HoldCommits(true);
  std::thread operating([&] {
    ASSERT_TRUE(fake.Await([](const Seen& s) { return s.folded_rounds.size() == 1; }));
    const int beats = fake.seen().heartbeats;
    ASSERT_TRUE(fake.Await([&](const Seen& s) { return s.heartbeats > beats + 1; }));  // The watch is open.
    fake.FailAttempt();
    fake.HoldCommits(false);
    const int later = fake.seen().heartbeats;
    ASSERT_TRUE(fake.Await([&](const Seen& s) { return s.heartbeats > later + 1; }));  // `restarted` has arrived.
    fake.StartRound();
  });
  Train(1);
  const absl::Status synced = (*session)->Sync({});
  operating.join();
  ASSERT_TRUE(synced.ok()) << synced;
  EXPECT_EQ(fake.seen().folded_rounds, (std::vector<uint64_t>{1, 1}));
  EXPECT_EQ(w_, (std::vector<float>{2, 3, 4, 5}));  // The block counted.
  EXPECT_EQ((*session)->version(), 1u);
  session->reset();
  server_.Stop();
}

TEST_F(SessionTest, ARestartWithKeptStateCostsNoBlock) {
  FakeCoordinator first(1, Rules()), second(2, Rules());
  server_.Start(&first);
  auto session = Join();
  ASSERT_TRUE(session.ok()) << session.status();
  first.HoldCommits(true);
  std::thread restart([&] {
    ASSERT_TRUE(first.Await([](const Seen& s) { return s.folded_rounds.size() == 1; }));
    server_.Stop();
    second.ContinueFrom(first);
    server_.Start(&second);
  });
  Train(1);
  const absl::Status synced = (*session)->Sync({});
  restart.join();
  ASSERT_TRUE(synced.ok()) << synced;
  EXPECT_EQ(second.seen().folded_rounds, (std::vector<uint64_t>{1}));
  EXPECT_EQ(w_, (std::vector<float>{2, 3, 4, 5}));
  session->reset();
  server_.Stop();
}

TEST_F(SessionTest, ACoordinatorThatLostItsMemoryGetsTheLastBroadcastModelBack) {
  FakeCoordinator first(1, Rules()), second(2, Rules());
  server_.Start(&first);
  first.Publish(6, PayloadOf({5, 6, 7, 8, 1, 2}));
  auto session = Join();
  ASSERT_TRUE(session.ok()) << session.status();
  Train(1);
  server_.Stop();
  server_.Start(&second);
  ASSERT_TRUE((*session)->Sync({}).ok());
  const Seen seen = second.seen();
  ASSERT_EQ(seen.initial_models.size(), 1u);
  EXPECT_EQ(seen.initial_models[0], PayloadOf({5, 6, 7, 8, 1, 2}));
  EXPECT_NE(log().find("bringing back the last broadcast one"), std::string::npos) << log();
  EXPECT_EQ((*session)->version(), 0u);  // Rounds begin anew.
  EXPECT_EQ((*session)->round(), 1u);
  Train(1);
  ASSERT_TRUE((*session)->Sync({}).ok());
  EXPECT_EQ((*session)->version(), 1u);
  session->reset();
  server_.Stop();
}

// Killed between the commit and the pull of its model.
TEST_F(SessionTest, ACoordinatorThatLostItsMemoryDuringAPullGetsTheModelBackToo) {
  FakeCoordinator first(1, Rules()), second(2, Rules());
  server_.Start(&first);
  auto session = Join();
  ASSERT_TRUE(session.ok()) << session.status();
  const size_t pulls = first.seen().pulls.size();
  first.Set([](Faults& f) { f.hold_pulls = true; });
  std::thread restart([&] {
    ASSERT_TRUE(first.Await([&](const Seen& s) { return s.pulls.size() > pulls; }));
    server_.Stop();
    server_.Start(&second);
  });
  Train(1);
  const absl::Status synced = (*session)->Sync({});
  restart.join();
  ASSERT_TRUE(synced.ok()) << synced;
  ASSERT_EQ(second.seen().initial_models.size(), 1u);
  EXPECT_EQ(second.seen().initial_models[0], PayloadOf({1, 2, 3, 4, 10, 20}));
  session->reset();
  server_.Stop();
}

TEST_F(SessionTest, AJobThatFinishedWithoutThisWorkerIsDone) {
  FakeCoordinator fake(1, Rules());
  server_.Start(&fake);
  auto session = Join();
  ASSERT_TRUE(session.ok()) << session.status();
  fake.CommitWithout(1);
  fake.Finish();
  Train(1);
  ASSERT_TRUE((*session)->Sync({}).ok());
  EXPECT_TRUE((*session)->done());
  EXPECT_EQ(w_, (std::vector<float>{1, 2, 3, 4}));  // The final model.
  session->reset();
  server_.Stop();
}

TEST_F(SessionTest, ANonFiniteBroadcastIsNotLoaded) {
  FakeCoordinator fake(1, Rules());
  server_.Start(&fake);
  auto session = Join();
  ASSERT_TRUE(session.ok()) << session.status();
  fake.Set([](Faults& f) { f.nan_in_broadcast = true; });
  Train(1);
  const absl::Status synced = (*session)->Sync({});
  EXPECT_TRUE(absl::IsDataLoss(synced)) << synced;
  EXPECT_EQ(w_, (std::vector<float>{2, 3, 4, 5}));        // As the caller left them.
  EXPECT_EQ((*session)->Sync({}).code(), synced.code());  // Permanent.
  session->reset();
  server_.Stop();
}

TEST_F(SessionTest, APermanentRefusalReachesTheLoop) {
  FakeCoordinator fake(1, Rules());
  server_.Start(&fake);
  auto session = Join();
  ASSERT_TRUE(session.ok()) << session.status();
  fake.Set([](Faults& f) { f.push = {Error(v1::REASON_STALE_INCARNATION, "a newer process")}; });
  EXPECT_EQ(ReasonOf((*session)->Sync({})), v1::REASON_STALE_INCARNATION);
  session->reset();
  server_.Stop();
}

TEST_F(SessionTest, LossyCodecsSendLaterWhatTheyLeftOut) {
  FakeCoordinator fake(1, Rules());
  server_.Start(&fake);
  options_.codec = v1::CODEC_INT8;
  auto session = Join();
  ASSERT_TRUE(session.ok()) << session.status();
  // 0.001 is far below half a step of the scale that 1.0 sets: it would never be sent without feedback.
  float sum = 0;
  for (int block = 0; block < 40; ++block) {
    w_[0] += 1.0f;
    w_[1] += 0.001f;
    sum += 0.001f;
    ASSERT_TRUE((*session)->Sync({}).ok());
  }
  EXPECT_NEAR(w_[1] - 2.0f, sum, 0.005f);
  session->reset();
  server_.Stop();
}

TEST_F(SessionTest, AnOverlappedExchangeAddsWhatOthersDidToWhatWasTrainedMeanwhile) {
  FakeCoordinator fake(1, Rules());
  server_.Start(&fake);
  auto session = Join();
  ASSERT_TRUE(session.ok()) << session.status();
  fake.HoldCommits(true);
  Train(1);
  ASSERT_TRUE((*session)->SyncAsync({}).ok());
  EXPECT_EQ((*session)->round(), 1u);  // What the caller sees does not change under its feet.
  Train(10);
  EXPECT_EQ(w_, (std::vector<float>{12, 13, 14, 15}));
  ASSERT_TRUE(fake.Await([](const Seen& s) { return s.folded_rounds.size() == 1; }));
  fake.HoldCommits(false);
  ASSERT_TRUE((*session)->Wait().ok());
  EXPECT_EQ((*session)->round(), 2u);
  EXPECT_EQ((*session)->version(), 1u);
  EXPECT_EQ(w_, (std::vector<float>{12, 13, 14, 15}));  // Broadcast {2..5} plus the 10 trained meanwhile.
  ASSERT_TRUE((*session)->Sync({}).ok());               // The next delta is the 10 alone.
  EXPECT_EQ(fake.payload().substr(0, 16), PayloadOf({12, 13, 14, 15}));
  session->reset();
  server_.Stop();
}

TEST_F(SessionTest, ALateOverlappedBlockIsTakenBackAndTheNextKept) {
  FakeCoordinator fake(1, Rules());
  server_.Start(&fake);
  auto session = Join();
  ASSERT_TRUE(session.ok()) << session.status();
  fake.CommitWithout(1);
  Train(1);
  ASSERT_TRUE((*session)->SyncAsync({}).ok());
  Train(10);
  ASSERT_TRUE((*session)->Wait().ok());
  EXPECT_EQ(w_, (std::vector<float>{11, 12, 13, 14}));
  session->reset();
  server_.Stop();
}

TEST_F(SessionTest, AnExchangeInFlightDoesNotKeepASessionFromEnding) {
  FakeCoordinator fake(1, Rules());
  server_.Start(&fake);
  auto session = Join();
  ASSERT_TRUE(session.ok()) << session.status();
  fake.HoldCommits(true);
  Train(1);
  ASSERT_TRUE((*session)->SyncAsync({}).ok());
  ASSERT_TRUE(fake.Await([](const Seen& s) { return s.folded_rounds.size() == 1; }));
  session->reset();
  EXPECT_EQ(fake.seen().leaves, 1);
  server_.Stop();
}

TEST_F(SessionTest, CancelEndsASync) {
  FakeCoordinator fake(1, Rules());
  server_.Start(&fake);
  auto session = Join();
  ASSERT_TRUE(session.ok()) << session.status();
  fake.HoldCommits(true);
  std::thread later([&] {
    ASSERT_TRUE(fake.Await([](const Seen& s) { return s.folded_rounds.size() == 1; }));
    (*session)->Cancel();
  });
  Train(1);
  EXPECT_TRUE(absl::IsCancelled((*session)->Sync({})));
  later.join();
  session->reset();
  server_.Stop();
}

}  // namespace
}  // namespace bmuf
