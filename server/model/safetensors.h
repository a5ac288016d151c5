// A version as a safetensors file, readable by any reader of that format, produced piece by piece.
//
// The format: 8 bytes little-endian length of the header, the header (JSON: name -> dtype, shape, data_offsets), the
// data. Here: tensors of role BMUF as F32, the others in their own type, LOCAL ones not at all; data in payload order;
// __metadata__ says job, version and kind.
#ifndef BMUF_SERVER_MODEL_SAFETENSORS_H_
#define BMUF_SERVER_MODEL_SAFETENSORS_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "bmuf/v1/coordinator_service.pb.h"
#include "core/kernels/kernels.h"
#include "server/model/version.h"

namespace bmuf {

// Immutable; thread-safe. Keeps the version alive.
class SafetensorsView {
 public:
  // `kind`: MODEL (without look-ahead) or BROADCAST.
  SafetensorsView(const std::string& job, std::shared_ptr<const Version> version, v1::ModelKind kind,
                  const Kernels& kernels);

  uint64_t size() const { return header_.size() + payload_.size(); }
  // Up to `most` contiguous bytes from `offset`, valid as long as this object. Requires offset < size().
  absl::Span<const uint8_t> At(uint64_t offset, uint64_t most) const;

 private:
  const std::shared_ptr<const Version> version_;
  std::string header_;  // With its length.
  PayloadView payload_;
};

}  // namespace bmuf

#endif  // BMUF_SERVER_MODEL_SAFETENSORS_H_
