#include "client/ctl/text.h"

#include <string>

#include "gtest/gtest.h"

namespace bmuf::ctl {
namespace {

TEST(TextTest, DurationsAreShort) {
  EXPECT_EQ(Short(absl::Milliseconds(850)), "850ms");
  EXPECT_EQ(Short(absl::Seconds(12.34)), "12.3s");
  EXPECT_EQ(Short(absl::Seconds(245)), "4m05s");
  EXPECT_EQ(Short(absl::Minutes(192)), "3h12m");
  EXPECT_EQ(Short(absl::Hours(52)), "2d04h");
  EXPECT_EQ(Short(-absl::Seconds(1)), "0ms");
}

TEST(TextTest, BytesHaveUnits) {
  EXPECT_EQ(Bytes(512), "512 B");
  EXPECT_EQ(Bytes(1536), "1.5 KiB");
  EXPECT_EQ(Bytes(400'000'000), "381.5 MiB");
}

TEST(TextTest, ColumnsLineUp) {
  Table table({"A", "LONG"});
  table.Add({"wide cell", "1"});
  EXPECT_EQ(table.ToString(), "A          LONG\nwide cell  1\n");
}

v1::JobStatus Waiting() {
  v1::JobStatus status;
  status.set_job("lm");
  status.set_state(v1::JOB_STATE_RUNNING);
  status.set_has_model(true);
  status.set_version(6);
  v1::RoundStatus* round = status.mutable_round();
  round->set_round(7);
  round->set_phase(v1::ROUND_PHASE_COLLECTING);
  round->set_have(2);
  round->set_expected(4);
  round->set_need(2);
  round->set_reason("have 2 of 4 (need 2), waiting for w3 and w4");
  v1::AwaitedWorker* half = round->add_awaited();
  half->set_worker("w3");
  half->set_received_bytes(50);
  half->set_total_bytes(100);
  round->add_awaited()->set_worker("w4");
  round->mutable_time_to_deadline()->set_seconds(41);
  round->mutable_deadline()->set_seconds(1'700'000'000);
  v1::WorkerStatus* worker = status.add_workers();
  worker->set_worker("w3");
  worker->set_state(v1::WorkerStatus::STATE_ACTIVE);
  worker->set_part(v1::WorkerStatus::PART_UPLOADING);
  worker->set_received_bytes(50);
  worker->set_total_bytes(100);
  return status;
}

TEST(TextTest, StatusSaysWhoIsWaitedForUntilWhenAndWhy) {
  const std::string text = StatusText(Waiting());
  for (const char* part : {"job lm: RUNNING", "round 7: COLLECTING, have 2 of 4 (need 2)", "waiting for w3 and w4",
                           "next deadline at", "in 41.0s", "UPLOADING", "50%"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << " in\n" << text;
  }
}

TEST(TextTest, ProgressCountsUploadsInPart) {
  EXPECT_EQ(ProgressLine(Waiting(), 60), "round 7 [############........] 2/4 have 2 of 4 (need 2), wai");
  EXPECT_EQ(ProgressLine(v1::JobStatus(), 60), "round 0 [....................] 0/0 ");
}

TEST(TextTest, RoundLineShowsTheWeightedMeanOfWhatWasSent) {
  v1::RoundRecord record;
  record.set_round(3);
  record.set_expected(3);
  record.set_reason("all 2 are in");
  for (double weight : {1.0, 3.0}) {
    v1::Contribution* part = record.add_contributions();
    part->set_weight(weight);
    (*part->mutable_facts()->mutable_metrics())["loss"] = weight;
  }
  record.mutable_duration()->set_seconds(2);
  EXPECT_EQ(RoundLine(record), "round 3 committed: 2 of 3, loss 2.5000, 2.0s (all 2 are in)");
  double mean;
  EXPECT_FALSE(MeanMetric(record, "accuracy", &mean));
}

}  // namespace
}  // namespace bmuf::ctl
