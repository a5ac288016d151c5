// Transcripts: "> " lines are events put in, "< " lines are the actions that must come out.
#include "worker/block_loop.h"

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

namespace bmuf::worker {
namespace {

class BlockLoopTest : public ::testing::Test {
 protected:
  void Put(const Event& event) {
    absl::StrAppend(&transcript_, "> ", ToString(event), "\n");
    for (const Action& action : loop_.Step(event)) absl::StrAppend(&transcript_, "< ", ToString(action), "\n");
  }
  // What happened since the last call.
  std::string Take() { return std::exchange(transcript_, ""); }

  static Joined Place(uint64_t round, uint64_t max_rounds = 3) { return {round, false, 0, max_rounds, true, 7}; }
  static Joined Initialiser(uint32_t warmup_steps) { return {0, true, warmup_steps, 3, true, 7}; }
  static RoundStarted Round(uint64_t round) { return {round, round - 1, 2, 8, 40, 1000 * round}; }
  static Committed Commit(uint64_t round, bool finished = false) { return {round, round + 1, true, finished}; }

  // Joined to a running job and training in round 1.
  void StartTraining() {
    for (const Event& e : std::vector<Event>{Start{}, Place(1), Round(1), Pulled{0}}) Put(e);
    Take();
  }
  // Up to the wait for the commit of round 1.
  void PushFirst() {
    StartTraining();
    Put(Trained{});
    Put(PushAccepted{});
    Take();
  }

