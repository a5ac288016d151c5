// One thread that handles everything in order: closures from other threads, then timers.
//
// Problem: requests, results of computing and deadlines arrive from many threads, but decisions must be made one at a
// time, and a deadline must not be judged while the news that would move it is already waiting in the queue.
// Idea: a queue and one timer. Each turn empties the queue first; only when nothing is queued is the timer asked.
// Usage:
//   Loop loop(clock, {});
//   loop.SetTimer(&jobs);            // before the first turn
//   std::thread thread([&] { loop.Run(); });
//   loop.Post([] { ... });           // any thread
//   loop.Stop(); thread.join();
// Tests and simulators call Turn() themselves instead of Run().
#ifndef BMUF_SERVER_COORDINATOR_LOOP_H_
#define BMUF_SERVER_COORDINATOR_LOOP_H_

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <mutex>

#include "core/base/clock.h"

namespace bmuf::coordinator {

// What the loop asks when its queue is empty. Called on the loop's thread only.
class TimerClient {
 public:
  virtual ~TimerClient() = default;
  virtual MonotonicTime NextDeadline() = 0;
  // `now` is not before the deadline.
  virtual void OnDeadline(MonotonicTime now) = 0;
};

// Post, PostRequest, Stop and queued() are thread-safe; everything else is confined to the thread that turns the loop.
class Loop {
 public:
  struct Options {
    // After a pause of the whole process (suspend, SIGSTOP) longer than `pause_noticed`, deadlines are judged only this
    // much later: what peers sent meanwhile is still in the sockets and comes first. 0: off, for clocks that jump.
    absl::Duration pause_grace = absl::ZeroDuration();
    absl::Duration pause_noticed = absl::Seconds(1);
    // PostRequest refuses beyond this: each open call has at most a few closures here, so that more is an attack.
    size_t max_queued = 100'000;
  };

  // `clock` outlives the loop.
  Loop(const Clock& clock, Options options);
  Loop(const Loop&) = delete;
  Loop& operator=(const Loop&) = delete;

  // Not owned; null: no timer.
  void SetTimer(TimerClient* timer) { timer_ = timer; }

  // Queues `task`; never blocks for long. After Stop it is kept, and runs only if someone turns the loop.
  void Post(std::function<void()> task);
  // The same for work that a peer asked for: false, and nothing is queued, if the queue is full.
  bool PostRequest(std::function<void()> task);

  // One turn: runs what is queued, then the timer if it is due. True if anything was done. Never waits.
  bool Turn();
  // Turns until Stop(), waiting between turns. On return the queue is empty.
  void Run();
  // Blocks until something is queued (not for timers). For tests that wait for other threads.
  void WaitQueued();
  void Stop();

  size_t queued() const;
  const Clock& clock() const { return clock_; }

 private:
  bool RunQueued();

  const Clock& clock_;
  const Options options_;
  TimerClient* timer_ = nullptr;
  MonotonicTime no_deadline_before_;
  MonotonicTime graced_;  // The deadline for which no_deadline_before_ was set.

  // Not absl::Mutex: its timed waits follow the wall clock, and a clock step must not hold back a deadline.
  mutable std::mutex mu_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> tasks_;  // Guarded by mu_.
  bool stopping_ = false;                    // Guarded by mu_.
};

}  // namespace bmuf::coordinator

#endif  // BMUF_SERVER_COORDINATOR_LOOP_H_
