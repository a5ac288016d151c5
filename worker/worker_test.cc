// The command line, what a person sees, and the loop carried out on a fake coordinator and fake trainers.
#include "worker/worker.h"

#include <cmath>
#include <cstdio>
#include <functional>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/exit_codes.h"
#include "worker/options.h"
#include "worker/report.h"
#include "worker/trainer/fake_trainer.h"

namespace bmuf::worker {
namespace {

using ::testing::ElementsAre;
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

// A coordinator with one worker: the new version is what the worker pushed. Remembers the calls.
class FakeExchange : public Exchange {
 public:
  Event Join() override {
    Note("join");
    if (on_join) return on_join();
    return Joined{has_model ? version + 1 : 0, !has_model, warmup_steps, max_rounds, true, 1};
  }
  Event UploadInitial(const ModelState& m) override {
    Note("upload");
    model = m.Clone();
    has_model = true;
    return InitialUploaded{};
  }
  Event AwaitRound(uint64_t round) override {
    Note(absl::StrCat("await ", round));
    if (interrupted) return Interrupted{};
    if (round == 0) return Committed{0, 1, true, false};
    return RoundStarted{round, round - 1, 3, 8, 2, 100 * round};
  }
  Event Pull(std::optional<uint64_t>, ModelState* out) override {
    Note("pull");
    *out = model.Clone();
    return Pulled{version};
  }
  Event Push(uint64_t round, const ModelState& base, const ModelState& local, const v1::BlockFacts& f) override {
    Note(absl::StrCat("push ", round));
    EXPECT_EQ(base.bmuf[0], model.bmuf[0]);
    pushed = local.Clone();
    facts.push_back(f);
    if (on_push) on_push();
    return PushAccepted{};
  }
  Event AwaitCommit(uint64_t round) override {
    Note(absl::StrCat("commit ", round));
    if (interrupted) return Interrupted{};
    model = pushed.Clone();
    version = round;
    return Committed{round, round + 1, true, round == max_rounds};
  }
  Event Leave(const std::string& reason) override {
    Note(absl::StrCat("leave: ", reason));
    return Left{};
  }
  void Interrupt() override { interrupted = true; }

  void Note(const std::string& call) { calls.push_back(call); }

