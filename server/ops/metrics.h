// The daemon's metrics in Prometheus' text format.
//
// Names and labels are stable and documented here. Labels come from closed sets (method, code, state, direction), from
// job names (at most limits::kMaxJobs) and from names of present workers (at most kMostWorkerSeries a job).
//   bmuf_build_info{build,kernels} 1            bmuf_coordinator_epoch          bmuf_uptime_seconds
//   bmuf_draining 0|1                           bmuf_open_calls                 bmuf_calls_total{method,code}
//   bmuf_payload_bytes_total{direction}         bmuf_log_lines_dropped_total    bmuf_transfers_too_slow_total
//   bmuf_job_state{job,state} 0|1               bmuf_job_round{job}             bmuf_job_version{job}
//   bmuf_job_deltas_have{job}                   bmuf_job_deltas_expected{job}   bmuf_job_deltas_need{job}
//   bmuf_job_workers{job,state}                 bmuf_job_samples_total{job}     bmuf_job_model_bytes{job}
//   bmuf_job_block_momentum{job}                bmuf_job_block_learning_rate{job}
//   bmuf_job_last_commit_timestamp_seconds{job} bmuf_job_last_round_seconds{job}  bmuf_job_last_commit_seconds{job}
//   bmuf_worker_block_seconds{job,worker}       bmuf_worker_contributions_total{job,worker}
//   bmuf_<counter>{job} for each counter of server/engine/engine.h
#ifndef BMUF_SERVER_OPS_METRICS_H_
#define BMUF_SERVER_OPS_METRICS_H_

#include <array>
#include <cstdint>
#include <string>

#include "bmuf/v1/admin_service.pb.h"
#include "prometheus/counter.h"
#include "prometheus/registry.h"

namespace bmuf::ops {

inline constexpr int kMostWorkerSeries = 1024;

// Thread-safe.
class Metrics {
 public:
  Metrics();

  // A call of `method` (a literal) ended with the gRPC code `code`.
  void CountCall(const char* method, int code);
  void CountReceived(uint64_t payload_bytes) { received_.Increment(static_cast<double>(payload_bytes)); }
  void CountSent(uint64_t payload_bytes) { sent_.Increment(static_cast<double>(payload_bytes)); }

  // The page for a scraper: what was counted here, and what `status` says.
  std::string Render(const v1::GetStatusResponse& status, uint64_t open_calls, uint64_t log_lines_dropped) const;

 private:
  prometheus::Registry registry_;
  prometheus::Family<prometheus::Counter>& calls_;
  prometheus::Family<prometheus::Counter>& payload_;
  prometheus::Counter& received_;
  prometheus::Counter& sent_;
};

// The daemon and its jobs on one page of text, for people.
std::string StatusPage(const v1::GetStatusResponse& status);

}  // namespace bmuf::ops

#endif  // BMUF_SERVER_OPS_METRICS_H_
