#include "server/coordinator/loop.h"

#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "server/coordinator/strand.h"

namespace bmuf::coordinator {
namespace {

// A timer that writes down when it rang.
class Alarm : public TimerClient {
 public:
  explicit Alarm(std::vector<std::string>* log) : log_(log) {}
  MonotonicTime NextDeadline() override { return deadline; }
  void OnDeadline(MonotonicTime now) override {
    log_->push_back("rang at " + absl::FormatDuration(now.since_origin()));
    deadline = MonotonicTime::InfiniteFuture();
    if (on_ring) on_ring();
  }
  MonotonicTime deadline = MonotonicTime::InfiniteFuture();
  std::function<void()> on_ring;

 private:
  std::vector<std::string>* log_;
};

TEST(LoopTest, RunsTasksInOrderAndNothingElse) {
  ManualClock clock;
  Loop loop(clock, {});
  std::vector<int> seen;
  for (int i = 0; i < 3; ++i) loop.Post([&seen, i] { seen.push_back(i); });
  EXPECT_TRUE(loop.Turn());
  EXPECT_EQ(seen, (std::vector<int>{0, 1, 2}));
  EXPECT_FALSE(loop.Turn());
}

TEST(LoopTest, WhatIsQueuedIsHandledBeforeADeadlineIsJudged) {
  ManualClock clock;
  Loop loop(clock, {});
  std::vector<std::string> log;
  Alarm alarm(&log);
  loop.SetTimer(&alarm);
  alarm.deadline = MonotonicTime::FromOrigin(absl::Seconds(1));
  clock.Advance(absl::Seconds(5));
  loop.Post([&] {
    log.push_back("first");
    loop.Post([&] {
      log.push_back("second");
      alarm.deadline = MonotonicTime::FromOrigin(absl::Seconds(6));  // The news moved the deadline.
    });
  });
  loop.Turn();
  EXPECT_EQ(log, (std::vector<std::string>{"first", "second"}));
  clock.Advance(absl::Seconds(1));
  loop.Turn();
  EXPECT_EQ(log.back(), "rang at 6s");
}

TEST(LoopTest, ADeadlineIsNotHeldBackForEverByAFlood) {
  ManualClock clock;
  Loop loop(clock, {});
  std::vector<std::string> log;
  Alarm alarm(&log);
  loop.SetTimer(&alarm);
  alarm.deadline = MonotonicTime();
  std::function<void()> flood = [&] { loop.Post(flood); };
  flood();
  loop.Turn();
  EXPECT_EQ(log.size(), 1u);
}

TEST(LoopTest, AfterALongPauseDeadlinesWaitForWhatIsInTheSockets) {
  ManualClock clock;
  Loop::Options options;
  options.pause_grace = absl::Seconds(1);
  Loop loop(clock, options);
  std::vector<std::string> log;
  Alarm alarm(&log);
  loop.SetTimer(&alarm);
  alarm.deadline = MonotonicTime::FromOrigin(absl::Seconds(1));
  clock.Advance(absl::Seconds(60));
  loop.Turn();
  EXPECT_TRUE(log.empty());
  clock.Advance(absl::Milliseconds(999));
  loop.Turn();
  EXPECT_TRUE(log.empty());
  clock.Advance(absl::Milliseconds(1));
  loop.Turn();
  EXPECT_EQ(log.size(), 1u);
  // A deadline that is met in time is judged at once.
  alarm.deadline = clock.Now() + absl::Seconds(1);
  clock.Advance(absl::Seconds(1));
  loop.Turn();
  EXPECT_EQ(log.size(), 2u);
}

TEST(LoopTest, RequestsBeyondTheLimitAreRefusedAndResultsAreNot) {
  ManualClock clock;
  Loop::Options options;
  options.max_queued = 2;
  Loop loop(clock, options);
  EXPECT_TRUE(loop.PostRequest([] {}));
  EXPECT_TRUE(loop.PostRequest([] {}));
  EXPECT_FALSE(loop.PostRequest([] {}));
  loop.Post([] {});
  EXPECT_EQ(loop.queued(), 3u);
  loop.Turn();
  EXPECT_TRUE(loop.PostRequest([] {}));
}

TEST(LoopTest, RunWakesForTasksAndDeadlinesAndEndsEmpty) {
  Loop loop(Clock::Real(), {});
  std::vector<std::string> log;
  Alarm alarm(&log);
  loop.SetTimer(&alarm);
  alarm.deadline = Clock::Real().Now() + absl::Milliseconds(2);
  alarm.on_ring = [&] {
    loop.Post([&log] { log.push_back("last"); });
    loop.Stop();
  };
  loop.Run();  // Ends because the alarm rings although nothing is posted.
  ASSERT_EQ(log.size(), 2u);
  EXPECT_EQ(log[1], "last");
}

TEST(LoopTest, TasksOfManyThreadsAllRun) {
  Loop loop(Clock::Real(), {});
  std::thread runner([&] { loop.Run(); });
  int count = 0;  // Touched by the loop's thread only, read after it ended.
  std::vector<std::thread> posters;
  for (int t = 0; t < 4; ++t) {
    posters.emplace_back([&] {
      for (int i = 0; i < 500; ++i) loop.Post([&count] { ++count; });
    });
  }
  for (std::thread& poster : posters) poster.join();
  loop.Stop();
  runner.join();
  EXPECT_EQ(count, 2000);
}

TEST(StrandTest, TasksDoNotOverlapOrOvertake) {
  std::vector<std::function<void()>> executor;
  auto strand = std::make_shared<Strand>([&](std::function<void()> task) { executor.push_back(std::move(task)); });
  std::vector<int> seen;
  for (int i = 0; i < 3; ++i) strand->Schedule([&seen, i] { seen.push_back(i); });
  for (int i = 0; i < 3; ++i) {
    ASSERT_EQ(executor.size(), 1u);  // One at a time.
    auto task = std::move(executor.back());
    executor.pop_back();
    task();
  }
  EXPECT_TRUE(executor.empty());
  EXPECT_EQ(seen, (std::vector<int>{0, 1, 2}));
}

}  // namespace
}  // namespace bmuf::coordinator
