#include "server/model/safetensors.h"

#include <cstring>
#include <utility>

#include "nlohmann/json.hpp"

namespace bmuf {
namespace {

const char* NameOf(v1::DType dtype) {
  switch (dtype) {
    case v1::DTYPE_I32:
      return "I32";
    case v1::DTYPE_I64:
      return "I64";
    default:
      return "F32";
  }
}

std::string MakeHeader(const std::string& job, const Version& version, v1::ModelKind kind) {
  nlohmann::ordered_json header;
  header["__metadata__"] = {
      {"job", job},
      {"version", std::to_string(version.id().value())},
      {"kind", kind == v1::MODEL_KIND_BROADCAST ? "broadcast" : "model"},
      {"format", "pt"},
  };
  const uint64_t auxiliary_begin = version.layout()->bmuf_elements() * sizeof(float);
  const auto& specs = version.layout()->manifest().tensors();
  for (size_t i = 0; i < version.layout()->tensors().size(); ++i) {
    const Layout::Tensor& tensor = version.layout()->tensors()[i];
    if (tensor.role == v1::TENSOR_ROLE_LOCAL) continue;
    const bool bmuf = tensor.role == v1::TENSOR_ROLE_BMUF;
    const v1::DType dtype = bmuf ? v1::DTYPE_F32 : tensor.dtype;
    const uint64_t begin = bmuf ? tensor.offset * sizeof(float) : auxiliary_begin + tensor.offset;
    const auto& shape = specs[static_cast<int>(i)].shape();
    header[tensor.name] = {
        {"dtype", NameOf(dtype)},
        {"shape", std::vector<uint64_t>(shape.begin(), shape.end())},
        {"data_offsets", {begin, begin + tensor.elements * DTypeBytes(dtype)}},
    };
  }
  // A name with invalid UTF-8 is replaced, not thrown over.
  std::string json = header.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
  json.append((8 - json.size() % 8) % 8, ' ');  // So that the data is aligned.
  const uint64_t length = json.size();
  std::string framed(8, '\0');
  std::memcpy(framed.data(), &length, 8);
  return framed + json;
}

}  // namespace

SafetensorsView::SafetensorsView(const std::string& job, std::shared_ptr<const Version> version, v1::ModelKind kind,
                                 const Kernels& kernels)
    : version_(std::move(version)),
      header_(MakeHeader(job, *version_, kind)),
      payload_(*version_->Payload(kind, v1::CODEC_FP32, kernels)) {}

absl::Span<const uint8_t> SafetensorsView::At(uint64_t offset, uint64_t most) const {
  if (offset < header_.size()) {
    return absl::MakeConstSpan(reinterpret_cast<const uint8_t*>(header_.data()), header_.size()).subspan(offset, most);
  }
  return payload_.At(offset - header_.size(), most);
}

}  // namespace bmuf
