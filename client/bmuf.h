// Train with a bmuf-coordinator from a C++ loop.
//
// Problem: local SGD with block momentum needs an exchange every few hundred steps that survives anything.
// Idea: name the parameters once; Session keeps them the global model.
// Usage:
//   std::vector<bmuf::TensorView> tensors = {{"w", {784, 10}, w.data()}, {"b", {10}, b.data()}};
//   auto session = bmuf::Session::Join({"dns:///coordinator:7070", "lm", "node3"}, tensors);
//   if (!session.ok()) return session.status();
//   while (!(*session)->done()) {
//     bmuf::BlockFacts facts = TrainBlock((*session)->block_steps());          // your own loop, on w and b
//     if (absl::Status s = (*session)->Sync(facts); !s.ok()) return s;         // push, wait, load the new model
//   }
#ifndef BMUF_CLIENT_BMUF_H_
#define BMUF_CLIENT_BMUF_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "bmuf/v1/types.pb.h"

namespace bmuf {

// A tensor of the caller, row-major, which stays where it is and is written by Session. Role BMUF: float, or the 16-bit
// patterns of BF16 and F16 (exchanged as float). Other roles: see types.proto.
struct TensorView {
  std::string name;
  std::vector<uint64_t> shape;
  void* data = nullptr;
  v1::DType dtype = v1::DTYPE_F32;
  v1::TensorRole role = v1::TENSOR_ROLE_BMUF;
};

struct Options {
  std::string target;  // "host:port" or any gRPC target.
  std::string job;
  std::string worker;                           // Unique in the job, the same over restarts of the process.
  uint32_t trajectories = 1;                    // Independent devices behind this worker, averaged by the caller.
  v1::Codec codec = v1::CODEC_FP32;             // Of pushes. Lossy ones keep the rounding error for the next block.
  absl::Duration patience = absl::Minutes(10);  // How long a lost coordinator is waited for.
  std::function<void(const std::string&)> log;  // One line at a time, from any thread; must not block.
};

// What a block was trained on; see v1::BlockFacts.
struct BlockFacts {
  uint64_t samples = 0;
  uint64_t steps = 0;
  uint64_t tokens = 0;
  std::map<std::string, double> metrics;  // For instance {"loss", 0.41}.
};

// One membership. Used by one thread at a time; Cancel is thread-safe. All errors are permanent: a further call returns
// the same one. After an error the tensors hold either what the caller left in them or a whole published model.
//
// A restarted coordinator is joined again by itself. If it kept its state, no block is lost. If it lost it, and elects
// this worker, the last broadcast model is brought back and the rounds begin anew; the block of that moment is lost.
class Session {
 public:
  // Becomes a member, brings the initial model if asked to (the tensors as they are, after the job's warm-up steps if
  // `train_alone` is given), loads the global model and blocks until the first block may begin. Errors: those of Join
  // in coordinator_service.proto; UNAVAILABLE when the coordinator did not come within `patience`.
  static absl::StatusOr<std::unique_ptr<Session>> Join(
      Options options, std::vector<TensorView> tensors,
      std::function<absl::Status(uint32_t warmup_steps)> train_alone = nullptr);

  // Gives up an exchange in flight and leaves the job; blocks at most for a unary timeout (10 s), and only if the
  // coordinator is connected but does not answer.
  ~Session();

  // Ends a block: pushes local minus broadcast, waits for the commit, loads the new model into the tensors and waits
  // until the next block may begin. A delta that came too late is dropped, as the protocol demands, and the newest
  // model loaded. A job that finished meanwhile is done(), not an error: the tensors then hold its final model. No
  // effect when done(). Errors: STALE_INCARNATION, WORKER_EVICTED, JOB_FAILED and what else only a person can mend;
  // UNAVAILABLE when the coordinator did not come back within `patience`; DATA_LOSS for a model that is damaged or not
  // finite, which is not loaded; CANCELLED.
  absl::Status Sync(const BlockFacts& facts);

  // As Sync, but the exchange runs while the caller trains on: returns as soon as the delta is copied. The exchange is
  // completed by the next SyncAsync, Sync or Wait, which adds what the others contributed to the tensors: they become
  // the new broadcast model plus what was trained meanwhile. So each delta stands against its own base, one block late.
  // Until then the accessors tell of the block whose delta is in flight. Errors: as Sync, of the exchange before.
  absl::Status SyncAsync(const BlockFacts& facts);
  // Completes an exchange in flight.
  absl::Status Wait();

  // Makes the running and all later calls return CANCELLED.
  void Cancel();

  // The job has ended as planned.
  bool done() const;
  uint64_t round() const;    // The block in progress.
  uint64_t version() const;  // The model it started from.
  uint32_t rank() const;     // First trajectory of this worker among `size`.
  uint32_t size() const;
  uint32_t block_steps() const;
  uint64_t total_samples() const;  // Committed so far; for schedules.
  // The inner optimizer's state is to be reset before the block in progress.
  bool reset_inner_state() const;
  const v1::JobConfig& config() const;

 private:
  struct Impl;
  explicit Session(std::unique_ptr<Impl> impl);
  const std::unique_ptr<Impl> impl_;
};

}  // namespace bmuf

#endif  // BMUF_CLIENT_BMUF_H_
