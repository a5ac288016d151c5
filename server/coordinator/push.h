// One push from its header to its answer, shared between the stream that receives it and the loop that judges it.
//
// Problem: bytes arrive on a gRPC thread while the round may end, the worker may be replaced or time may run out on the
// loop's thread; neither side may wait for the other or touch what the other has let go.
// Idea: a small object with a lock. The stream writes into the staging only through it; the loop takes the staging away
// by closing it. After that the stream's calls say so and do nothing.
// Life: Coordinator::OpenPush -> admitted() -> Append ... -> End -> done(answer). done() is called exactly once in
// every case; admitted() at most once, before it.
#ifndef BMUF_SERVER_COORDINATOR_PUSH_H_
#define BMUF_SERVER_COORDINATOR_PUSH_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "bmuf/v1/coordinator_service.pb.h"
#include "server/model/staging.h"

namespace bmuf::coordinator {

// Thread-safe; the stream's calls come one at a time.
class Push {
 public:
  struct Callbacks {
    // The payload may come now. Loop's thread; must be short.
    std::function<void()> admitted;
    // The answer. Loop's thread; must be short.
    std::function<void(absl::StatusOr<v1::PushDeltaResponse>)> done;
  };
  // How the stream's side ended.
  struct Ending {
    absl::Status status;     // OK: all bytes are there and the digest fits.
    bool resumable = false;  // What arrived is sound: the rest may follow in another call.
  };

  // `ended` is called at most once, on the stream's thread, and passes its argument to the loop.
  Push(Callbacks callbacks, std::function<void(Ending)> ended)
      : callbacks_(std::move(callbacks)), ended_(std::move(ended)) {}

  // ---- The stream.

  // Takes the next bytes: a copy and a checksum, no more. False: the push is over, done() was or will be called; read
  // no further. Errors of the content end the push by themselves.
  bool Append(const v1::Chunk& chunk) ABSL_LOCKS_EXCLUDED(mu_);
  // The end message came.
  void End(uint32_t digest) ABSL_LOCKS_EXCLUDED(mu_);
  // The stream broke or sent what it must not; `status` is what the peer is told, if it still listens.
  void Fail(const absl::Status& status, bool resumable) ABSL_LOCKS_EXCLUDED(mu_);

  // ---- The loop.

  // Gives it its staging; the stream may call Append from now on.
  void Admit(std::shared_ptr<Staging> staging) ABSL_LOCKS_EXCLUDED(mu_);
  // Ends it: the stream can no longer touch the staging, which is returned (null before Admit). Then Answer.
  std::shared_ptr<Staging> Close() ABSL_LOCKS_EXCLUDED(mu_);
  void Answer(absl::StatusOr<v1::PushDeltaResponse> answer);
  std::shared_ptr<Staging> staging() const ABSL_LOCKS_EXCLUDED(mu_);
  // Bytes received so far. Never waits.
  uint64_t received_bytes() const { return received_bytes_.load(std::memory_order_relaxed); }

 private:
  void Conclude(Ending ending);

  Callbacks callbacks_;                      // Used on the loop's thread.
  const std::function<void(Ending)> ended_;  // Used on the stream's thread.
  bool concluded_ = false;                   // The same.
  std::atomic<uint64_t> received_bytes_{0};

  mutable absl::Mutex mu_;
  std::shared_ptr<Staging> staging_ ABSL_GUARDED_BY(mu_);
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace bmuf::coordinator

#endif  // BMUF_SERVER_COORDINATOR_PUSH_H_
