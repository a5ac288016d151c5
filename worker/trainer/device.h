// Where trajectories train: the value of --devices.
#ifndef BMUF_WORKER_TRAINER_DEVICE_H_
#define BMUF_WORKER_TRAINER_DEVICE_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace bmuf::worker {

struct Device {
  enum class Kind { kCpu, kCuda };
  Kind kind = Kind::kCpu;
  int index = 0;  // Of the GPU; 0 for a CPU.

  // "cpu" or "cuda:1".
  std::string ToString() const;
  friend bool operator==(const Device& a, const Device& b) { return a.kind == b.kind && a.index == b.index; }
};

// One entry per trajectory: "cpu:4" is four on the CPU, "cpu" one, "cuda:0,cuda:1" one on each of two GPUs; parts may
// be mixed. INVALID_ARGUMENT if the text is not of this form, names a GPU twice, or asks for none or more than
// limits::kMaxTrajectoriesPerWorker.
absl::StatusOr<std::vector<Device>> ParseDevices(const std::string& text);

}  // namespace bmuf::worker

#endif  // BMUF_WORKER_TRAINER_DEVICE_H_
