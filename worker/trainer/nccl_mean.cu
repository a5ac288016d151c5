#include <cuda_runtime.h>
#include <nccl.h>

#include "worker/trainer/nccl_mean.h"

namespace bmuf::worker {
namespace {

// Both libraries' codes as one: false and a text on a fault.
bool Good(cudaError_t code, const char* what, std::string* error) {
  if (code == cudaSuccess) return true;
  *error = std::string(what) + ": " + cudaGetErrorString(code);
  return false;
}
bool Good(ncclResult_t code, const char* what, std::string* error) {
  if (code == ncclSuccess) return true;
  *error = std::string(what) + ": " + ncclGetErrorString(code);
  return false;
}

class NcclMeanOfGpus : public NcclMean {
 public:
  explicit NcclMeanOfGpus(const std::vector<int>& devices) {
    for (int d : devices) ranks_.push_back({d, nullptr, nullptr});
  }
  ~NcclMeanOfGpus() override {
    for (Rank& r : ranks_) {
      cudaSetDevice(r.device);
      if (r.communicator != nullptr) ncclCommDestroy(r.communicator);
      if (r.stream != nullptr) cudaStreamDestroy(r.stream);
    }
    if (result_ != nullptr) cudaFree(result_);
  }

  bool Start(std::string* error) {
    std::vector<int> indices;
    for (const Rank& r : ranks_) indices.push_back(r.device);
    std::vector<ncclComm_t> communicators(ranks_.size());
    const int count = static_cast<int>(indices.size());
    if (!Good(ncclCommInitAll(communicators.data(), count, indices.data()), "starting NCCL", error)) return false;
    for (size_t k = 0; k < ranks_.size(); ++k) ranks_[k].communicator = communicators[k];
    for (Rank& r : ranks_) {
      if (!Good(cudaSetDevice(r.device), "selecting a GPU", error) ||
          !Good(cudaStreamCreateWithFlags(&r.stream, cudaStreamNonBlocking), "creating a stream", error)) {
        return false;
      }
    }
    return true;
  }

  bool Run(const std::vector<const float*>& parts, size_t size, float* out, std::string* error) override {
    // The trainers' work was queued on streams of their own.
    for (const Rank& r : ranks_) {
      if (!Good(cudaSetDevice(r.device), "selecting a GPU", error) ||
          !Good(cudaDeviceSynchronize(), "waiting for a GPU", error)) {
        return false;
      }
    }
    if (!Good(cudaSetDevice(ranks_[0].device), "selecting a GPU", error) || !Reserve(size, error)) return false;
    if (!Good(ncclGroupStart(), "opening an NCCL group", error)) return false;
    bool queued = true;
    for (size_t k = 0; k < ranks_.size() && queued; ++k) {
      queued = Good(ncclReduce(parts[k], k == 0 ? result_ : nullptr, size, ncclFloat, ncclAvg, 0,
                               ranks_[k].communicator, ranks_[k].stream),
                    "reducing", error);
    }
    // A group that was opened is closed, whatever happened inside.
    const ncclResult_t closed = ncclGroupEnd();
    if (!queued || !Good(closed, "closing an NCCL group", error)) return false;
    for (const Rank& r : ranks_) {
      if (!Good(cudaSetDevice(r.device), "selecting a GPU", error) ||
          !Good(cudaStreamSynchronize(r.stream), "waiting for the reduction", error)) {
        return false;
      }
    }
    return Good(cudaMemcpy(out, result_, size * sizeof(float), cudaMemcpyDeviceToHost), "reading the mean", error);
  }

 private:
  struct Rank {
    int device;
    ncclComm_t communicator;
    cudaStream_t stream;
  };

  bool Reserve(size_t size, std::string* error) {
    if (result_size_ >= size) return true;
    if (result_ != nullptr) cudaFree(result_);
    result_ = nullptr;
    result_size_ = 0;
    void* memory = nullptr;
    if (!Good(cudaMalloc(&memory, size * sizeof(float)), "allocating the mean", error)) return false;
    result_ = static_cast<float*>(memory);
    result_size_ = size;
    return true;
  }

  std::vector<Rank> ranks_;
  float* result_ = nullptr;  // On the first device.
  size_t result_size_ = 0;
};

}  // namespace

std::unique_ptr<NcclMean> NcclMean::New(const std::vector<int>& devices, std::string* error) {
  int present = 0;
  if (!Good(cudaGetDeviceCount(&present), "looking for GPUs", error)) return nullptr;
  for (int d : devices) {
    if (d >= present) {
      *error = "there is no GPU " + std::to_string(d) + " among " + std::to_string(present);
      return nullptr;
    }
  }
  auto mean = std::make_unique<NcclMeanOfGpus>(devices);
  if (!mean->Start(error)) return nullptr;
  return mean;
}

}  // namespace bmuf::worker
