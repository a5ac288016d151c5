// A fixed set of threads for work that takes long: verifying, folding, the outer update, encoding.
#ifndef BMUF_CORE_BASE_THREAD_POOL_H_
#define BMUF_CORE_BASE_THREAD_POOL_H_

#include <cstddef>
#include <deque>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace bmuf {

// Runs tasks in the order of Schedule on `thread_count` threads. Thread-safe. A task must not throw.
class ThreadPool {
 public:
  // Requires thread_count >= 1. `name` (at most 15 characters) shows in debuggers.
  ThreadPool(const std::string& name, size_t thread_count);
  // Runs what was scheduled, then joins.
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  // Queues `task`; never blocks for long. Callers bound their own number of open tasks.
  void Schedule(std::function<void()> task) ABSL_LOCKS_EXCLUDED(mu_);

  size_t thread_count() const { return threads_.size(); }

  // Splits [0, size) into pieces of at least `min_piece` (multiples of 64) and calls body(begin, end) on each, on the
  // pool's threads and on the caller's; returns when all are done. Pieces depend on size and thread_count alone, and
  // bodies write disjoint ranges, so results do not depend on timing. May be called from a task of this pool.
  void ParallelFor(size_t size, size_t min_piece, const std::function<void(size_t, size_t)>& body);

 private:
  void Run();

  absl::Mutex mu_;
  std::deque<std::function<void()>> tasks_ ABSL_GUARDED_BY(mu_);
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::vector<std::thread> threads_;  // Constant after construction.
};

}  // namespace bmuf

#endif  // BMUF_CORE_BASE_THREAD_POOL_H_
