#include "server/storage/ledger_conformance.h"

#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/base/limits.h"

namespace bmuf::storage {
namespace {

v1::RoundRecord Record(uint64_t round, double norm = 1) {
  v1::RoundRecord record;
  record.set_round(round);
  record.set_mean_norm(norm);
  record.add_contributions()->set_worker("w1");
  return record;
}

JobRow Row(const std::string& name) {
  JobRow row;
  row.name = name;
  row.config.set_block_steps(40);
  return row;
}

v1::Manifest OneTensor(const std::string& name) {
  v1::Manifest manifest;
  manifest.add_tensors()->set_name(name);
  return manifest;
}

TEST_P(LedgerConformanceTest, EachEpochIsAboveTheOneBefore) {
  const Epoch before = *ledger_->CurrentEpoch();
  const Epoch first = *ledger_->RaiseEpoch();
  EXPECT_GT(first, before);
  EXPECT_EQ(*ledger_->CurrentEpoch(), first);
  EXPECT_GT(*ledger_->RaiseEpoch(), first);
}

TEST_P(LedgerConformanceTest, ReturnsWhatWasPut) {
  const Epoch epoch = *ledger_->RaiseEpoch();
  JobRow row = Row("lm");
  row.manifest = OneTensor("w");
  ASSERT_TRUE(ledger_->PutJob(epoch, row).ok());
  ASSERT_TRUE(ledger_->PutJob(epoch, Row("other")).ok());
  ASSERT_TRUE(ledger_->AppendRound(epoch, "lm", Record(1, 0.5)).ok());
  ASSERT_TRUE(ledger_->AppendRound(epoch, "lm", Record(2, 0.25)).ok());
  const LedgerContents contents = *ledger_->ReadAll();
  EXPECT_EQ(contents.epoch, epoch);
  ASSERT_EQ(contents.jobs.size(), 2u);
  const JobHistory& lm = contents.jobs.at("lm");
  EXPECT_EQ(lm.job.config.block_steps(), 40u);
  ASSERT_TRUE(lm.job.manifest.has_value());
  EXPECT_EQ(lm.job.manifest->tensors(0).name(), "w");
  ASSERT_EQ(lm.rounds.size(), 2u);
  EXPECT_EQ(lm.rounds[0].mean_norm(), 0.5);
  EXPECT_EQ(lm.rounds[1].round(), 2u);
  EXPECT_EQ(lm.rounds[1].contributions(0).worker(), "w1");
  EXPECT_TRUE(contents.jobs.at("other").rounds.empty()) << "one job's round is not another's";
  EXPECT_FALSE(contents.jobs.at("other").job.manifest.has_value());
}

TEST_P(LedgerConformanceTest, AnOvertakenWriterChangesNothing) {
  const Epoch old_epoch = *ledger_->RaiseEpoch();
  ASSERT_TRUE(ledger_->PutJob(old_epoch, Row("lm")).ok());
  ASSERT_TRUE(ledger_->AppendRound(old_epoch, "lm", Record(1)).ok());
  const Epoch new_epoch = *ledger_->RaiseEpoch();

  const absl::Status append = ledger_->AppendRound(old_epoch, "lm", Record(2));
  EXPECT_EQ(ReasonOf(append), v1::REASON_EPOCH_CHANGED);
  EXPECT_EQ(MetadataOf(append, "epoch"), absl::StrCat(new_epoch.value()));
  EXPECT_EQ(ReasonOf(ledger_->AppendRound(old_epoch, "lm", Record(1))), v1::REASON_EPOCH_CHANGED)
      << "not even a repeat";
  EXPECT_EQ(ReasonOf(ledger_->PutJob(old_epoch, Row("late"))), v1::REASON_EPOCH_CHANGED);
  EXPECT_EQ(ReasonOf(ledger_->AppendRound(new_epoch.Next(), "lm", Record(2))), v1::REASON_EPOCH_CHANGED)
      << "an epoch that nobody was given";

  const LedgerContents contents = *ledger_->ReadAll();
  EXPECT_EQ(contents.jobs.size(), 1u);
  EXPECT_EQ(contents.jobs.at("lm").rounds.size(), 1u);
  EXPECT_TRUE(ledger_->AppendRound(new_epoch, "lm", Record(2)).ok());
}

TEST_P(LedgerConformanceTest, RoundsFollowOneAnother) {
  const Epoch epoch = *ledger_->RaiseEpoch();
  EXPECT_EQ(ReasonOf(ledger_->AppendRound(epoch, "lm", Record(1))), v1::REASON_JOB_NOT_FOUND);
  ASSERT_TRUE(ledger_->PutJob(epoch, Row("lm")).ok());
  EXPECT_EQ(ReasonOf(ledger_->AppendRound(epoch, "lm", Record(0))), v1::REASON_WRONG_STATE);
  ASSERT_TRUE(ledger_->AppendRound(epoch, "lm", Record(5)).ok()) << "a history may begin after a dropped past";
  EXPECT_EQ(ReasonOf(ledger_->AppendRound(epoch, "lm", Record(7))), v1::REASON_WRONG_STATE);
  EXPECT_EQ(ReasonOf(ledger_->AppendRound(epoch, "lm", Record(4))), v1::REASON_WRONG_STATE);
  ASSERT_TRUE(ledger_->AppendRound(epoch, "lm", Record(6)).ok());
  EXPECT_EQ(ledger_->ReadAll()->jobs.at("lm").rounds.size(), 2u);
}

TEST_P(LedgerConformanceTest, ARepeatedCommitCountsOnceAndAnotherOneNever) {
  const Epoch epoch = *ledger_->RaiseEpoch();
  ASSERT_TRUE(ledger_->PutJob(epoch, Row("lm")).ok());
  ASSERT_TRUE(ledger_->AppendRound(epoch, "lm", Record(1, 0.5)).ok());
  EXPECT_TRUE(ledger_->AppendRound(epoch, "lm", Record(1, 0.5)).ok());
  EXPECT_EQ(ReasonOf(ledger_->AppendRound(epoch, "lm", Record(1, 0.75))), v1::REASON_WRONG_STATE);
  const LedgerContents contents = *ledger_->ReadAll();
  ASSERT_EQ(contents.jobs.at("lm").rounds.size(), 1u);
  EXPECT_EQ(contents.jobs.at("lm").rounds[0].mean_norm(), 0.5);
}

TEST_P(LedgerConformanceTest, AManifestComesOnceAndConfigurationMayChange) {
  const Epoch epoch = *ledger_->RaiseEpoch();
  ASSERT_TRUE(ledger_->PutJob(epoch, Row("lm")).ok());
  ASSERT_TRUE(ledger_->AppendRound(epoch, "lm", Record(1)).ok());
  JobRow row = Row("lm");
  row.manifest = OneTensor("w");
  row.config.set_block_steps(10);
  ASSERT_TRUE(ledger_->PutJob(epoch, row).ok());
  EXPECT_EQ(ledger_->ReadAll()->jobs.at("lm").job.config.block_steps(), 10u);
  EXPECT_EQ(ledger_->ReadAll()->jobs.at("lm").rounds.size(), 1u) << "rounds stay";
  EXPECT_EQ(ReasonOf(ledger_->PutJob(epoch, Row("lm"))), v1::REASON_WRONG_STATE) << "a manifest cannot vanish";
  row.manifest = OneTensor("other");
  EXPECT_EQ(ReasonOf(ledger_->PutJob(epoch, row)), v1::REASON_WRONG_STATE);
  EXPECT_EQ(ledger_->ReadAll()->jobs.at("lm").job.manifest->tensors(0).name(), "w");
}

TEST_P(LedgerConformanceTest, JobsAreNamedAndBounded) {
  const Epoch epoch = *ledger_->RaiseEpoch();
  EXPECT_EQ(ReasonOf(ledger_->PutJob(epoch, Row(""))), v1::REASON_INVALID_REQUEST);
  for (size_t i = 0; i < limits::kMaxJobs; ++i) {
    ASSERT_TRUE(ledger_->PutJob(epoch, Row(absl::StrCat("job", i))).ok());
  }
  EXPECT_EQ(ReasonOf(ledger_->PutJob(epoch, Row("one-more"))), v1::REASON_TOO_MANY);
  EXPECT_TRUE(ledger_->PutJob(epoch, Row("job0")).ok()) << "a change of one that is there";
}

TEST_P(LedgerConformanceTest, WritersOfTwoJobsDoNotDisturbEachOther) {
  const Epoch epoch = *ledger_->RaiseEpoch();
  constexpr uint64_t kRounds = 200;
  for (const char* job : {"a", "b"}) ASSERT_TRUE(ledger_->PutJob(epoch, Row(job)).ok());
  std::vector<std::thread> writers;
  std::vector<int> failures(2, 0);
  for (int i = 0; i < 2; ++i) {
    writers.emplace_back([&, i] {
      for (uint64_t round = 1; round <= kRounds; ++round) {
        if (!ledger_->AppendRound(epoch, i == 0 ? "a" : "b", Record(round)).ok()) ++failures[i];
      }
    });
  }
  for (std::thread& writer : writers) writer.join();
  EXPECT_EQ(failures, std::vector<int>(2, 0));
  const LedgerContents contents = *ledger_->ReadAll();
  for (const char* job : {"a", "b"}) EXPECT_EQ(contents.jobs.at(job).rounds.size(), kRounds);
}

}  // namespace
}  // namespace bmuf::storage
