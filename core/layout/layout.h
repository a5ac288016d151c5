// Where each tensor lies in a payload and in memory.
//
// Problem: a model is many named tensors, but transfer, sums and updates want long runs of numbers.
// Idea: a checked manifest becomes two sections: all tensors of role BMUF as one vector of float, all others (but
// LOCAL) as raw bytes; both in manifest order. types.proto describes the payload, this class computes it. Usage:
// ASSIGN_OR_RETURN(auto layout, Layout::Create(manifest)); layout->PayloadBytes(v1::CODEC_BF16);
#ifndef BMUF_CORE_LAYOUT_LAYOUT_H_
#define BMUF_CORE_LAYOUT_LAYOUT_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "bmuf/v1/types.pb.h"

namespace bmuf {

// Bytes of one element as it travels in the auxiliary section; 0 for an unknown type.
size_t DTypeBytes(v1::DType dtype);

// Immutable; thread-safe.
class Layout {
 public:
  // A tensor in its section.
  struct Tensor {
    std::string name;
    v1::DType dtype;
    v1::TensorRole role;
    uint64_t elements;
    uint64_t offset;  // Role BMUF: first element in the vector. MEAN, MAX, FIRST: first byte of the auxiliary section.
  };

  // Checks everything a hostile manifest could get wrong. Errors: REASON_INVALID_REQUEST naming the tensor (no or too
  // many tensors, bad or repeated name, zero dimension, size overflow, role and dtype that do not go together, no
  // tensor of role BMUF).
  static absl::StatusOr<std::shared_ptr<const Layout>> Create(v1::Manifest manifest);

  const v1::Manifest& manifest() const { return manifest_; }
  // All tensors, LOCAL ones included, in manifest order.
  const std::vector<Tensor>& tensors() const { return tensors_; }

  uint64_t bmuf_elements() const { return bmuf_elements_; }
  uint64_t auxiliary_bytes() const { return auxiliary_bytes_; }
  // Size of the F32 model: the number that limits are compared with.
  uint64_t model_bytes() const { return bmuf_elements_ * sizeof(float) + auxiliary_bytes_; }

  // The tensor that holds element `index` of the BMUF vector, as "name[index in the tensor]"; for error texts.
  // Requires index < bmuf_elements().
  std::string NameOfElement(uint64_t index) const;
  // The tensor that holds byte `offset` of the auxiliary section, in the same form. Requires offset in range.
  std::string NameOfAuxiliaryByte(uint64_t offset) const;

  // OK if `other` describes the same model; else REASON_MANIFEST_MISMATCH naming the first difference ("this" is the
  // job's, `other` the worker's).
  absl::Status CheckSame(const v1::Manifest& other) const;

 private:
  Layout() = default;

  v1::Manifest manifest_;
  std::vector<Tensor> tensors_;
  uint64_t bmuf_elements_ = 0;
  uint64_t auxiliary_bytes_ = 0;
};

}  // namespace bmuf

#endif  // BMUF_CORE_LAYOUT_LAYOUT_H_
