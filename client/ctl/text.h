// What bmufctl prints: pure functions from messages to text.
#ifndef BMUF_CLIENT_CTL_TEXT_H_
#define BMUF_CLIENT_CTL_TEXT_H_

#include <string>
#include <vector>

#include "absl/time/time.h"
#include "bmuf/v1/admin_service.pb.h"
#include "bmuf/v1/types.pb.h"

namespace bmuf::ctl {

// Rows under a header, columns padded to their widest cell.
class Table {
 public:
  explicit Table(std::vector<std::string> header) { rows_.push_back(std::move(header)); }
  // Requires as many cells as the header has.
  void Add(std::vector<std::string> row) { rows_.push_back(std::move(row)); }
  std::string ToString() const;

 private:
  std::vector<std::vector<std::string>> rows_;
};

// "850ms", "12.3s", "4m05s", "3h12m", "2d04h".
std::string Short(absl::Duration d);
std::string Short(const google::protobuf::Duration& d);
// "512 B", "1.5 KiB", "381.5 MiB".
std::string Bytes(uint64_t bytes);
// "RUNNING" for JOB_STATE_RUNNING.
std::string Name(v1::JobState state);
std::string Name(v1::RoundPhase phase);
std::string Name(v1::Variant variant);
std::string Name(v1::WorkerStatus::State state);
std::string Name(v1::WorkerStatus::Part part);

std::string JobsTable(const v1::ListJobsResponse& jobs);
// The whole status of one job: who is waited for, until when, why, what happens then.
std::string StatusText(const v1::JobStatus& status);
// The daemon's own lines, above its jobs.
std::string DaemonText(const v1::GetStatusResponse& status);
std::string RoundsTable(const v1::ListRoundsResponse& rounds);
// One line for a commit, for instance "round 12 committed: 4 of 4, loss 0.412, accuracy 0.8831, 1.2s (all 4 are in)".
std::string RoundLine(const v1::RoundRecord& record);
// One line for the open round with a bar of at most `width` columns in all.
std::string ProgressLine(const v1::JobStatus& status, int width);
// Contribution-weighted mean of a metric that contributors sent; false if nobody did.
bool MeanMetric(const v1::RoundRecord& record, const std::string& name, double* mean);

}  // namespace bmuf::ctl

#endif  // BMUF_CLIENT_CTL_TEXT_H_
