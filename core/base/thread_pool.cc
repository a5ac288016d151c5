#include "core/base/thread_pool.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <utility>

#include "absl/synchronization/blocking_counter.h"

namespace bmuf {

ThreadPool::ThreadPool(const std::string& name, size_t thread_count) {
  threads_.reserve(thread_count);
  for (size_t i = 0; i < thread_count; ++i) {
    threads_.emplace_back([this] { Run(); });
    pthread_setname_np(threads_.back().native_handle(), name.substr(0, 15).c_str());
  }
}

ThreadPool::~ThreadPool() {
  {
    absl::MutexLock lock(&mu_);
    stopping_ = true;
  }
  for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::Schedule(std::function<void()> task) {
  absl::MutexLock lock(&mu_);
  tasks_.push_back(std::move(task));
}

void ThreadPool::Run() {
  while (true) {
    std::function<void()> task;
    {
      absl::MutexLock lock(&mu_);
      mu_.Await(absl::Condition(
          +[](ThreadPool* pool)
               ABSL_EXCLUSIVE_LOCKS_REQUIRED(pool->mu_) { return pool->stopping_ || !pool->tasks_.empty(); },
          this));
      if (tasks_.empty()) return;
      task = std::move(tasks_.front());
      tasks_.pop_front();
    }
    task();
  }
}

void ThreadPool::ParallelFor(size_t size, size_t min_piece, const std::function<void(size_t, size_t)>& body) {
  if (size == 0) return;
  const size_t parties = threads_.size() + 1;
  size_t piece = std::max<size_t>((size + parties - 1) / parties, std::max<size_t>(min_piece, 1));
  piece = (piece + 63) / 64 * 64;
  const size_t pieces = (size + piece - 1) / piece;
  if (pieces == 1) {
    body(0, size);
    return;
  }
  // Pieces are claimed, not assigned: if all threads are busy the caller does every one itself, so that a task of
  // this pool may call in without a deadlock. A helper that comes late finds nothing and touches only this state.
  struct State {
    std::atomic<size_t> next{0};
    size_t size, piece, pieces;
    const std::function<void(size_t, size_t)>* body;
    std::unique_ptr<absl::BlockingCounter> done;
  };
  auto state = std::make_shared<State>();
  state->size = size;
  state->piece = piece;
  state->pieces = pieces;
  state->body = &body;
  state->done = std::make_unique<absl::BlockingCounter>(static_cast<int>(pieces));
  auto work = [state] {
    size_t i;
    while ((i = state->next.fetch_add(1)) < state->pieces) {
      const size_t begin = i * state->piece;
      (*state->body)(begin, std::min(begin + state->piece, state->size));
      state->done->DecrementCount();
    }
  };
  for (size_t i = 0; i + 1 < pieces; ++i) Schedule(work);
  work();
  state->done->Wait();
}

}  // namespace bmuf
