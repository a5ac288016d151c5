// Which samples a trajectory trains on: a function of what the coordinator says, with nothing to exchange.
//
// Problem: workers join and leave between rounds, and every sample should still be seen once per pass.
// Idea: one endless stream that everybody knows: a fresh pseudo-random permutation of the data set for each pass. A
// round starts at the stream position `total_samples` (samples committed so far, from the coordinator), and its
// trajectories take neighbouring slices in the order of their ranks:
//
//     position of trajectory t = total_samples + t * samples_per_block
//
// So the slices of a round are disjoint (if a round is longer than a pass, each sample is used equally often, give or
// take one), the next round goes on where this one ended, and a change of membership re-shards by itself. A worker with
// K trajectories owns K neighbouring ranks. If a delta is lost, the following round starts that much earlier in the
// stream. All workers of a job must use one seed, one data set and one batch size.
// Usage:  SampleStream stream(seed, data.size());
//         auto indices = stream.Slice(total_samples + rank * block_samples, block_samples);
#ifndef BMUF_WORKER_DATA_SAMPLE_STREAM_H_
#define BMUF_WORKER_DATA_SAMPLE_STREAM_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

namespace bmuf::worker {

// Thread-compatible.
class SampleStream {
 public:
  // Requires 1 <= sample_count <= 2^32.
  SampleStream(uint64_t seed, uint64_t sample_count) : seed_(seed), sample_count_(sample_count) {}

  // The `count` samples from `position` on, as indices into the data set. The same on every machine and build.
  std::vector<uint32_t> Slice(uint64_t position, uint64_t count);

 private:
  const std::vector<uint32_t>& Pass(uint64_t pass);

  uint64_t seed_;
  uint64_t sample_count_;
  std::map<uint64_t, std::vector<uint32_t>> passes_;  // The permutations used last, by number of the pass.
};

}  // namespace bmuf::worker

#endif  // BMUF_WORKER_DATA_SAMPLE_STREAM_H_
