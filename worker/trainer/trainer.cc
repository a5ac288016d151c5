#include "worker/trainer/trainer.h"

#include "absl/strings/str_cat.h"

namespace bmuf::worker {

size_t ElementCount(const v1::TensorSpec& tensor) {
  size_t count = 1;
  for (uint64_t dimension : tensor.shape()) count *= dimension;
  return count;
}

size_t ElementBytes(v1::DType dtype) {
  switch (dtype) {
    case v1::DTYPE_F32:
    case v1::DTYPE_I32:
      return 4;
    case v1::DTYPE_I64:
      return 8;
    case v1::DTYPE_BF16:
    case v1::DTYPE_F16:
      return 2;
    default:
      return 0;
  }
}

ModelState ModelState::For(const v1::Manifest& manifest) {
  size_t elements = 0, bytes = 0;
  for (const v1::TensorSpec& tensor : manifest.tensors()) {
    if (tensor.role() == v1::TENSOR_ROLE_BMUF) {
      elements += ElementCount(tensor);
    } else if (tensor.role() != v1::TENSOR_ROLE_LOCAL) {
      bytes += ElementCount(tensor) * ElementBytes(tensor.dtype());
    }
  }
  return {AlignedBuffer<float>(elements), AlignedBuffer<uint8_t>(bytes)};
}

absl::StatusOr<OptimizerKind> ParseOptimizer(const std::string& name) {
  if (name == "sgd") return OptimizerKind::kSgd;
  if (name == "nesterov") return OptimizerKind::kNesterov;
  if (name == "adamw") return OptimizerKind::kAdamW;
  return absl::InvalidArgumentError(absl::StrCat("optimizer \"", name, "\": choose sgd, nesterov or adamw"));
}

}  // namespace bmuf::worker
