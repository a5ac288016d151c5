// The mean of one vector per GPU, by NCCL. Only the C++ library in here: nvcc compiles the other side.
#ifndef BMUF_WORKER_TRAINER_NCCL_MEAN_H_
#define BMUF_WORKER_TRAINER_NCCL_MEAN_H_

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

namespace bmuf::worker {

// Thread-compatible. All calls block.
class NcclMean {
 public:
  virtual ~NcclMean() = default;
  // out[i] = mean over k of parts[k][i]: `size` floats, parts[k] in the memory of the k-th device, `out` in host
  // memory. False on a fault, with its text in *error; `out` is then undefined.
  virtual bool Run(const std::vector<const float*>& parts, size_t size, float* out, std::string* error) = 0;

  // Null if the devices (CUDA indices, all different) are not there or NCCL does not start, with the text in *error.
  static std::unique_ptr<NcclMean> New(const std::vector<int>& devices, std::string* error);
};

}  // namespace bmuf::worker

#endif  // BMUF_WORKER_TRAINER_NCCL_MEAN_H_
