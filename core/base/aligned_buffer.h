// A fixed-size array of trivially copyable values on a 64-byte boundary.
#ifndef BMUF_CORE_BASE_ALIGNED_BUFFER_H_
#define BMUF_CORE_BASE_ALIGNED_BUFFER_H_

#include <cstddef>
#include <cstring>
#include <memory>
#include <new>
#include <type_traits>
#include <utility>

#include "absl/types/span.h"

namespace bmuf {

// Move-only; thread-compatible. Allocation failure throws std::bad_alloc, as any container's does.
template <typename T>
class AlignedBuffer {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  static constexpr size_t kAlignment = 64;

  AlignedBuffer() = default;
  // `size` zero values.
  explicit AlignedBuffer(size_t size) : AlignedBuffer(Uninitialized(size)) {
    if (size > 0) std::memset(static_cast<void*>(data_.get()), 0, size * sizeof(T));
  }
  // `size` values that the caller writes before it reads them.
  static AlignedBuffer Uninitialized(size_t size) {
    AlignedBuffer b;
    if (size > 0) {
      b.data_.reset(static_cast<T*>(::operator new (size * sizeof(T), std::align_val_t{kAlignment})));
      b.size_ = size;
    }
    return b;
  }
  AlignedBuffer(AlignedBuffer&& other) noexcept : data_(std::move(other.data_)), size_(std::exchange(other.size_, 0)) {}
  AlignedBuffer& operator=(AlignedBuffer&& other) noexcept {
    data_ = std::move(other.data_);
    size_ = std::exchange(other.size_, 0);
    return *this;
  }

  T* data() { return data_.get(); }
  const T* data() const { return data_.get(); }
  size_t size() const { return size_; }
  size_t size_bytes() const { return size_ * sizeof(T); }
  bool empty() const { return size_ == 0; }
  T& operator[](size_t i) { return data_.get()[i]; }
  const T& operator[](size_t i) const { return data_.get()[i]; }
  T* begin() { return data(); }
  T* end() { return data() + size_; }
  const T* begin() const { return data(); }
  const T* end() const { return data() + size_; }
  absl::Span<T> span() { return absl::MakeSpan(data(), size_); }
  absl::Span<const T> span() const { return absl::MakeConstSpan(data(), size_); }

  AlignedBuffer Clone() const {
    AlignedBuffer copy = Uninitialized(size_);
    if (size_ > 0) std::memcpy(static_cast<void*>(copy.data()), data(), size_bytes());
    return copy;
  }

 private:
  struct Free {
    void operator()(T* p) const { ::operator delete (p, std::align_val_t{kAlignment}); }
  };
  std::unique_ptr<T, Free> data_;
  size_t size_ = 0;
};

}  // namespace bmuf

#endif  // BMUF_CORE_BASE_ALIGNED_BUFFER_H_
