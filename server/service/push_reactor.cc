#include "server/service/push_reactor.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/base/limits.h"

namespace bmuf::service {

PushReactor* PushReactor::Start(coordinator::Coordinator& coordinator, CallBook& book,
                                grpc::CallbackServerContext* context, v1::PushDeltaResponse* response) {
  auto reactor = std::make_shared<PushReactor>(coordinator, book, context, response);
  reactor->self_ = reactor;
  reactor->ReadNext();
  return reactor.get();
}

PushReactor::PushReactor(coordinator::Coordinator& coordinator, CallBook& book, grpc::CallbackServerContext* context,
                         v1::PushDeltaResponse* response)
    : coordinator_(coordinator),
      book_(book),
      context_(context),
      response_(response),
      call_(book, "PushDelta", *context) {}

void PushReactor::ReadNext() {
  absl::MutexLock lock(&mu_);
  if (!finished_) StartRead(&message_);
}

void PushReactor::OnReadDone(bool ok) {
  if (!ok) {
    if (part_ == Part::kEnded) return;  // The client has said all; the answer is on its way.
    const absl::Status cut = context_->IsCancelled()
                                 ? absl::Status(Error(v1::REASON_TRANSFER_CANCELLED, "the connection broke"))
                                 : absl::Status(Error(v1::REASON_BAD_CHUNK, "the stream ended without an end message"));
    if (push_ == nullptr) return Finish(cut);
    return push_->Fail(cut, true);
  }
  switch (part_) {
    case Part::kHeader:
      return OnHeader();
    case Part::kEnded:
      return;
    case Part::kBody:
      break;
  }
  switch (message_.part_case()) {
    case v1::PushDeltaRequest::kChunk: {
      const size_t bytes = message_.chunk().data().size();
      // False: it is over, and the answer comes from the loop.
      if (!push_->Append(message_.chunk())) return;
      book_.metrics.CountReceived(bytes);
      return ReadNext();
    }
    case v1::PushDeltaRequest::kEnd:
      part_ = Part::kEnded;
      return push_->End(message_.end().digest());
    case v1::PushDeltaRequest::kHeader:
      return push_->Fail(Error(v1::REASON_BAD_CHUNK, "a push has one header, at its begin"), false);
    case v1::PushDeltaRequest::PART_NOT_SET:
      return push_->Fail(Error(v1::REASON_BAD_CHUNK, "a message of a push is a chunk or the end"), false);
  }
}

void PushReactor::OnHeader() {
  if (message_.part_case() != v1::PushDeltaRequest::kHeader) {
    return Finish(Error(v1::REASON_BAD_CHUNK, "the first message of a push is its header"));
  }
  if (message_.ByteSizeLong() > limits::kMaxPushHeaderBytes) {
    return Finish(Error(v1::REASON_INVALID_REQUEST,
                        absl::StrCat("the header must be at most ", limits::kMaxPushHeaderBytes, " bytes"))
                      .Field("header", "too long"));
  }
  part_ = Part::kBody;
  coordinator::Push::Callbacks callbacks;
  callbacks.admitted = [self = shared_from_this()] { self->Admitted(); };
  callbacks.done = [self = shared_from_this()](absl::StatusOr<v1::PushDeltaResponse> answer) {
    self->Answer(std::move(answer));
  };
  std::shared_ptr<coordinator::Push> push =
      coordinator_.OpenPush(std::move(*message_.mutable_header()), std::move(callbacks));
  absl::MutexLock lock(&mu_);
  push_ = std::move(push);
  // The loop may have been faster than this thread: then the first read is ours to start.
  if (admitted_ && !finished_) StartRead(&message_);
  opened_ = true;
}

void PushReactor::Admitted() {
  absl::MutexLock lock(&mu_);
  admitted_ = true;
  if (opened_ && !finished_) StartRead(&message_);
}

void PushReactor::Answer(absl::StatusOr<v1::PushDeltaResponse> answer) {
  absl::MutexLock lock(&mu_);
  if (finished_) return;
  finished_ = true;
  if (answer.ok()) *response_ = *std::move(answer);
  grpc::ServerReadReactor<v1::PushDeltaRequest>::Finish(call_.End(answer.status()));
}

void PushReactor::Finish(const absl::Status& status) { Answer(status); }

void PushReactor::OnDone() { const std::shared_ptr<PushReactor> last = std::move(self_); }

}  // namespace bmuf::service
