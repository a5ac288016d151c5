#include "server/coordinator/loop.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace bmuf::coordinator {
namespace {

// Turns of the queue before the timer gets its chance although more is queued: a flood of requests must not hold back
// the barrier for ever.
constexpr int kMostRunsBeforeTimer = 16;
// A condition variable cannot wait until infinity; this is only a ceiling.
constexpr absl::Duration kLongestWait = absl::Hours(1);

}  // namespace

Loop::Loop(const Clock& clock, Options options) : clock_(clock), options_(options) {}

void Loop::Post(std::function<void()> task) {
  {
    const std::lock_guard<std::mutex> lock(mu_);
    tasks_.push_back(std::move(task));
  }
  wake_.notify_one();
}

bool Loop::PostRequest(std::function<void()> task) {
  {
    const std::lock_guard<std::mutex> lock(mu_);
    if (tasks_.size() >= options_.max_queued) return false;
    tasks_.push_back(std::move(task));
  }
  wake_.notify_one();
  return true;
}

size_t Loop::queued() const {
  const std::lock_guard<std::mutex> lock(mu_);
  return tasks_.size();
}

bool Loop::RunQueued() {
  std::deque<std::function<void()>> batch;
  {
    const std::lock_guard<std::mutex> lock(mu_);
    batch.swap(tasks_);
  }
  for (auto& task : batch) {
    task();
    task = nullptr;  // What it holds is let go here, not at the end of the batch.
  }
  return !batch.empty();
}

bool Loop::Turn() {
  bool worked = false;
  MonotonicTime now;
  for (int i = 0; i < kMostRunsBeforeTimer; ++i) {
    worked |= RunQueued();
    // What was queued before `now` was read is handled before a deadline is judged by it.
    now = clock_.Now();
    if (queued() == 0) break;
  }
  if (timer_ == nullptr) return worked;
  const MonotonicTime deadline = timer_->NextDeadline();
  if (deadline > now || now < no_deadline_before_) return worked;
  if (options_.pause_grace > absl::ZeroDuration() && now - deadline > options_.pause_noticed && graced_ != deadline) {
    graced_ = deadline;
    no_deadline_before_ = now + options_.pause_grace;
    return worked;
  }
  timer_->OnDeadline(now);
  return true;
}

void Loop::Run() {
  while (true) {
    Turn();
    MonotonicTime next = timer_ == nullptr ? MonotonicTime::InfiniteFuture() : timer_->NextDeadline();
    next = std::max(next, no_deadline_before_);
    std::unique_lock<std::mutex> lock(mu_);
    if (!tasks_.empty()) continue;
    if (stopping_) return;
    const absl::Duration wait = std::min(next - clock_.Now(), kLongestWait);
    if (wait <= absl::ZeroDuration()) continue;
    wake_.wait_for(lock, std::chrono::nanoseconds(absl::ToInt64Nanoseconds(wait)) + std::chrono::microseconds(1),
                   [this] { return !tasks_.empty() || stopping_; });
  }
}

void Loop::WaitQueued() {
  std::unique_lock<std::mutex> lock(mu_);
  wake_.wait(lock, [this] { return !tasks_.empty(); });
}

void Loop::Stop() {
  {
    const std::lock_guard<std::mutex> lock(mu_);
    stopping_ = true;
  }
  wake_.notify_one();
}

}  // namespace bmuf::coordinator
