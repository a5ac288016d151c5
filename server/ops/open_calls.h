// The calls that are open right now, for /debug/rpcs: a wait that should have ended can be seen.
#ifndef BMUF_SERVER_OPS_OPEN_CALLS_H_
#define BMUF_SERVER_OPS_OPEN_CALLS_H_

#include <cstdint>
#include <list>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "core/base/clock.h"

namespace bmuf::ops {

// One open call. `method` is a literal.
struct OpenCall {
  const char* method = "";
  std::string peer;  // As the transport names it, escaped.
  MonotonicTime began;
  absl::Duration allowed = absl::InfiniteDuration();  // From its begin to the caller's deadline.
};

// Thread-safe.
class OpenCalls {
 public:
  // The call is listed as long as this lives. The registry outlives it.
  class Ticket {
   public:
    ~Ticket() { calls_->Remove(at_); }
    Ticket(const Ticket&) = delete;

   private:
    friend class OpenCalls;
    Ticket(OpenCalls* calls, std::list<OpenCall>::iterator at) : calls_(calls), at_(at) {}
    OpenCalls* const calls_;
    const std::list<OpenCall>::iterator at_;
  };

  std::shared_ptr<Ticket> Open(OpenCall call) ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    ++opened_;
    return std::shared_ptr<Ticket>(new Ticket(this, calls_.insert(calls_.end(), std::move(call))));
  }
  // The oldest first, at most `most`.
  std::vector<OpenCall> List(size_t most) const ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    std::vector<OpenCall> listed;
    for (const OpenCall& call : calls_) {
      if (listed.size() == most) break;
      listed.push_back(call);
    }
    return listed;
  }
  // Blocks until no call is open. False if that takes longer than `timeout`.
  bool WaitUntilNone(absl::Duration timeout) const ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    const auto none = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return calls_.empty(); };
    return mu_.AwaitWithTimeout(absl::Condition(&none), timeout);
  }
  size_t size() const ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    return calls_.size();
  }
  uint64_t opened() const ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    return opened_;
  }

 private:
  void Remove(std::list<OpenCall>::iterator at) ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    calls_.erase(at);
  }

  mutable absl::Mutex mu_;
  std::list<OpenCall> calls_ ABSL_GUARDED_BY(mu_);
  uint64_t opened_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace bmuf::ops

#endif  // BMUF_SERVER_OPS_OPEN_CALLS_H_
