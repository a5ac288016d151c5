#include "core/layout/layout.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/base/error.h"
#include "core/base/limits.h"
#include "core/base/names.h"

namespace bmuf {
namespace {

absl::Status BadTensor(const v1::TensorSpec& spec, int index, const std::string& what) {
  const std::string name = spec.name().empty() ? absl::StrCat("#", index) : EscapeForLog(spec.name());
  return Error(v1::REASON_INVALID_REQUEST, absl::StrCat("tensor ", name, ": ", what)).Field(name, what);
}

bool RoleAllows(v1::TensorRole role, v1::DType dtype) {
  switch (role) {
    case v1::TENSOR_ROLE_BMUF:
      return dtype == v1::DTYPE_F32 || dtype == v1::DTYPE_BF16 || dtype == v1::DTYPE_F16;
    case v1::TENSOR_ROLE_MEAN:
      return dtype == v1::DTYPE_F32;
    case v1::TENSOR_ROLE_MAX:
    case v1::TENSOR_ROLE_FIRST:
      return dtype == v1::DTYPE_F32 || dtype == v1::DTYPE_I32 || dtype == v1::DTYPE_I64;
    case v1::TENSOR_ROLE_LOCAL:
      return true;
    default:
      return false;
  }
}

std::string Describe(const v1::TensorSpec& spec) {
  return absl::StrCat(EscapeForLog(spec.name()), " ", v1::DType_Name(spec.dtype()), "[",
                      absl::StrJoin(spec.shape(), ","), "] ", v1::TensorRole_Name(spec.role()));
}

}  // namespace

size_t DTypeBytes(v1::DType dtype) {
  switch (dtype) {
    case v1::DTYPE_F32:
    case v1::DTYPE_I32:
      return 4;
    case v1::DTYPE_BF16:
    case v1::DTYPE_F16:
      return 2;
    case v1::DTYPE_I64:
      return 8;
    default:
      return 0;
  }
}

absl::StatusOr<std::shared_ptr<const Layout>> Layout::Create(v1::Manifest manifest) {
  if (manifest.tensors().empty()) {
    return Error(v1::REASON_INVALID_REQUEST, "the manifest names no tensor").Field("manifest.tensors", "empty");
  }
  if (static_cast<size_t>(manifest.tensors_size()) > limits::kMaxTensors) {
    return Error(v1::REASON_INVALID_REQUEST, absl::StrCat("the manifest names ", manifest.tensors_size(),
                                                          " tensors, at most ", limits::kMaxTensors, " are allowed"))
        .Field("manifest.tensors", "too many");
  }
  std::shared_ptr<Layout> layout(new Layout());
  std::set<std::string> names;
  // Sizes stay far below overflow when each is below 2^60 and sums are checked with the builtins.
  constexpr uint64_t kMaxElements = uint64_t{1} << 58;
  for (int i = 0; i < manifest.tensors_size(); ++i) {
    const v1::TensorSpec& spec = manifest.tensors(i);
    if (spec.name().empty() || spec.name().size() > limits::kMaxTensorNameBytes) {
      return BadTensor(spec, i, absl::StrCat("its name must have 1 to ", limits::kMaxTensorNameBytes, " bytes"));
    }
    if (!names.insert(spec.name()).second) return BadTensor(spec, i, "its name appears twice");
    // The one key of a safetensors header that is not a tensor.
    if (spec.name() == "__metadata__") return BadTensor(spec, i, "its name is reserved by the export format");
    if (static_cast<size_t>(spec.shape_size()) > limits::kMaxTensorRank) {
      return BadTensor(spec, i, absl::StrCat("it has more than ", limits::kMaxTensorRank, " dimensions"));
    }
    uint64_t elements = 1;
    for (uint64_t dimension : spec.shape()) {
      if (dimension == 0) return BadTensor(spec, i, "a dimension is 0");
      if (__builtin_mul_overflow(elements, dimension, &elements) || elements > kMaxElements) {
        return BadTensor(spec, i, "its shape has too many elements");
      }
    }
    if (DTypeBytes(spec.dtype()) == 0 || !RoleAllows(spec.role(), spec.dtype())) {
      return BadTensor(spec, i,
                       absl::StrCat("role ", static_cast<int>(spec.role()), " with dtype ",
                                    static_cast<int>(spec.dtype()), " is not possible"));
    }
    Tensor tensor{spec.name(), spec.dtype(), spec.role(), elements, 0};
    uint64_t* section = nullptr;
    uint64_t size = 0;
    if (spec.role() == v1::TENSOR_ROLE_BMUF) {
      section = &layout->bmuf_elements_;
      size = elements;
    } else if (spec.role() != v1::TENSOR_ROLE_LOCAL) {
      section = &layout->auxiliary_bytes_;
      size = elements * DTypeBytes(spec.dtype());
    }
    if (section != nullptr) {
      tensor.offset = *section;
      if (__builtin_add_overflow(*section, size, section) || *section > kMaxElements) {
        return BadTensor(spec, i, "the model has too many elements");
      }
    }
    layout->tensors_.push_back(std::move(tensor));
  }
  if (layout->bmuf_elements_ == 0) {
    return Error(v1::REASON_INVALID_REQUEST, "the manifest has no tensor of role BMUF: there is nothing to train")
        .Field("manifest.tensors", "no tensor of role BMUF");
  }
  layout->manifest_ = std::move(manifest);
  return std::shared_ptr<const Layout>(std::move(layout));
}

std::string Layout::NameOfElement(uint64_t index) const {
  for (const Tensor& tensor : tensors_) {
    if (tensor.role == v1::TENSOR_ROLE_BMUF && index - tensor.offset < tensor.elements) {
      return absl::StrCat(EscapeForLog(tensor.name), "[", index - tensor.offset, "]");
    }
  }
  return absl::StrCat("[", index, "]");
}

std::string Layout::NameOfAuxiliaryByte(uint64_t offset) const {
  for (const Tensor& tensor : tensors_) {
    if (tensor.role == v1::TENSOR_ROLE_BMUF || tensor.role == v1::TENSOR_ROLE_LOCAL) continue;
    const uint64_t width = DTypeBytes(tensor.dtype);
    if (offset - tensor.offset < tensor.elements * width) {
      return absl::StrCat(EscapeForLog(tensor.name), "[", (offset - tensor.offset) / width, "]");
    }
  }
  return absl::StrCat("byte ", offset);
}

absl::Status Layout::CheckSame(const v1::Manifest& other) const {
  const int common = std::min(manifest_.tensors_size(), other.tensors_size());
  for (int i = 0; i < common; ++i) {
    const std::string ours = manifest_.tensors(i).SerializeAsString();
    if (other.tensors(i).SerializeAsString() == ours) continue;
    return Error(v1::REASON_MANIFEST_MISMATCH, absl::StrCat("tensor ", i, " is ", Describe(other.tensors(i)),
                                                            ", the job has ", Describe(manifest_.tensors(i))))
        .Field(EscapeForLog(other.tensors(i).name()), absl::StrCat("the job has ", Describe(manifest_.tensors(i))));
  }
  if (manifest_.tensors_size() == other.tensors_size()) return absl::OkStatus();
  const bool extra = other.tensors_size() > common;
  const v1::TensorSpec& spec = extra ? other.tensors(common) : manifest_.tensors(common);
  const std::string what = extra ? "the job does not have it" : "the job has it, the worker does not";
  return Error(v1::REASON_MANIFEST_MISMATCH, absl::StrCat("tensor ", common, ", ", Describe(spec), ": ", what))
      .Field(EscapeForLog(spec.name()), what);
}

}  // namespace bmuf
