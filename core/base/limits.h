// Every limit that the wire and the state obey, in one place, with the reason for each.
#ifndef BMUF_CORE_BASE_LIMITS_H_
#define BMUF_CORE_BASE_LIMITS_H_

#include <cstddef>
#include <cstdint>

namespace bmuf::limits {

// Payload of one chunk. Far below gRPC's default message limit of 4 MiB, so that a client without channel options
// works; beyond 2 MiB throughput falls.
inline constexpr size_t kMaxChunkBytes = size_t{1} << 20;
// First message of a push: admission decides on it before anything else is read.
inline constexpr size_t kMaxPushHeaderBytes = 4096;
// Any unary request. Join carries the manifest (names of all tensors), hence not smaller.
inline constexpr size_t kMaxRequestBytes = size_t{4} << 20;
// Names of jobs and workers: they appear in paths, labels and log lines.
inline constexpr size_t kMaxNameBytes = 64;
// Tensor names in manifests; the longest seen in public models are below 200.
inline constexpr size_t kMaxTensorNameBytes = 512;
// Tensors of one model; the largest public models have some tens of thousands.
inline constexpr size_t kMaxTensors = 100'000;
inline constexpr size_t kMaxTensorRank = 16;
// Free text from a peer (host name, version, failure text) is cut here.
inline constexpr size_t kMaxPeerTextBytes = 256;
// Metrics (name, value) that a worker may attach to a push.
inline constexpr size_t kMaxPushMetrics = 32;
// Jobs in one daemon: each has buffers of model size.
inline constexpr size_t kMaxJobs = 64;
// Workers of one job, present or remembered.
inline constexpr size_t kMaxWorkersPerJob = 4096;
// Local trajectories that one worker may represent.
inline constexpr uint32_t kMaxTrajectoriesPerWorker = 4096;
// Round records kept in memory for ListRounds.
inline constexpr size_t kMaxRoundRecords = 10'000;
// Streams that wait in WatchRound or WatchJob, over all jobs.
inline constexpr size_t kMaxWatchers = 20'000;
// Exact accumulation: |sum of weighted contributions| must stay below this (see core/kernels/kernels.h).
inline constexpr double kAccumulatorRange = 131072.0;  // 2^17
inline constexpr int kAccumulatorGridLog2 = -36;

}  // namespace bmuf::limits

#endif  // BMUF_CORE_BASE_LIMITS_H_
