// A model on its way to a reader: PullModel and ExportModel.
//
// One message is in flight at a time; the next is cut from the immutable version when the last one was taken. No copy
// of the model is made for a reader, and a reader that stops reading is ended.
#ifndef BMUF_SERVER_SERVICE_DOWNLOAD_REACTOR_H_
#define BMUF_SERVER_SERVICE_DOWNLOAD_REACTOR_H_

#include <grpcpp/grpcpp.h>

#include <functional>
#include <memory>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "core/base/error.h"
#include "server/service/call.h"
#include "server/service/watchdog.h"

namespace bmuf::service {

// Fills the next message; false: there is none. Called from one thread at a time; at most a copy and a checksum of one
// chunk.
template <typename Message>
using Producer = std::function<bool(Message*)>;

// Owned by itself until OnDone and by callbacks on their way.
template <typename Message>
class DownloadReactor : public grpc::ServerWriteReactor<Message>,
                        public Transfer,
                        public std::enable_shared_from_this<DownloadReactor<Message>> {
 public:
  // What the reader does not take within this is not wanted any more.
  static constexpr absl::Duration kMostStuck = absl::Seconds(30);
  // And if it does not even take the error, the stream is cut.
  static constexpr absl::Duration kMostStuckAfterError = absl::Seconds(30);

  using Reply = std::function<void(absl::StatusOr<Producer<Message>>)>;

  // `open` gets the callback that takes the producer. `on_slow` counts a reader that was ended.
  static DownloadReactor* Start(CallBook& book, Watchdog& watchdog, const char* method,
                                grpc::CallbackServerContext* context, std::function<void()> on_slow,
                                const std::function<void(Reply)>& open) {
    auto reactor = std::make_shared<DownloadReactor>(book, method, context, std::move(on_slow));
    reactor->self_ = reactor;
    watchdog.Watch(reactor);
    open([reactor](absl::StatusOr<Producer<Message>> producer) { reactor->Begin(std::move(producer)); });
    return reactor.get();
  }

  DownloadReactor(CallBook& book, const char* method, grpc::CallbackServerContext* context,
                  std::function<void()> on_slow)
      : book_(book), context_(context), on_slow_(std::move(on_slow)), call_(book, method, *context) {}

  void OnWriteDone(bool ok) override {
    absl::MutexLock lock(&mu_);
    writing_ = false;
    if (!ok) cancelled_ = true;
    Next();
  }
  void OnCancel() override {
    absl::MutexLock lock(&mu_);
    cancelled_ = true;
    // Before Begin there is nothing to write and nobody else to finish it.
    if (!writing_) Next();
  }
  void OnDone() override {
    {
      absl::MutexLock lock(&mu_);
      done_ = true;
      producer_ = nullptr;  // Lets the version go.
    }
    const std::shared_ptr<DownloadReactor> last = std::move(self_);
  }
  void CheckProgress(MonotonicTime now) override {
    bool slow = false, cut = false;
    {
      absl::MutexLock lock(&mu_);
      if (done_) return;
      if (writing_ && !finished_ && now - since_ >= kMostStuck) {
        slow = finished_ = true;
        since_ = now;
        // Goes out behind what is stuck: a reader that wakes up learns what happened.
        this->Finish(call_.End(
            Error(v1::REASON_TOO_SLOW, absl::StrCat("nothing was read for ", absl::FormatDuration(kMostStuck)))));
      } else if (finished_ && now - since_ >= kMostStuckAfterError) {
        cut = true;
        since_ = now;
      }
    }
    if (slow) on_slow_();
    if (cut) CutStream();
  }

 private:
  // done_ is set before the library lets its context go, under the same lock.
  void CutStream() ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    if (!done_) context_->TryCancel();
  }

  void Begin(absl::StatusOr<Producer<Message>> producer) ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    if (finished_) return;
    if (producer.ok()) {
      producer_ = *std::move(producer);
      Next();
    } else {
      finished_ = true;
      since_ = book_.clock.Now();
      this->Finish(call_.End(producer.status()));
    }
  }

  void Next() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (finished_) return;
    since_ = book_.clock.Now();
    if (cancelled_) {
      finished_ = true;
      this->Finish(call_.End(Cancelled()));
      return;
    }
    message_.Clear();
    if (producer_(&message_)) {
      writing_ = true;
      this->StartWrite(&message_);
    } else {
      finished_ = true;
      this->Finish(call_.End(absl::OkStatus()));
    }
  }

  CallBook& book_;
  grpc::CallbackServerContext* const context_;  // Until OnDone.
  const std::function<void()> on_slow_;
  std::shared_ptr<DownloadReactor> self_;  // Until OnDone.

  // Held while an operation is started: none may be started after Finish.
  absl::Mutex mu_;
  Producer<Message> producer_ ABSL_GUARDED_BY(mu_);
  Message message_ ABSL_GUARDED_BY(mu_);      // Being written.
  MonotonicTime since_ ABSL_GUARDED_BY(mu_);  // The operation that is under way.
  bool writing_ ABSL_GUARDED_BY(mu_) = false;
  bool cancelled_ ABSL_GUARDED_BY(mu_) = false;
  bool finished_ ABSL_GUARDED_BY(mu_) = false;
  bool done_ ABSL_GUARDED_BY(mu_) = false;
  Call call_ ABSL_GUARDED_BY(mu_);
};

}  // namespace bmuf::service

#endif  // BMUF_SERVER_SERVICE_DOWNLOAD_REACTOR_H_
