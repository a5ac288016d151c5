// The life of one PushDelta stream.
//
// Order of things: the header is read and judged before another byte is asked for; then one message at a time goes into
// the staging and the next is asked for; the answer comes from the loop, whenever it is known, and ends the stream.
#ifndef BMUF_SERVER_SERVICE_PUSH_REACTOR_H_
#define BMUF_SERVER_SERVICE_PUSH_REACTOR_H_

#include <grpcpp/grpcpp.h>

#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "bmuf/v1/coordinator_service.pb.h"
#include "server/coordinator/coordinator.h"
#include "server/service/call.h"

namespace bmuf::service {

// Owned by itself until OnDone and by callbacks that are on their way; a callback that comes later does nothing.
class PushReactor : public grpc::ServerReadReactor<v1::PushDeltaRequest>,
                    public std::enable_shared_from_this<PushReactor> {
 public:
  // The library's way to own it until OnDone. `response` and `context` live until then.
  static PushReactor* Start(coordinator::Coordinator& coordinator, CallBook& book, grpc::CallbackServerContext* context,
                            v1::PushDeltaResponse* response);

  PushReactor(coordinator::Coordinator& coordinator, CallBook& book, grpc::CallbackServerContext* context,
              v1::PushDeltaResponse* response);

  void OnReadDone(bool ok) override;
  void OnDone() override;

 private:
  enum class Part { kHeader, kBody, kEnded };

  void OnHeader() ABSL_LOCKS_EXCLUDED(mu_);
  void Admitted() ABSL_LOCKS_EXCLUDED(mu_);
  void ReadNext() ABSL_LOCKS_EXCLUDED(mu_);
  void Answer(absl::StatusOr<v1::PushDeltaResponse> answer) ABSL_LOCKS_EXCLUDED(mu_);
  void Finish(const absl::Status& status) ABSL_LOCKS_EXCLUDED(mu_);

  coordinator::Coordinator& coordinator_;
  CallBook& book_;
  grpc::CallbackServerContext* const context_;
  v1::PushDeltaResponse* const response_;
  std::shared_ptr<PushReactor> self_;  // Until OnDone.

  // The stream's reactions, one at a time.
  v1::PushDeltaRequest message_;
  Part part_ = Part::kHeader;
  std::shared_ptr<coordinator::Push> push_;  // Set before the first read of the body is started.

  // Held while an operation is started: none may be started after Finish, which another thread may call.
  absl::Mutex mu_;
  bool opened_ ABSL_GUARDED_BY(mu_) = false;    // push_ is set.
  bool admitted_ ABSL_GUARDED_BY(mu_) = false;  // The payload may come.
  bool finished_ ABSL_GUARDED_BY(mu_) = false;
  Call call_ ABSL_GUARDED_BY(mu_);
};

}  // namespace bmuf::service

#endif  // BMUF_SERVER_SERVICE_PUSH_REACTOR_H_
