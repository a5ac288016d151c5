// The coordinator as the worker sees it: blocking calls that answer with an event of the block loop.
#ifndef BMUF_WORKER_EXCHANGE_H_
#define BMUF_WORKER_EXCHANGE_H_

#include <cstdint>
#include <optional>
#include <string>

#include "bmuf/v1/types.pb.h"
#include "worker/block_loop.h"
#include "worker/trainer/trainer.h"

namespace bmuf::worker {

// Calls come from one thread, except Interrupt. Each blocks until it can answer, however long that takes, and answers
// with one of the events that block_loop.h lists at the action of its name; or Interrupted; or
// Refused when nothing but a person helps. Retries and re-attaching happen inside.
class Exchange {
 public:
  virtual ~Exchange() = default;

  virtual Event Join() = 0;
  virtual Event UploadInitial(const ModelState& model) = 0;
  virtual Event AwaitRound(uint64_t round) = 0;
  // On Pulled, `out` (sizes of the manifest) holds the version; undefined otherwise.
  virtual Event Pull(std::optional<uint64_t> version, ModelState* out) = 0;
  // `local` is what the block made of `base`, both unchanged until the commit was seen or the delta was stale.
  virtual Event Push(uint64_t round, const ModelState& base, const ModelState& local, const v1::BlockFacts& facts) = 0;
  virtual Event AwaitCommit(uint64_t round) = 0;
  // Left in any case: a coordinator that does not hear it will see the lease end. Not subject to Interrupt.
  virtual Event Leave(const std::string& reason) = 0;

  // Makes the waiting calls (Join, AwaitRound, AwaitCommit) answer Interrupted, now and from now on. Thread-safe.
  virtual void Interrupt() = 0;
};

}  // namespace bmuf::worker

#endif  // BMUF_WORKER_EXCHANGE_H_
