#include "worker/trainer/node_reducer.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace bmuf::worker {
namespace {

class CpuNodeReducer : public NodeReducer {
 public:
  std::string name() const override { return "cpu"; }
  bool reads_device_memory() const override { return false; }

  absl::Status Mean(absl::Span<const float* const> parts, absl::Span<float> out) override {
    if (parts.size() == 1) {
      std::memcpy(out.data(), parts[0], out.size() * sizeof(float));
      return absl::OkStatus();
    }
    const auto count = static_cast<double>(parts.size());
    double sums[kPiece];
    for (size_t begin = 0; begin < out.size(); begin += kPiece) {
      const size_t size = std::min(kPiece, out.size() - begin);
      std::fill_n(sums, size, 0.0);
      for (const float* part : parts) {
        for (size_t i = 0; i < size; ++i) sums[i] += part[begin + i];
      }
      for (size_t i = 0; i < size; ++i) out[begin + i] = static_cast<float>(sums[i] / count);
    }
    return absl::OkStatus();
  }

 private:
  static constexpr size_t kPiece = 1024;  // The sums stay in the first-level cache.
};

// Reduces `count` elements of T that start at `offset` of every part. Bytes are not aligned for T.
template <typename T, typename Sum, typename Combine, typename Finish>
void ReduceTensor(size_t offset, size_t count, absl::Span<const AlignedBuffer<uint8_t>> parts, uint8_t* out,
                  Combine combine, Finish finish) {
  for (size_t i = 0; i < count; ++i) {
    const size_t at = offset + i * sizeof(T);
    T value;
    std::memcpy(&value, parts[0].data() + at, sizeof(T));
    Sum sum = value;
    for (size_t k = 1; k < parts.size(); ++k) {
      std::memcpy(&value, parts[k].data() + at, sizeof(T));
      sum = combine(sum, static_cast<Sum>(value));
    }
    value = static_cast<T>(finish(sum));
    std::memcpy(out + at, &value, sizeof(T));
  }
}

template <typename T>
void MaxTensor(size_t offset, size_t count, absl::Span<const AlignedBuffer<uint8_t>> parts, uint8_t* out) {
  ReduceTensor<T, T>(
      offset, count, parts, out, [](T a, T b) { return std::max(a, b); }, [](T x) { return x; });
}

}  // namespace

std::unique_ptr<NodeReducer> NewCpuNodeReducer() { return std::make_unique<CpuNodeReducer>(); }

absl::Status ReduceAuxiliary(const v1::Manifest& manifest, absl::Span<const AlignedBuffer<uint8_t>> parts,
                             AlignedBuffer<uint8_t>* out) {
  const size_t bytes = ModelState::For(manifest).auxiliary.size();
  bool fits = !parts.empty() && out->size() == bytes;
  for (const auto& part : parts) fits = fits && part.size() == bytes;
  if (!fits) return absl::InvalidArgumentError(absl::StrCat("auxiliary sections must have ", bytes, " bytes"));
  const auto count_parts = static_cast<double>(parts.size());
  size_t offset = 0;
  for (const v1::TensorSpec& t : manifest.tensors()) {
    if (t.role() == v1::TENSOR_ROLE_BMUF || t.role() == v1::TENSOR_ROLE_LOCAL) continue;
    const size_t count = ElementCount(t), tensor_bytes = count * ElementBytes(t.dtype());
    if (t.role() == v1::TENSOR_ROLE_MEAN) {
      ReduceTensor<float, double>(
          offset, count, parts, out->data(), [](double a, double b) { return a + b; },
          [&](double sum) { return sum / count_parts; });
    } else if (t.role() == v1::TENSOR_ROLE_MAX && t.dtype() == v1::DTYPE_I64) {
      MaxTensor<int64_t>(offset, count, parts, out->data());
    } else if (t.role() == v1::TENSOR_ROLE_MAX && t.dtype() == v1::DTYPE_I32) {
      MaxTensor<int32_t>(offset, count, parts, out->data());
    } else if (t.role() == v1::TENSOR_ROLE_MAX) {
      MaxTensor<float>(offset, count, parts, out->data());
    } else {
      std::memcpy(out->data() + offset, parts[0].data() + offset, tensor_bytes);
    }
    offset += tensor_bytes;
  }
  return absl::OkStatus();
}

}  // namespace bmuf::worker
