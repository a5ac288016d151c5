#include <utility>

#include "worker/trainer/node_reducer.h"

#ifdef BMUF_HAVE_NCCL

#include "worker/trainer/nccl_mean.h"

namespace bmuf::worker {
namespace {

class NcclNodeReducer : public NodeReducer {
 public:
  explicit NcclNodeReducer(std::unique_ptr<NcclMean> mean) : mean_(std::move(mean)) {}

  std::string name() const override { return "nccl"; }
  bool reads_device_memory() const override { return true; }
  absl::Status Mean(absl::Span<const float* const> parts, absl::Span<float> out) override {
    std::string error;
    if (mean_->Run({parts.begin(), parts.end()}, out.size(), out.data(), &error)) return absl::OkStatus();
    return absl::InternalError(error);
  }

 private:
  const std::unique_ptr<NcclMean> mean_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<NodeReducer>> NewNcclNodeReducer(const std::vector<Device>& devices) {
  std::vector<int> indices;
  for (const Device& d : devices) {
    if (d.kind != Device::Kind::kCuda) return absl::FailedPreconditionError("NCCL reduces between GPUs only");
    indices.push_back(d.index);
  }
  if (indices.empty()) return absl::FailedPreconditionError("NCCL needs a GPU");
  std::string error;
  std::unique_ptr<NcclMean> mean = NcclMean::New(indices, &error);
  if (mean == nullptr) return absl::FailedPreconditionError(error);
  return std::unique_ptr<NodeReducer>(std::make_unique<NcclNodeReducer>(std::move(mean)));
}

}  // namespace bmuf::worker

#else

namespace bmuf::worker {

absl::StatusOr<std::unique_ptr<NodeReducer>> NewNcclNodeReducer(const std::vector<Device>&) {
  return absl::UnimplementedError("this build found no NCCL");
}

}  // namespace bmuf::worker

#endif  // BMUF_HAVE_NCCL
