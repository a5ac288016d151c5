// The mean over the trajectories of one process, before anything goes on the wire.
//
// Problem: a process with K devices should cost the network one push, not K.
// Idea: the mean of K models is one model with weight K; the coordinator's mean is then the mean over all trajectories
// of the job. The mean of the parameters minus the common base is the mean of the deltas.
#ifndef BMUF_WORKER_TRAINER_NODE_REDUCER_H_
#define BMUF_WORKER_TRAINER_NODE_REDUCER_H_

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "bmuf/v1/types.pb.h"
#include "core/base/aligned_buffer.h"
#include "worker/trainer/device.h"
#include "worker/trainer/trainer.h"

namespace bmuf::worker {

// Thread-compatible.
class NodeReducer {
 public:
  virtual ~NodeReducer() = default;
  // "cpu" or "nccl", for the log.
  virtual std::string name() const = 0;
  // Whether the parts of Mean are in the memory of the devices (one part each, in their order) or all in host memory.
  virtual bool reads_device_memory() const = 0;
  // out[i] = mean over k of parts[k][i], where parts[k] are out.size() floats, and `out` is host memory. Requires at
  // least one part. Blocks. INTERNAL on a device fault; `out` is then undefined.
  virtual absl::Status Mean(absl::Span<const float* const> parts, absl::Span<float> out) = 0;
};

// On the host: sums in double in the order of `parts`, one rounding at the end. One part is copied bit by bit.
std::unique_ptr<NodeReducer> NewCpuNodeReducer();

// Between GPUs: NCCL, sums in float32, result the same for every run on the same machine. UNIMPLEMENTED if this build
// found no NCCL, FAILED_PRECONDITION if the devices are not all GPUs or do not start.
absl::StatusOr<std::unique_ptr<NodeReducer>> NewNcclNodeReducer(const std::vector<Device>& devices);

// The same for auxiliary sections (see ModelState), all in host memory: MEAN in double, MAX the largest, FIRST the
// first. `out` has the size of each part. INVALID_ARGUMENT if a size is wrong.
absl::Status ReduceAuxiliary(const v1::Manifest& manifest, absl::Span<const AlignedBuffer<uint8_t>> parts,
                             AlignedBuffer<uint8_t>* out);

}  // namespace bmuf::worker

#endif  // BMUF_WORKER_TRAINER_NODE_REDUCER_H_
