#include "server/storage/memory_ledger.h"

#include <memory>

#include "core/base/limits.h"
#include "gtest/gtest.h"
#include "server/storage/ledger_conformance.h"

namespace bmuf::storage {
namespace {

INSTANTIATE_TEST_SUITE_P(Memory, LedgerConformanceTest,
                         testing::Values(LedgerFactory([] { return std::make_unique<MemoryLedger>(Epoch(0)); })));

TEST(MemoryLedgerTest, EpochsStartAboveTheGivenOne) {
  MemoryLedger ledger(Epoch(1'700'000'000));
  EXPECT_EQ(*ledger.RaiseEpoch(), Epoch(1'700'000'001));
}

TEST(MemoryLedgerTest, KeepsTheNewestRecordsOnly) {
  MemoryLedger ledger(Epoch(0));
  const Epoch epoch = *ledger.RaiseEpoch();
  JobRow row;
  row.name = "lm";
  ASSERT_TRUE(ledger.PutJob(epoch, row).ok());
  v1::RoundRecord record;
  for (uint64_t round = 1; round <= limits::kMaxRoundRecords + 5; ++round) {
    record.set_round(round);
    ASSERT_TRUE(ledger.AppendRound(epoch, "lm", record).ok());
  }
  const LedgerContents contents = *ledger.ReadAll();
  EXPECT_EQ(contents.jobs.at("lm").rounds.size(), limits::kMaxRoundRecords);
  EXPECT_EQ(contents.jobs.at("lm").rounds.front().round(), 6u);
  EXPECT_EQ(contents.jobs.at("lm").rounds.back().round(), limits::kMaxRoundRecords + 5);
}

}  // namespace
}  // namespace bmuf::storage
