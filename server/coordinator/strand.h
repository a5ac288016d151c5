// Runs long work of one job on shared threads, one piece at a time and in order.
//
// Problem: folding and committing touch the same sums and must not overlap or overtake each other, yet must not hold a
// thread while they wait for their turn.
// Idea: a queue per job; at most one of its tasks is with the executor.
#ifndef BMUF_SERVER_COORDINATOR_STRAND_H_
#define BMUF_SERVER_COORDINATOR_STRAND_H_

#include <deque>
#include <functional>
#include <memory>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace bmuf::coordinator {

// Runs a task on a thread of its choice, or at once. In the daemon: ThreadPool::Schedule.
using Executor = std::function<void(std::function<void()>)>;

// Thread-safe. Lives until its last task has run.
class Strand : public std::enable_shared_from_this<Strand> {
 public:
  explicit Strand(Executor executor) : executor_(std::move(executor)) {}

  void Schedule(std::function<void()> task) ABSL_LOCKS_EXCLUDED(mu_) {
    {
      absl::MutexLock lock(&mu_);
      tasks_.push_back(std::move(task));
      if (running_) return;
      running_ = true;
    }
    executor_([self = shared_from_this()] { self->RunOne(); });
  }

 private:
  void RunOne() ABSL_LOCKS_EXCLUDED(mu_) {
    std::function<void()> task;
    {
      absl::MutexLock lock(&mu_);
      task = std::move(tasks_.front());
      tasks_.pop_front();
    }
    task();
    task = nullptr;
    {
      absl::MutexLock lock(&mu_);
      if (tasks_.empty()) {
        running_ = false;
        return;
      }
    }
    executor_([self = shared_from_this()] { self->RunOne(); });
  }

  const Executor executor_;
  absl::Mutex mu_;
  std::deque<std::function<void()>> tasks_ ABSL_GUARDED_BY(mu_);
  bool running_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace bmuf::coordinator

#endif  // BMUF_SERVER_COORDINATOR_STRAND_H_
