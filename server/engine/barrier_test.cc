// DecideBarrier as a table: the situation, the policy, what is decided and said.
#include <gtest/gtest.h>

#include "google/protobuf/text_format.h"
#include "server/engine/engine.h"

namespace bmuf::engine {
namespace {

using Kind = BarrierDecision::Kind;

struct Row {
  const char* name;
  const char* policy;  // Of a BarrierPolicy.
  uint32_t have, folding, uploading, expected;
  int elapsed_s;
  Kind kind;
  const char* reason;
  int next_s = -1;  // -1: nothing is timed.
};

BarrierDecision Decide(const Row& row, BarrierInput input = {}) {
  v1::BarrierPolicy policy;
  EXPECT_TRUE(google::protobuf::TextFormat::ParseFromString(row.policy, &policy)) << row.name;
  input.have = row.have;
  input.folding = row.folding;
  input.uploading = row.uploading;
  input.expected = row.expected;
  for (uint32_t i = row.have; i < row.expected; ++i) input.awaited.push_back("n" + std::to_string(i + 1));
  input.elapsed = absl::Seconds(row.elapsed_s);
  return DecideBarrier(input, policy);
}

constexpr char kPlain[] = "min_workers: 1 collect_timeout { seconds: 60 } on_timeout: ON_TIMEOUT_COMMIT_IF_QUORUM";
constexpr char kSoft[] =
    "min_workers: 2 soft_timeout { seconds: 20 } collect_timeout { seconds: 60 } "
    "on_timeout: ON_TIMEOUT_COMMIT_IF_QUORUM";
constexpr char kGrace[] =
    "min_workers: 1 soft_timeout { seconds: 20 } grace { seconds: 5 } collect_timeout { seconds: 60 } "
    "on_timeout: ON_TIMEOUT_COMMIT_IF_QUORUM";
constexpr char kLongGrace[] =
    "min_workers: 1 soft_timeout { seconds: 20 } grace { seconds: 500 } collect_timeout { seconds: 60 } "
    "on_timeout: ON_TIMEOUT_FAIL_ROUND";
constexpr char kAll[] = "min_workers: 1 collect_timeout { seconds: 60 } on_timeout: ON_TIMEOUT_FAIL_ROUND";
constexpr char kExtend[] = "min_workers: 1 collect_timeout { seconds: 60 } on_timeout: ON_TIMEOUT_EXTEND";
constexpr char kHalf[] =
    "min_workers: 1 min_fraction: 0.5 collect_timeout { seconds: 60 } on_timeout: ON_TIMEOUT_COMMIT_IF_QUORUM";
constexpr char kTwo[] = "min_workers: 2 collect_timeout { seconds: 60 } on_timeout: ON_TIMEOUT_COMMIT_IF_QUORUM";

const Row kRows[] = {
    {"nobody left", kPlain, 0, 0, 0, 0, 1, Kind::kRegather, "nobody is expected any more and nothing was contributed"},
    {"all in", kPlain, 3, 0, 0, 3, 1, Kind::kCommit, "all 3 are in"},
    {"one alone", kPlain, 1, 0, 0, 1, 1, Kind::kCommit, "the only one expected is in"},
    {"all in but one is folding", kPlain, 2, 1, 0, 3, 1, Kind::kWait,
     "have 2 of 3 (need 1), adding 1, waiting for n3 for up to 59s more (hard deadline), then commits with the quorum",
     60},
    {"nothing yet", kPlain, 0, 0, 0, 2, 0, Kind::kWait,
     "have 0 of 2 (need 1), waiting for n1 and n2 for up to 1m more (hard deadline), then starts the round again", 60},
    {"many awaited", kPlain, 0, 0, 0, 8, 0, Kind::kWait,
     "have 0 of 8 (need 1), waiting for n1, n2, n3, n4, n5 and 3 more for up to 1m more (hard deadline), then starts "
     "the round again",
     60},
    {"quorum waits for the hard deadline", kPlain, 1, 0, 0, 2, 59, Kind::kWait,
     "have 1 of 2 (need 1), waiting for n2 for up to 1s more (hard deadline), then commits with the quorum", 60},
    {"hard deadline with quorum", kPlain, 1, 0, 0, 2, 60, Kind::kCommit, "hard deadline of 1m: have 1 of 2 (need 1)"},
    {"hard deadline, nothing in", kPlain, 0, 0, 0, 2, 60, Kind::kFailAttempt,
     "hard deadline of 1m: have 0 of 2 (need 1)"},
    {"hard deadline waits for a fold", kPlain, 1, 1, 0, 2, 60, Kind::kWait,
     "have 1 of 2 (need 1), adding 1, waiting for n2"},
    {"before the soft deadline", kSoft, 2, 0, 0, 3, 19, Kind::kWait,
     "have 2 of 3 (need 2), waiting for n3 for up to 1s more (soft deadline), then commits with the quorum", 20},
    {"before the soft deadline without quorum", kSoft, 1, 0, 0, 3, 19, Kind::kWait,
     "have 1 of 3 (need 2), waiting for n2 and n3 for up to 1s more (soft deadline), then commits as soon as it has 2",
     20},
    {"soft deadline with quorum", kSoft, 2, 0, 0, 3, 20, Kind::kCommit, "soft deadline of 20s: have 2 of 3 (need 2)"},
    {"soft deadline without quorum waits for the hard one", kSoft, 1, 0, 0, 3, 20, Kind::kWait,
     "have 1 of 3 (need 2), waiting for n2 and n3 for up to 40s more (hard deadline), then starts the round again", 60},
    {"grace while uploading", kGrace, 1, 0, 1, 2, 20, Kind::kWait,
     "have 1 of 2 (need 1), waiting for n2 for up to 5s more (grace for uploads), then commits with the quorum", 25},
    {"no grace when nobody uploads", kGrace, 1, 0, 0, 2, 20, Kind::kCommit,
     "soft deadline of 20s: have 1 of 2 (need 1)"},
    {"grace ends", kGrace, 1, 0, 1, 2, 25, Kind::kCommit, "soft deadline of 20s: have 1 of 2 (need 1)"},
    {"grace does not outlast the hard deadline", kLongGrace, 1, 0, 1, 2, 59, Kind::kWait,
     "have 1 of 2 (need 1), waiting for n2 for up to 1s more (grace for uploads), then commits with the quorum", 60},
    {"a quorum at the soft deadline is not failed by the hard one", kLongGrace, 1, 0, 1, 2, 60, Kind::kCommit,
     "soft deadline of 20s: have 1 of 2 (need 1)"},
    {"fail_round in spite of a quorum", kAll, 1, 0, 0, 2, 60, Kind::kFailAttempt,
     "hard deadline of 1m: have 1 of 2 (need 1), and the job asks for all of them"},
    {"extend in spite of a quorum", kExtend, 1, 0, 0, 2, 60, Kind::kExtend,
     "hard deadline of 1m: have 1 of 2 (need 1), waits another 1m (extension 1)"},
    {"min_fraction not met", kHalf, 2, 0, 0, 5, 60, Kind::kFailAttempt, "hard deadline of 1m: have 2 of 5 (need 3)"},
    {"min_fraction met", kHalf, 3, 0, 0, 5, 60, Kind::kCommit, "hard deadline of 1m: have 3 of 5 (need 3)"},
    {"never below min_workers, though all expected are in", kTwo, 1, 0, 0, 1, 5, Kind::kWait,
     "have 1 of 1 (need 2), waiting for 1 more to join for up to 55s more (hard deadline), then starts the round again",
     60},
    {"never below min_workers at the deadline", kTwo, 1, 0, 0, 1, 60, Kind::kFailAttempt,
     "hard deadline of 1m: have 1 of 1 (need 2)"},
};

TEST(DecideBarrierTest, FollowsTheTable) {
  for (const Row& row : kRows) {
    const BarrierDecision decision = Decide(row);
    EXPECT_EQ(decision.kind, row.kind) << row.name;
    EXPECT_EQ(decision.reason, row.reason) << row.name;
    EXPECT_EQ(decision.next_deadline, row.next_s < 0 ? absl::InfiniteDuration() : absl::Seconds(row.next_s))
        << row.name;
  }
}

TEST(DecideBarrierTest, ExtensionsMoveTheHardDeadlineAndEnd) {
  const Row row = {
      "",  "min_workers: 1 collect_timeout { seconds: 60 } on_timeout: ON_TIMEOUT_EXTEND max_extensions: 2",
      1,   0,
      0,   2,
      130, Kind::kWait,
      ""};
  BarrierInput input;
  input.extension = absl::Seconds(90);
  input.extensions = 1;
  BarrierDecision decision = Decide(row, input);
  EXPECT_EQ(decision.kind, Kind::kWait);
  EXPECT_EQ(decision.next_deadline, absl::Seconds(150));
  input.extension = absl::Seconds(60);
  EXPECT_EQ(Decide(row, input).kind, Kind::kExtend);
  input.extensions = 2;  // Then as COMMIT_IF_QUORUM.
  EXPECT_EQ(Decide(row, input).kind, Kind::kCommit);
}

TEST(DecideBarrierTest, TheEarlierOfFixedAndAdaptiveSoftDeadlineCounts) {
  BarrierInput input;
  input.adaptive_soft = absl::Seconds(10);
  Row row = {"", kSoft, 2, 0, 0, 3, 10, Kind::kCommit, ""};
  EXPECT_EQ(Decide(row, input).kind, Kind::kCommit);
  input.adaptive_soft = absl::Seconds(30);
  EXPECT_EQ(Decide(row, input).next_deadline, absl::Seconds(20));
  row.policy = kPlain;
  EXPECT_EQ(Decide(row, input).next_deadline, absl::Seconds(30));
}

TEST(DecideBarrierTest, GistStaysWhileTimeRunsAndChangesWithTheSituation) {
  Row row = {"", kSoft, 2, 0, 0, 3, 5, Kind::kWait, ""};
  const std::string gist = Decide(row).gist;
  row.elapsed_s = 15;
  EXPECT_EQ(Decide(row).gist, gist);
  row.have = 1;
  EXPECT_NE(Decide(row).gist, gist);
}

TEST(QuorumTest, IsTheLargerOfNumberAndFraction) {
  v1::BarrierPolicy policy;
  EXPECT_EQ(Quorum(policy, 0), 1u);
  policy.set_min_workers(2);
  policy.set_min_fraction(0.1);
  EXPECT_EQ(Quorum(policy, 5), 2u);
  EXPECT_EQ(Quorum(policy, 30), 3u);  // Not 4 for the rounding of 0.1.
  EXPECT_EQ(Quorum(policy, 31), 4u);
  policy.set_min_fraction(1);
  EXPECT_EQ(Quorum(policy, 7), 7u);
}

}  // namespace
}  // namespace bmuf::engine
