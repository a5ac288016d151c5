#include <atomic>
#include <numeric>
#include <string>
#include <type_traits>
#include <vector>

#include "absl/synchronization/notification.h"
#include "core/base/aligned_buffer.h"
#include "core/base/clock.h"
#include "core/base/crc32c.h"
#include "core/base/ids.h"
#include "core/base/status_macros.h"
#include "core/base/thread_pool.h"
#include "gtest/gtest.h"

namespace bmuf {
namespace {

TEST(IdsTest, MeaningsDoNotConvertIntoEachOther) {
  static_assert(!std::is_convertible_v<RoundId, ModelVersion>);
  static_assert(!std::is_convertible_v<uint64_t, RoundId>);
  static_assert(!std::is_constructible_v<Incarnation, Epoch>);
}

TEST(IdsTest, ARoundStartsFromTheVersionBeforeIt) {
  EXPECT_EQ(BaseVersionOf(RoundId(1)), ModelVersion(0));
  EXPECT_EQ(CommittedVersionOf(RoundId(1)), ModelVersion(1));
  EXPECT_EQ(RoundFrom(ModelVersion(6)), RoundId(7));
}

TEST(ClockTest, TheRealClockNeverGoesBack) {
  MonotonicTime last = Clock::Real().Now();
  for (int i = 0; i < 1000; ++i) {
    MonotonicTime now = Clock::Real().Now();
    ASSERT_GE(now, last);
    last = now;
  }
}

TEST(ClockTest, AWallClockStepLeavesMonotonicTimeAlone) {
  ManualClock clock;
  clock.Advance(absl::Seconds(5));
  clock.StepWall(-absl::Hours(2));
  EXPECT_EQ(clock.Now() - MonotonicTime(), absl::Seconds(5));
  EXPECT_EQ(clock.WallNow() - absl::UnixEpoch(), absl::Seconds(5) - absl::Hours(2));
}

TEST(Crc32cTest, MatchesPublishedValues) {
  // RFC 3720, B.4.
  EXPECT_EQ(Crc32c("123456789", 9), 0xe3069283u);
  std::string zeros(32, '\0'), ones(32, '\xff'), rising(32, '\0');
  std::iota(rising.begin(), rising.end(), '\0');
  EXPECT_EQ(Crc32c(zeros.data(), 32), 0x8a9136aau);
  EXPECT_EQ(Crc32c(ones.data(), 32), 0x62a8ab43u);
  EXPECT_EQ(Crc32c(rising.data(), 32), 0x46dd794eu);
  EXPECT_EQ(Crc32c("", 0), 0u);
}

TEST(Crc32cTest, ExtendingAndCombiningEqualTheWhole) {
  std::string data(100'003, '\0');
  for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<char>(i * 2654435761u >> 13);
  const uint32_t whole = Crc32c(data.data(), data.size());
  for (size_t cut : {size_t{0}, size_t{1}, size_t{63}, size_t{4096}, size_t{99'999}, data.size()}) {
    const uint32_t a = Crc32c(data.data(), cut);
    const uint32_t b = Crc32c(data.data() + cut, data.size() - cut);
    EXPECT_EQ(ExtendCrc32c(a, data.data() + cut, data.size() - cut), whole) << cut;
    EXPECT_EQ(CombineCrc32c(a, b, data.size() - cut), whole) << cut;
  }
}

TEST(AlignedBufferTest, IsAlignedZeroedAndMovable) {
  AlignedBuffer<float> a(1001);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(a.data()) % 64, 0u);
  for (float x : a) EXPECT_EQ(x, 0.0f);
  a[1000] = 3;
  AlignedBuffer<float> copy = a.Clone();
  AlignedBuffer<float> b = std::move(a);
  EXPECT_EQ(b[1000], 3);
  EXPECT_EQ(copy[1000], 3);
  EXPECT_TRUE(a.empty());  // NOLINT: a moved-from buffer is empty by contract.
  EXPECT_TRUE(AlignedBuffer<float>(0).empty());
}

TEST(ThreadPoolTest, RunsEverythingBeforeItIsGone) {
  std::atomic<int> ran{0};
  {
    ThreadPool pool("test", 3);
    for (int i = 0; i < 1000; ++i) pool.Schedule([&] { ++ran; });
  }
  EXPECT_EQ(ran, 1000);
}

TEST(ThreadPoolTest, ParallelForCoversEachIndexOnceAtAnySize) {
  ThreadPool pool("test", 3);
  for (size_t size : {0u, 1u, 63u, 64u, 65u, 1000u, 100'001u}) {
    std::vector<std::atomic<int>> seen(size);
    pool.ParallelFor(size, 64, [&](size_t begin, size_t end) {
      for (size_t i = begin; i < end; ++i) ++seen[i];
    });
    for (size_t i = 0; i < size; ++i) ASSERT_EQ(seen[i], 1) << size << " at " << i;
  }
}

TEST(ThreadPoolTest, ParallelForWorksInsideATaskOfABusyPool) {
  ThreadPool pool("test", 1);
  std::atomic<size_t> sum{0};
  absl::Notification done;
  pool.Schedule([&] {
    pool.ParallelFor(10'000, 64, [&](size_t begin, size_t end) { sum += end - begin; });
    done.Notify();
  });
  done.WaitForNotification();
  EXPECT_EQ(sum, 10'000u);
}

absl::StatusOr<int> Twice(absl::StatusOr<int> x) {
  ASSIGN_OR_RETURN(int value, std::move(x));
  RETURN_IF_ERROR(value < 0 ? absl::OutOfRangeError("negative") : absl::OkStatus());
  return 2 * value;
}

TEST(StatusMacrosTest, ReturnTheErrorElseGoOn) {
  EXPECT_EQ(*Twice(4), 8);
  EXPECT_EQ(Twice(-1).status().code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(Twice(absl::DataLossError("gone")).status().code(), absl::StatusCode::kDataLoss);
}

}  // namespace
}  // namespace bmuf
