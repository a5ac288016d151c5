#include "server/model/accumulator.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/base/limits.h"
#include "core/filter/filter.h"

namespace bmuf {
namespace {

// Beyond this a single weighted value would be rounded more coarsely than the grid (see core/kernels/table.h).
constexpr double kLargestContribution = 32768.0;  // 2^15
constexpr uint64_t kSharePieces = 64 * 1024;

template <typename T>
void MergeLargerBytes(uint8_t* merged, const uint8_t* value, uint64_t elements) {
  // Sections have no alignment of their own.
  std::vector<T> a(elements), b(elements);
  std::memcpy(a.data(), merged, elements * sizeof(T));
  std::memcpy(b.data(), value, elements * sizeof(T));
  // The two zeros are equal, so that the order of arrival would decide which one stays: there is one only.
  for (T& x : a) x += T{0};
  for (T& x : b) x += T{0};
  MergeMax(absl::MakeSpan(a), absl::MakeConstSpan(b));
  std::memcpy(merged, a.data(), elements * sizeof(T));
}

}  // namespace

Accumulator::Accumulator(std::shared_ptr<const Layout> layout)
    : layout_(std::move(layout)), sum_(layout_->bmuf_elements()), auxiliary_(layout_->auxiliary_bytes()) {
  uint64_t means = 0;
  for (const Layout::Tensor& tensor : layout_->tensors()) {
    if (tensor.role == v1::TENSOR_ROLE_MEAN) means += tensor.elements;
  }
  auxiliary_sum_.resize(means);
}

void Accumulator::Reset() {
  if (!empty_) std::memset(sum_.data(), 0, sum_.size_bytes());
  std::fill(auxiliary_sum_.begin(), auxiliary_sum_.end(), 0.0);
  weights_.clear();
  bound_ = 0;
  first_rank_ = std::numeric_limits<uint32_t>::max();
  empty_ = true;
}

absl::Status Accumulator::Fold(const Kernels& kernels, ThreadPool& pool, const Staging& staging, float max_abs,
                               double weight, double scale, uint32_t rank) {
  const double factor = weight * scale;
  double largest = std::abs(factor) * static_cast<double>(max_abs);
  const absl::Span<const uint8_t> values = staging.auxiliary();
  for (const Layout::Tensor& tensor : layout_->tensors()) {
    if (tensor.role != v1::TENSOR_ROLE_MEAN) continue;
    for (uint64_t i = 0; i < tensor.elements; ++i) {
      float value;
      std::memcpy(&value, values.data() + tensor.offset + 4 * i, 4);
      largest = std::max(largest, weight * std::abs(static_cast<double>(value)));
    }
  }
  if (!(largest < kLargestContribution) || !(bound_ + largest < limits::kAccumulatorRange)) {
    return Error(v1::REASON_OUT_OF_RANGE_DELTA,
                 absl::StrCat("its largest weighted value, ", largest, ", leaves the range of the exact sum (",
                              kLargestContribution, " for one value, ", limits::kAccumulatorRange, " for all)"))
        .With("norm", largest)
        .With("limit", kLargestContribution);
  }
  if (factor != 0) {
    staging.ForEachPiece(kernels, pool, [&](uint64_t begin, absl::Span<const float> piece) {
      kernels.accumulate(sum_.data() + begin, piece.data(), factor, piece.size());
    });
  }
  double* mean_sum = auxiliary_sum_.data();
  const bool is_first = rank < first_rank_;
  for (const Layout::Tensor& tensor : layout_->tensors()) {
    const uint8_t* value = values.data() + tensor.offset;
    uint8_t* merged = auxiliary_.data() + tensor.offset;
    const uint64_t bytes = tensor.elements * DTypeBytes(tensor.dtype);
    switch (tensor.role) {
      case v1::TENSOR_ROLE_MEAN: {
        std::vector<float> floats(tensor.elements);
        std::memcpy(floats.data(), value, bytes);
        kernels.accumulate(mean_sum, floats.data(), weight, tensor.elements);
        mean_sum += tensor.elements;
        break;
      }
      case v1::TENSOR_ROLE_MAX:
        if (empty_) std::memcpy(merged, value, bytes);
        if (tensor.dtype == v1::DTYPE_I64) {
          MergeLargerBytes<int64_t>(merged, value, tensor.elements);
        } else if (tensor.dtype == v1::DTYPE_I32) {
          MergeLargerBytes<int32_t>(merged, value, tensor.elements);
        } else {
          MergeLargerBytes<float>(merged, value, tensor.elements);
        }
        break;
      case v1::TENSOR_ROLE_FIRST:
        if (is_first) std::memcpy(merged, value, bytes);
        break;
      default:
        break;
    }
  }
  if (is_first) first_rank_ = rank;
  bound_ += largest;
  weights_.emplace(rank, weight);
  empty_ = false;
  return absl::OkStatus();
}

double Accumulator::total_weight() const {
  double total = 0;
  for (const auto& [rank, weight] : weights_) total += weight;
  return total;
}

AlignedBuffer<float> Accumulator::Mean(const Kernels& kernels, ThreadPool& pool) const {
  AlignedBuffer<float> mean = AlignedBuffer<float>::Uninitialized(sum_.size());
  const double total = total_weight();
  pool.ParallelFor(sum_.size(), kSharePieces, [&](size_t begin, size_t end) {
    kernels.mean(mean.data() + begin, sum_.data() + begin, total, end - begin);
  });
  return mean;
}

AlignedBuffer<uint8_t> Accumulator::Auxiliary(const AlignedBuffer<uint8_t>& before) const {
  AlignedBuffer<uint8_t> after = before.Clone();
  const double* mean_sum = auxiliary_sum_.data();
  const double total = total_weight();
  for (const Layout::Tensor& tensor : layout_->tensors()) {
    switch (tensor.role) {
      case v1::TENSOR_ROLE_MEAN:
        for (uint64_t i = 0; i < tensor.elements; ++i) {
          const float mean = static_cast<float>(*mean_sum++ / total);
          std::memcpy(after.data() + tensor.offset + 4 * i, &mean, 4);
        }
        break;
      case v1::TENSOR_ROLE_MAX:
      case v1::TENSOR_ROLE_FIRST:
        std::memcpy(after.data() + tensor.offset, auxiliary_.data() + tensor.offset,
                    tensor.elements * DTypeBytes(tensor.dtype));
        break;
      default:
        break;
    }
  }
  return after;
}

}  // namespace bmuf
