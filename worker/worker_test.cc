// The command line and what a person sees.
#include <cstdio>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/exit_codes.h"
#include "worker/options.h"
#include "worker/report.h"

namespace bmuf::worker {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::SizeIs;

ParsedOptions Parse(std::vector<const char*> arguments) {
  arguments.insert(arguments.begin(), "bmuf-worker");
  return ParseOptions(static_cast<int>(arguments.size()), arguments.data());
}

TEST(OptionsTest, EveryFlagArrives) {
  const ParsedOptions p = Parse({"--coordinator",
                                 "host:7070",
                                 "--job",
                                 "j",
                                 "--name",
                                 "n",
                                 "--devices",
                                 "cpu:3",
                                 "--threads-per-device",
                                 "2",
                                 "--model",
                                 "cnn",
                                 "--data",
                                 "/d",
                                 "--batch-size",
                                 "32",
                                 "--optimizer",
                                 "adamw",
                                 "--lr",
                                 "0.001",
                                 "--schedule",
                                 "cosine",
                                 "--momentum",
                                 "0.8",
                                 "--weight-decay",
                                 "0.1",
                                 "--seed",
                                 "9",
                                 "--eval-every",
                                 "5",
                                 "--rounds",
                                 "50",
                                 "--codec",
                                 "bf16"});
  ASSERT_TRUE(p.run) << p.text;
  const WorkerOptions& o = p.options;
  EXPECT_EQ(o.coordinator, "host:7070");
  EXPECT_EQ(o.job, "j");
  EXPECT_EQ(o.name, "n");
  EXPECT_THAT(o.devices, SizeIs(3));
  EXPECT_EQ(o.threads_per_device, 2);
  EXPECT_EQ(o.model, "cnn");
  EXPECT_EQ(o.data, "/d");
  EXPECT_EQ(o.batch_size, 32u);
  EXPECT_EQ(o.optimizer.kind, OptimizerKind::kAdamW);
  EXPECT_EQ(o.optimizer.learning_rate, 0.001);
  EXPECT_EQ(o.optimizer.schedule, Schedule::kCosine);
  EXPECT_EQ(o.optimizer.momentum, 0.8);
  EXPECT_EQ(o.optimizer.weight_decay, 0.1);
  EXPECT_EQ(o.seed, 9u);
  EXPECT_EQ(o.eval_every, 5u);
  EXPECT_EQ(o.rounds, 50u);
  EXPECT_EQ(o.codec, "bf16");
}

TEST(OptionsTest, MistakesAreUsageErrorsThatNameTheFlag) {
  const std::vector<std::pair<std::vector<const char*>, const char*>> cases = {
      {{}, "--coordinator"},
      {{"--coordinator", "a:1"}, "--job"},
      {{"--coordinator", "a:1", "--job", "j", "--devices", "gpu"}, "devices"},
      {{"--coordinator", "a:1", "--job", "j", "--optimizer", "lion"}, "optimizer"},
      {{"--coordinator", "a:1", "--job", "j", "--schedule", "step"}, "schedule"},
      {{"--coordinator", "a:1", "--job", "j", "--lr", "0"}, "--lr"},
      {{"--coordinator", "a:1", "--job", "j", "--lr", "nan"}, "--lr"},
      {{"--coordinator", "a:1", "--job", "j", "--momentum", "1"}, "--momentum"},
      {{"--coordinator", "a:1", "--job", "j", "--weight-decay", "-1"}, "--weight-decay"},
      {{"--coordinator", "a:1", "--job", "j", "--batch-size", "0"}, "--batch-size"},
      {{"--coordinator", "a:1", "--job", "j", "--codec", "int3"}, "--codec"},
      {{"--coordinator", "a:1", "--job", "j", "--colour"}, "--colour"},
  };
  for (const auto& [arguments, word] : cases) {
    const ParsedOptions p = Parse(arguments);
    EXPECT_FALSE(p.run) << word;
    EXPECT_EQ(p.exit_code, kExitUsage) << word;
    EXPECT_THAT(p.text, HasSubstr(word));
  }
}

TEST(OptionsTest, HelpIsNoMistakeAndTellsTheExitCodes) {
  const ParsedOptions p = Parse({"--help"});
  EXPECT_FALSE(p.run);
  EXPECT_EQ(p.exit_code, 0);
  EXPECT_THAT(p.text, HasSubstr("66 data set"));
}

TEST(ReportTest, TheBarFillsUp) {
  EXPECT_EQ(ProgressBar(0, 10, 5), "[>    ] 0/10");
  EXPECT_EQ(ProgressBar(5, 10, 5), "[==>  ] 5/10");
  EXPECT_EQ(ProgressBar(10, 10, 5), "[=====] 10/10");
  EXPECT_EQ(ProgressBar(12, 10, 5), "[=====] 12/10");
  EXPECT_EQ(ProgressBar(7, 0, 5), "round 7");
}

class ReportOutputTest : public ::testing::Test {
 protected:
  std::string Output(bool terminal) {
    char* text = nullptr;
    size_t size = 0;
    std::FILE* out = open_memstream(&text, &size);
    {
      Report report(out, terminal);
      for (uint64_t round = 1; round <= 25; ++round) {
        report.Round({round, 25, 4, 0.5, 1000, absl::Milliseconds(200)});
      }
      report.Line("final accuracy 0.9");
    }
    std::fclose(out);
    std::string result(text, size);
    free(text);
    return result;
  }
};

TEST_F(ReportOutputTest, PlainOutputHasFewWholeLinesAndNoControlCharacters) {
  EXPECT_EQ(Output(false),
            "round 1/25  loss 0.5000  1000 samples/s  waited 0.2 s  4 trajectories\n"
            "round 10/25  loss 0.5000  1000 samples/s  waited 0.2 s  4 trajectories\n"
            "round 20/25  loss 0.5000  1000 samples/s  waited 0.2 s  4 trajectories\n"
            "round 25/25  loss 0.5000  1000 samples/s  waited 0.2 s  4 trajectories\n"
            "final accuracy 0.9\n");
}

TEST_F(ReportOutputTest, ATerminalGetsOneBarAndLinesBelowIt) {
  const std::string output = Output(true);
  EXPECT_THAT(output, HasSubstr("\r\x1b[2K[===="));
  EXPECT_THAT(output, HasSubstr("\r\x1b[2Kfinal accuracy 0.9\n"));
  EXPECT_THAT(output, Not(HasSubstr("samples/s\n")));
}

}  // namespace
}  // namespace bmuf::worker