  BlockLoop loop_{{0, 2}};  // Evaluates every second round.
  std::string transcript_;
};

TEST_F(BlockLoopTest, AJobFromTheFirstRoundToTheLast) {
  for (const Event& e :
       std::vector<Event>{Start{},   Place(1),  Round(1),       Pulled{0},       Trained{}, PushAccepted{}, Commit(1),
                          Pulled{1}, Round(2),  Trained{},      PushAccepted{},  Commit(2), Pulled{2},      Evaluated{},
                          Round(3),  Trained{}, PushAccepted{}, Commit(3, true), Pulled{3}, Evaluated{},    Left{}}) {
    Put(e);
  }
  EXPECT_EQ(Take(),
            "> Start\n"
            "< Join\n"
            "> Joined round=1 initial=no warmup=0 max_rounds=3\n"
            "< AwaitRound round=1\n"
            "> RoundStarted round=1 base=0 rank=2 size=8 steps=40 samples=1000\n"
            "< Pull version=0\n"
            "> Pulled version=0\n"
            "< Train round=1 rank=2 size=8 steps=40 samples=1000 progress=0..0.333333\n"
            "> Trained\n"
            "< Push round=1\n"
            "> PushAccepted\n"
            "< AwaitCommit round=1\n"
            "> Committed round=1 next=2 reset=yes finished=no\n"
            "< ResetInner\n"
            "< Pull newest\n"
            "> Pulled version=1\n"
            "< AwaitRound round=2\n"
            "> RoundStarted round=2 base=1 rank=2 size=8 steps=40 samples=2000\n"
            "< Train round=2 rank=2 size=8 steps=40 samples=2000 progress=0.333333..0.666667\n"
            "> Trained\n"
            "< Push round=2\n"
            "> PushAccepted\n"
            "< AwaitCommit round=2\n"
            "> Committed round=2 next=3 reset=yes finished=no\n"
            "< ResetInner\n"
            "< Pull newest\n"
            "> Pulled version=2\n"
            "< Evaluate version=2 final=no\n"
            "> Evaluated\n"
            "< AwaitRound round=3\n"
            "> RoundStarted round=3 base=2 rank=2 size=8 steps=40 samples=3000\n"
            "< Train round=3 rank=2 size=8 steps=40 samples=3000 progress=0.666667..1\n"
            "> Trained\n"
            "< Push round=3\n"
            "> PushAccepted\n"
            "< AwaitCommit round=3\n"
            "> Committed round=3 next=4 reset=yes finished=yes\n"
            "< ResetInner\n"
            "< Pull newest\n"
            "> Pulled version=3\n"
            "< Evaluate version=3 final=yes\n"
            "> Evaluated\n"
            "< Leave: done\n"
            "> Left\n"
            "< Finish done\n");
  EXPECT_TRUE(loop_.done());
}

TEST_F(BlockLoopTest, TheInitialiserWarmsUpAndUploadsItsParametersThenPullsThemLikeEverybody) {
  for (const Event& e : std::vector<Event>{Start{}, Initialiser(100), WarmedUp{}, InitialUploaded{},
                                           Committed{0, 1, true, false}, Pulled{0}, Round(1)}) {
    Put(e);
  }
  EXPECT_EQ(Take(),
            "> Start\n"
            "< Join\n"
            "> Joined round=0 initial=yes warmup=100 max_rounds=3\n"
            "< TrainWarmup steps=100\n"
            "> WarmedUp\n"
            "< ResetInner\n"
            "< UploadInitial\n"
            "> InitialUploaded\n"
            "< AwaitRound round=0\n"
            "> Committed round=0 next=1 reset=yes finished=no\n"
            "< Pull newest\n"
            "> Pulled version=0\n"
            "< AwaitRound round=1\n"
            "> RoundStarted round=1 base=0 rank=2 size=8 steps=40 samples=1000\n"
            "< Train round=1 rank=2 size=8 steps=40 samples=1000 progress=0..0.333333\n");
}

TEST_F(BlockLoopTest, AnotherWorkerWaitsForTheInitialModelAndMayBeElectedLater) {
  Put(Start{});
  Put(Place(0));
  Put(Elected{});
  Put(InitialUploaded{});
  EXPECT_EQ(Take(),
            "> Start\n"
            "< Join\n"
            "> Joined round=0 initial=no warmup=0 max_rounds=3\n"
            "< AwaitRound round=0\n"
            "> Elected\n"
            "< UploadInitial\n"
            "> InitialUploaded\n"
            "< AwaitRound round=0\n");
}

TEST_F(BlockLoopTest, AWaiterPullsTheInitialModelOfAnother) {
  Put(Start{});
  Put(Place(0));
  Take();
  Put(Committed{0, 1, true, false});
  Put(Pulled{0});
  EXPECT_EQ(Take(),
            "> Committed round=0 next=1 reset=yes finished=no\n"
            "< Pull newest\n"
            "> Pulled version=0\n"
            "< AwaitRound round=1\n");
}

TEST_F(BlockLoopTest, AStaleDeltaIsDroppedAndTheNamedRoundIsJoinedFromAFreshPull) {
  StartTraining();
  Put(Trained{});
  Put(PushStale{7});
  Put(Round(7));
  Put(Pulled{6});
  EXPECT_EQ(Take(),
            "> Trained\n"
            "< Push round=1\n"
            "> PushStale round=7\n"
            "< ResetInner\n"
            "< AwaitRound round=7\n"
            "> RoundStarted round=7 base=6 rank=2 size=8 steps=40 samples=7000\n"
            "< Pull version=6\n"
            "> Pulled version=6\n"
            "< Train round=7 rank=2 size=8 steps=40 samples=7000 progress=2..2.33333\n");
}

TEST_F(BlockLoopTest, ARestartedRoundGetsTheSameDeltaAgainWithoutTraining) {
  PushFirst();
  Put(Restarted{});
  Put(PushAccepted{});
  EXPECT_EQ(Take(),
            "> Restarted\n"
            "< Push round=1\n"
            "> PushAccepted\n"
            "< AwaitCommit round=1\n");
}

TEST_F(BlockLoopTest, AfterReattachingTheKeptDeltaIsPushedAgainIfItsRoundIsStillOpen) {
  PushFirst();
  Put(Place(1));
  Put(PushAccepted{});
  EXPECT_EQ(Take(),
            "> Joined round=1 initial=no warmup=0 max_rounds=3\n"
            "< Push round=1\n"
            "> PushAccepted\n"
            "< AwaitCommit round=1\n");
}

TEST_F(BlockLoopTest, AfterReattachingToAnotherRoundTheDeltaIsDropped) {
  PushFirst();
  Put(Place(5));
  Put(Place(1));  // And does not come back.
  EXPECT_EQ(Take(),
            "> Joined round=5 initial=no warmup=0 max_rounds=3\n"
            "< AwaitRound round=5\n"
            "> Joined round=1 initial=no warmup=0 max_rounds=3\n"
            "< AwaitRound round=1\n");
}

TEST_F(BlockLoopTest, StopWhileTrainingFinishesAndPushesTheBlockThenLeavesWithoutWaiting) {
  StartTraining();
  Put(StopRequested{});
  Put(Trained{});
  Put(PushAccepted{});
  Put(Left{});
  EXPECT_EQ(Take(),
            "> StopRequested\n"
            "> Trained\n"
            "< Push round=1\n"
            "> PushAccepted\n"
            "< Leave: asked to stop\n"
            "> Left\n"
            "< Finish stopped: asked to stop\n");
}

TEST_F(BlockLoopTest, StopWhileWaitingLeavesAtOnce) {
  PushFirst();
  Put(StopRequested{});
  EXPECT_EQ(Take(), "> StopRequested\n< Leave: asked to stop\n");
}

TEST_F(BlockLoopTest, ACallThatWasCutShortMeansLeavingFromAnyPhase) {
  StartTraining();
  Put(Trained{});
  Put(Interrupted{});
  EXPECT_EQ(Take(), "> Trained\n< Push round=1\n> Interrupted\n< Leave: asked to stop\n");
  BlockLoop joining({});
  joining.Step(Start{});
  EXPECT_EQ(ToString(joining.Step(Interrupted{}).at(0)), "Finish stopped: asked to stop");
}

TEST_F(BlockLoopTest, StopBeforeJoiningJustEnds) {
  Put(Start{});
  Put(StopRequested{});
  EXPECT_EQ(Take(), "> Start\n< Join\n> StopRequested\n< Finish stopped: asked to stop\n");
  EXPECT_TRUE(loop_.done());
}

TEST_F(BlockLoopTest, AStopThatMeetsTheEndOfTheJobStillEvaluatesIt) {
  BlockLoop loop({1, 0});
  std::string out;
  for (const Event& e :
       std::vector<Event>{Start{}, Place(1, 0), Round(1), Pulled{0}, Trained{}, PushAccepted{}, Commit(1)}) {
    for (const Action& a : loop.Step(e)) out = ToString(a);
  }
  EXPECT_EQ(out, "Pull newest");
  loop.Step(StopRequested{});
  EXPECT_EQ(ToString(loop.Step(Pulled{1}).at(0)), "Evaluate version=1 final=yes");
}

TEST_F(BlockLoopTest, TheJobsOwnRoundLimitWins) {
  BlockLoop loop({1, 0});
  EXPECT_EQ(loop.round_limit(), 1u);
  loop.Step(Start{});
  loop.Step(Place(1, 3));
  EXPECT_EQ(loop.round_limit(), 3u);
}

TEST_F(BlockLoopTest, AFailedJobAndARefusalEndTheWorkerWithTheReason) {
  PushFirst();
  Put(Ended{false, "3 attempts failed"});
  Put(Left{});
  EXPECT_EQ(Take(),
            "> Ended finished=no: 3 attempts failed\n"
            "< Leave: 3 attempts failed\n"
            "> Left\n"
            "< Finish job-failed: 3 attempts failed\n");
  BlockLoop other({});
  other.Step(Start{});
  EXPECT_EQ(ToString(other.Step(Refused{"no such job", false}).at(0)), "Finish refused: no such job");
  BlockLoop third({});
  third.Step(Start{});
  EXPECT_EQ(ToString(third.Step(Refused{"no answer", true}).at(0)), "Finish unreachable: no answer");
}

TEST_F(BlockLoopTest, AJobThatFinishedWhileWaitingIsEvaluatedAtItsNewestVersion) {
  StartTraining();
  Put(Trained{});
  Put(Ended{true, "finished"});
  Put(Pulled{3});
  EXPECT_EQ(Take(),
            "> Trained\n"
            "< Push round=1\n"
            "> Ended finished=yes: finished\n"
            "< Pull newest\n"
            "> Pulled version=3\n"
            "< Evaluate version=3 final=yes\n");
}

TEST_F(BlockLoopTest, LateNewsChangesNothing) {
  StartTraining();
  for (const Event& e : std::vector<Event>{Start{}, Place(9), Round(9), Commit(9), PushAccepted{}, PushStale{9},
                                           Pulled{9}, Elected{}, Restarted{}, Evaluated{}, Left{}, WarmedUp{}}) {
    EXPECT_TRUE(loop_.Step(e).empty()) << ToString(e);
  }
  Put(Trained{});
  EXPECT_EQ(Take(), "> Trained\n< Push round=1\n");
}

}  // namespace
}  // namespace bmuf::worker
