// The daemon's numbers for Prometheus, from the same status that people see.
//
// Names (all stable; label job everywhere but on bmuf_up, worker only where named):
//   bmuf_up, bmuf_epoch, bmuf_uptime_seconds                    the daemon
//   bmuf_<counter>                                              every counter of server/engine/engine.h
//   bmuf_round, bmuf_round_attempt, bmuf_version                where the job stands
//   bmuf_job_state{state}                                       1 for the state the job is in
//   bmuf_round_open_seconds, bmuf_round_have, bmuf_round_expected, bmuf_round_need
//   bmuf_last_commit_timestamp_seconds, bmuf_last_commit_seconds, bmuf_last_round_seconds
//   bmuf_block_learning_rate, bmuf_block_momentum, bmuf_mean_delta_norm, bmuf_model_bytes, bmuf_total_samples
//   bmuf_workers{state}                                         members by state
//   bmuf_worker_silent_seconds{worker}, bmuf_worker_block_seconds{worker}, bmuf_worker_rejected_total{worker}
//     of active members only, at most kMaxWorkerSeries of each
#ifndef BMUF_SERVER_OPS_METRICS_H_
#define BMUF_SERVER_OPS_METRICS_H_

#include <string>

#include "bmuf/v1/admin_service.pb.h"

namespace bmuf::ops {

inline constexpr int kMaxWorkerSeries = 1024;

// The Prometheus text format.
std::string MetricsText(const v1::GetStatusResponse& status);

}  // namespace bmuf::ops

#endif  // BMUF_SERVER_OPS_METRICS_H_
