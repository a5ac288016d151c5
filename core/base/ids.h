// Strong identifiers.
//
// Problem: rounds, versions, incarnations and epochs are all 64-bit counters, and a swapped argument compiles.
// Idea: one small class per meaning; no conversion between them. Usage: `RoundId next = round.Next();`
#ifndef BMUF_CORE_BASE_IDS_H_
#define BMUF_CORE_BASE_IDS_H_

#include <cstdint>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"

namespace bmuf {

// A 64-bit counter whose meaning is `Tag`. Value type; thread-compatible.
template <typename Tag>
class StrongId {
 public:
  constexpr StrongId() = default;
  constexpr explicit StrongId(uint64_t value) : value_(value) {}

  constexpr uint64_t value() const { return value_; }
  constexpr StrongId Next() const { return StrongId(value_ + 1); }
  std::string ToString() const { return absl::StrCat(value_); }

  friend constexpr bool operator==(StrongId a, StrongId b) { return a.value_ == b.value_; }
  friend constexpr bool operator!=(StrongId a, StrongId b) { return a.value_ != b.value_; }
  friend constexpr bool operator<(StrongId a, StrongId b) { return a.value_ < b.value_; }
  friend constexpr bool operator<=(StrongId a, StrongId b) { return a.value_ <= b.value_; }
  friend constexpr bool operator>(StrongId a, StrongId b) { return a.value_ > b.value_; }
  friend constexpr bool operator>=(StrongId a, StrongId b) { return a.value_ >= b.value_; }

  template <typename H>
  friend H AbslHashValue(H h, StrongId id) {
    return H::combine(std::move(h), id.value_);
  }

 private:
  uint64_t value_ = 0;
};

// A published model. Version 0 is the initial model; each commit adds exactly one.
using ModelVersion = StrongId<struct ModelVersionTag>;
// A round. Round 0 delivers the initial model; round r >= 1 starts from version r - 1 and its commit is version r.
using RoundId = StrongId<struct RoundTag>;
// One life of a worker name. Given by the coordinator at Join, strictly rising per (job, worker); 0 is never given.
using Incarnation = StrongId<struct IncarnationTag>;
// One life of the coordinator over one state directory. Strictly rising; 0 is never used.
using Epoch = StrongId<struct EpochTag>;

// The version that round `round` starts from. Requires round >= 1.
constexpr ModelVersion BaseVersionOf(RoundId round) { return ModelVersion(round.value() - 1); }
// The version that a commit of `round` publishes.
constexpr ModelVersion CommittedVersionOf(RoundId round) { return ModelVersion(round.value()); }
// The round that starts from `version`.
constexpr RoundId RoundFrom(ModelVersion version) { return RoundId(version.value() + 1); }

}  // namespace bmuf

#endif  // BMUF_CORE_BASE_IDS_H_
