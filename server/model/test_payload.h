// Payloads as workers send them, for the tests of this package.
#ifndef BMUF_SERVER_MODEL_TEST_PAYLOAD_H_
#define BMUF_SERVER_MODEL_TEST_PAYLOAD_H_

#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bmuf/v1/types.pb.h"
#include "core/base/crc32c.h"
#include "core/base/limits.h"
#include "core/codec/codec.h"
#include "core/layout/layout.h"
#include "gtest/gtest.h"
#include "server/model/staging.h"

namespace bmuf {

inline void AddTensor(v1::Manifest& manifest, const std::string& name, std::initializer_list<uint64_t> shape,
                      v1::DType dtype = v1::DTYPE_F32, v1::TensorRole role = v1::TENSOR_ROLE_BMUF) {
  v1::TensorSpec* spec = manifest.add_tensors();
  spec->set_name(name);
  for (uint64_t dimension : shape) spec->add_shape(dimension);
  spec->set_dtype(dtype);
  spec->set_role(role);
}

inline std::shared_ptr<const Layout> LayoutOf(const v1::Manifest& manifest) {
  auto layout = Layout::Create(manifest);
  EXPECT_TRUE(layout.ok()) << layout.status();
  return *layout;
}

// One tensor "w" of n elements.
inline std::shared_ptr<const Layout> PlainLayout(uint64_t n) {
  v1::Manifest manifest;
  AddTensor(manifest, "w", {n});
  return LayoutOf(manifest);
}

template <typename T>
void AppendValues(std::vector<uint8_t>& bytes, const std::vector<T>& values) {
  const size_t at = bytes.size();
  bytes.resize(at + values.size() * sizeof(T));
  if (!values.empty()) std::memcpy(bytes.data() + at, values.data(), values.size() * sizeof(T));
}

inline std::vector<uint8_t> PayloadOf(v1::Codec codec, const std::vector<float>& bmuf,
                                      const std::vector<uint8_t>& auxiliary = {}) {
  std::vector<uint8_t> bytes(*EncodedBytes(codec, bmuf.size()));
  EXPECT_TRUE(Encode(ScalarKernels(), codec, bmuf, absl::MakeSpan(bytes)).ok());
  bytes.insert(bytes.end(), auxiliary.begin(), auxiliary.end());
  return bytes;
}

// A staging that has all of `payload` and its end, not yet verified.
inline std::unique_ptr<Staging> Received(std::shared_ptr<const Layout> layout, v1::Codec codec,
                                         const std::vector<uint8_t>& payload) {
  auto staging = Staging::Create(std::move(layout), codec, payload.size());
  EXPECT_TRUE(staging.ok()) << staging.status();
  for (size_t at = 0; at < payload.size(); at += limits::kMaxChunkBytes) {
    const auto chunk = absl::MakeConstSpan(payload).subspan(at, limits::kMaxChunkBytes);
    EXPECT_TRUE((*staging)->Append(at, chunk, Crc32c(chunk.data(), chunk.size())).ok());
  }
  EXPECT_TRUE((*staging)->Finish(Crc32c(payload.data(), payload.size())).ok());
  return *std::move(staging);
}

}  // namespace bmuf

#endif  // BMUF_SERVER_MODEL_TEST_PAYLOAD_H_
