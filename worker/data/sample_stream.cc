#include "worker/data/sample_stream.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace bmuf::worker {
namespace {

// SplitMix64 (Steele, Lea, Flood 2014). Not from <random>: its distributions differ between libraries.
class SplitMix64 {
 public:
  explicit SplitMix64(uint64_t state) : state_(state) {}

  uint64_t Next() {
    state_ += 0x9e3779b97f4a7c15u;
    uint64_t z = state_;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  // In [0, bound), bound <= 2^32; the bias is below 2^-32.
  uint64_t Below(uint64_t bound) { return ((Next() >> 32) * bound) >> 32; }

 private:
  uint64_t state_;
};

// A neighbouring pass is often needed again in the next block.
constexpr size_t kPassesKept = 2;

}  // namespace

const std::vector<uint32_t>& SampleStream::Pass(uint64_t pass) {
  auto it = passes_.find(pass);
  if (it != passes_.end()) return it->second;
  while (passes_.size() >= kPassesKept) passes_.erase(passes_.begin());
  std::vector<uint32_t> order(sample_count_);
  std::iota(order.begin(), order.end(), 0u);
  SplitMix64 random(SplitMix64(seed_).Next() ^ SplitMix64(~pass).Next());
  for (uint64_t i = sample_count_; i > 1; --i) std::swap(order[i - 1], order[random.Below(i)]);
  return passes_.emplace(pass, std::move(order)).first->second;
}

std::vector<uint32_t> SampleStream::Slice(uint64_t position, uint64_t count) {
  std::vector<uint32_t> out;
  out.reserve(count);
  while (out.size() < count) {
    const uint64_t at = position + out.size();
    const std::vector<uint32_t>& order = Pass(at / sample_count_);
    const uint64_t begin = at % sample_count_;
    const uint64_t take = std::min<uint64_t>(count - out.size(), sample_count_ - begin);
    out.insert(out.end(), order.begin() + begin, order.begin() + begin + take);
  }
  return out;
}

}  // namespace bmuf::worker