  bool has_model = false;
  uint32_t warmup_steps = 0;
  uint64_t max_rounds = 2, version = 0;
  std::function<Event()> on_join;
  std::function<void()> on_push;
  bool interrupted = false;
  ModelState model, pushed;
  std::vector<v1::BlockFacts> facts;
  std::vector<std::string> calls;
};

class WorkerTest : public ::testing::Test {
 protected:
  WorkerTest() {
    std::vector<std::unique_ptr<Trainer>> trainers;
    for (FakeTrainer*& f : fakes_) {
      trainers.push_back(std::make_unique<FakeTrainer>());
      f = static_cast<FakeTrainer*>(trainers.back().get());
    }
    trajectories_ = std::make_unique<Trajectories>(std::move(trainers), NewCpuNodeReducer(), 1000);
    Worker::Options options;
    options.batch_size = 4;
    options.loop.eval_every = 1;
    worker_ = std::make_unique<Worker>(options, *trajectories_, exchange_, clock_, report_);
  }
  FakeTrainer* fakes_[2];
  std::unique_ptr<Trajectories> trajectories_;
  FakeExchange exchange_;
  ManualClock clock_;
  Report report_{stderr, false};
  std::unique_ptr<Worker> worker_;
};

TEST_F(WorkerTest, BringsTheInitialModelTrainsToTheEndAndEvaluates) {
  const auto finish = worker_->Run();
  ASSERT_TRUE(finish.ok()) << finish.status();
  EXPECT_EQ(finish->outcome, Finish::Outcome::kDone);
  EXPECT_THAT(exchange_.calls, ElementsAre("join", "upload", "await 0", "pull", "await 1", "push 1", "commit 1", "pull",
                                           "await 2", "push 2", "commit 2", "pull", "leave: done"));
  // Both trajectories trained their slices of round 2, from the version of round 1.
  SampleStream stream(1, 1000);
  EXPECT_EQ(fakes_[1]->samples, stream.Slice(200 + (3 + 1) * 8, 8));
  float expected = 0;
  for (uint64_t round : {1, 2}) {
    for (uint32_t i : stream.Slice(100 * round + 3 * 8, 16)) expected += static_cast<float>(i) / 2;
  }
  EXPECT_FLOAT_EQ(exchange_.model.bmuf[0], expected);
  EXPECT_EQ(fakes_[0]->resets, 2);
  ASSERT_TRUE(worker_->final_evaluation().has_value());
  EXPECT_FLOAT_EQ(static_cast<float>(worker_->final_evaluation()->loss), expected);
}

TEST_F(WorkerTest, PushesCarrySamplesLossAndTheLastEvaluation) {
  fakes_[0]->loss = 2;
  ASSERT_TRUE(worker_->Run().ok());
  ASSERT_THAT(exchange_.facts, SizeIs(2));
  EXPECT_EQ(exchange_.facts[0].samples(), 16u);
  EXPECT_EQ(exchange_.facts[0].steps(), 2u);
  EXPECT_EQ(exchange_.facts[0].metrics().at("loss"), 1.0);
  EXPECT_EQ(exchange_.facts[0].metrics().count("accuracy"), 0u);
  EXPECT_EQ(exchange_.facts[1].metrics().count("accuracy"), 1u);
  EXPECT_EQ(exchange_.facts[1].metrics().count("samples_per_second"), 1u);
}

TEST_F(WorkerTest, WarmsUpAloneBeforeUploading) {
  exchange_.warmup_steps = 3;
  exchange_.max_rounds = 1;
  std::vector<uint32_t> seen;
  exchange_.on_push = [&] { EXPECT_EQ(exchange_.calls[1], "upload"); };
  ASSERT_TRUE(worker_->Run().ok());
  EXPECT_GT(exchange_.model.bmuf[0], 0);
  EXPECT_EQ(fakes_[0]->resets, 2);  // After the warm-up, and after the block.
}

TEST_F(WorkerTest, StopDuringABlockPushesItAndLeaves) {
  exchange_.on_push = [&] { worker_->RequestStop(); };
  const auto finish = worker_->Run();
  ASSERT_TRUE(finish.ok()) << finish.status();
  EXPECT_EQ(finish->outcome, Finish::Outcome::kStopped);
  EXPECT_THAT(exchange_.calls,
              ElementsAre("join", "upload", "await 0", "pull", "await 1", "push 1", "leave: asked to stop"));
}

TEST_F(WorkerTest, StopBeforeTheStartDoesNothing) {
  worker_->RequestStop();
  EXPECT_EQ(worker_->Run()->outcome, Finish::Outcome::kStopped);
  EXPECT_TRUE(exchange_.calls.empty());
}

TEST_F(WorkerTest, ARefusalEndsWithItsReason) {
  exchange_.on_join = [] { return Refused{"job nowhere does not exist", false}; };
  const auto finish = worker_->Run();
  ASSERT_TRUE(finish.ok());
  EXPECT_EQ(finish->outcome, Finish::Outcome::kRefused);
  EXPECT_EQ(finish->reason, "job nowhere does not exist");
}

TEST_F(WorkerTest, DivergedTrainingIsNotPushed) {
  fakes_[1]->loss = std::nan("");
  const auto finish = worker_->Run();
  EXPECT_EQ(finish.status().code(), absl::StatusCode::kOutOfRange);
  EXPECT_THAT(std::string(finish.status().message()), HasSubstr("round 1"));
  EXPECT_THAT(exchange_.calls.back(), HasSubstr("leave: training diverged"));
  EXPECT_TRUE(exchange_.facts.empty());
}

TEST_F(WorkerTest, AFaultOfTheTrainerLeavesTheJob) {
  fakes_[0]->fail = true;
  EXPECT_EQ(worker_->Run().status().code(), absl::StatusCode::kInternal);
  EXPECT_THAT(exchange_.calls.back(), HasSubstr("leave: trajectory 0: no power"));
}

}  // namespace
}  // namespace bmuf::worker
