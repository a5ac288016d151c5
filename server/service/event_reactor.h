// A stream of events that may stay open for days: WatchRound and WatchJob.
#ifndef BMUF_SERVER_SERVICE_EVENT_REACTOR_H_
#define BMUF_SERVER_SERVICE_EVENT_REACTOR_H_

#include <grpcpp/grpcpp.h>

#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "bmuf/v1/admin_service.pb.h"
#include "bmuf/v1/coordinator_service.pb.h"
#include "core/base/error.h"
#include "server/coordinator/coordinator.h"
#include "server/service/call.h"

namespace bmuf::service {

// Whether `newer` makes `older`, which is still waiting to be sent, pointless.
inline bool Supersedes(const v1::WatchRoundResponse& newer, const v1::WatchRoundResponse& older) {
  return newer.has_waiting() && older.has_waiting();
}
inline bool Supersedes(const v1::WatchJobResponse&, const v1::WatchJobResponse&) { return true; }

// Costs no thread while it waits. Owned by itself until OnDone and by callbacks on their way.
template <typename Event>
class EventReactor : public grpc::ServerWriteReactor<Event>, public std::enable_shared_from_this<EventReactor<Event>> {
 public:
  using Subscribe = std::function<coordinator::Watch(coordinator::Subscriber<Event>)>;

  // Owned by the library's call until OnDone.
  static EventReactor* Start(CallBook& book, const char* method, const grpc::CallbackServerContext& context,
                             const Subscribe& subscribe) {
    auto reactor = std::make_shared<EventReactor>(book, method, context);
    reactor->self_ = reactor;
    coordinator::Watch watch = subscribe([reactor](std::vector<Event> events, std::optional<absl::Status> end) {
      reactor->Deliver(std::move(events), std::move(end));
    });
    reactor->SetWatch(std::move(watch));
    return reactor.get();
  }

  EventReactor(CallBook& book, const char* method, const grpc::CallbackServerContext& context)
      : call_(book, method, context) {}

  void OnWriteDone(bool ok) override {
    absl::MutexLock lock(&mu_);
    writing_ = false;
    if (!ok) cancelled_ = true;
    Pump();
  }
  void OnCancel() override {
    coordinator::Watch watch;
    {
      absl::MutexLock lock(&mu_);
      cancelled_ = true;
      watch = watch_;
      Pump();
    }
    watch.Cancel();
  }
  void OnDone() override {
    coordinator::Watch watch;
    {
      absl::MutexLock lock(&mu_);
      watch = watch_;
    }
    watch.Cancel();
    const std::shared_ptr<EventReactor> last = std::move(self_);
  }

 private:
  // A reader this far behind will not catch up.
  static constexpr size_t kMostQueued = 256;

  void SetWatch(coordinator::Watch watch) ABSL_LOCKS_EXCLUDED(mu_) {
    {
      absl::MutexLock lock(&mu_);
      watch_ = watch;
      if (!cancelled_) return;
    }
    watch.Cancel();
  }

  void Deliver(std::vector<Event> events, std::optional<absl::Status> end) ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    for (Event& event : events) {
      if (!queue_.empty() && Supersedes(event, queue_.back())) queue_.pop_back();
      queue_.push_back(std::move(event));
    }
    if (end.has_value()) end_ = std::move(end);
    if (queue_.size() > kMostQueued) {
      queue_.clear();
      end_ = Error(v1::REASON_TOO_SLOW, "the events are not read");
    }
    Pump();
  }

  // Starts the next operation, if one is due.
  void Pump() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (writing_ || finished_) return;
    if (cancelled_) {
      finished_ = true;
      this->Finish(call_.End(Cancelled()));
    } else if (!queue_.empty()) {
      current_ = std::move(queue_.front());
      queue_.pop_front();
      writing_ = true;
      this->StartWrite(&current_);
    } else if (end_.has_value()) {
      finished_ = true;
      this->Finish(call_.End(*end_));
    }
  }

  std::shared_ptr<EventReactor> self_;  // Until OnDone.

  // Held while an operation is started: the loop, the stream and a cancellation all may be the ones to do it.
  absl::Mutex mu_;
  coordinator::Watch watch_ ABSL_GUARDED_BY(mu_);
  std::deque<Event> queue_ ABSL_GUARDED_BY(mu_);
  std::optional<absl::Status> end_ ABSL_GUARDED_BY(mu_);
  Event current_ ABSL_GUARDED_BY(mu_);  // Being written.
  bool writing_ ABSL_GUARDED_BY(mu_) = false;
  bool cancelled_ ABSL_GUARDED_BY(mu_) = false;
  bool finished_ ABSL_GUARDED_BY(mu_) = false;
  Call call_ ABSL_GUARDED_BY(mu_);
};

}  // namespace bmuf::service

#endif  // BMUF_SERVER_SERVICE_EVENT_REACTOR_H_
