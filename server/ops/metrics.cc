#include "server/ops/metrics.h"

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "prometheus/metric_family.h"
#include "prometheus/text_serializer.h"

namespace bmuf::ops {
namespace {

using Labels = std::vector<std::pair<std::string, std::string>>;

double Seconds(const google::protobuf::Duration& d) { return static_cast<double>(d.seconds()) + d.nanos() * 1e-9; }

std::string StateName(v1::JobState state) {
  return absl::AsciiStrToLower(absl::StripPrefix(v1::JobState_Name(state), "JOB_STATE_"));
}

std::string StateName(v1::WorkerStatus::State state) {
  return absl::AsciiStrToLower(absl::StripPrefix(v1::WorkerStatus::State_Name(state), "STATE_"));
}

const char* CodeName(int code) {
  static constexpr std::array<const char*, 17> kNames = {
      "OK",        "CANCELLED",      "UNKNOWN",           "INVALID_ARGUMENT",   "DEADLINE_EXCEEDED",
      "NOT_FOUND", "ALREADY_EXISTS", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION",
      "ABORTED",   "OUT_OF_RANGE",   "UNIMPLEMENTED",     "INTERNAL",           "UNAVAILABLE",
      "DATA_LOSS", "UNAUTHENTICATED"};
  return code >= 0 && code < static_cast<int>(kNames.size()) ? kNames[code] : "UNKNOWN";
}

// Families by name, in order.
class Page {
 public:
  void Add(const std::string& name, const std::string& help, prometheus::MetricType type, double value,
           const Labels& labels = {}) {
    prometheus::MetricFamily& family = families_[name];
    family.name = name;
    family.help = help;
    family.type = type;
    prometheus::ClientMetric& metric = family.metric.emplace_back();
    for (const auto& [key, text] : labels) metric.label.push_back({key, text});
    if (type == prometheus::MetricType::Counter) {
      metric.counter.value = value;
    } else {
      metric.gauge.value = value;
    }
  }
  void Gauge(const std::string& name, const std::string& help, double value, const Labels& labels = {}) {
    Add(name, help, prometheus::MetricType::Gauge, value, labels);
  }
  void Counter(const std::string& name, const std::string& help, double value, const Labels& labels = {}) {
    Add(name, help, prometheus::MetricType::Counter, value, labels);
  }
  std::vector<prometheus::MetricFamily> Take() {
    std::vector<prometheus::MetricFamily> all;
    for (auto& [name, family] : families_) all.push_back(std::move(family));
    return all;
  }

 private:
  std::map<std::string, prometheus::MetricFamily> families_;
};

void AddJob(const v1::JobStatus& job, Page& page) {
  const Labels label = {{"job", job.job()}};
  for (int state = v1::JOB_STATE_INITIALIZING; state <= v1::JOB_STATE_FAILED; ++state) {
    page.Gauge("bmuf_job_state", "1 for the state the job is in.", job.state() == state ? 1 : 0,
               {{"job", job.job()}, {"state", StateName(static_cast<v1::JobState>(state))}});
  }
  page.Gauge("bmuf_job_round", "The open round.", static_cast<double>(job.round().round()), label);
  page.Gauge("bmuf_job_version", "The newest version.", static_cast<double>(job.version()), label);
  page.Gauge("bmuf_job_deltas_have", "Deltas folded into the open round.", job.round().have(), label);
  page.Gauge("bmuf_job_deltas_expected", "Workers expected in the open round.", job.round().expected(), label);
  page.Gauge("bmuf_job_deltas_need", "Contributors needed before a deadline may close the round.", job.round().need(),
             label);
  page.Counter("bmuf_job_samples_total", "Samples behind all commits.", static_cast<double>(job.total_samples()),
               label);
  page.Gauge("bmuf_job_model_bytes", "Size of the model as F32.", static_cast<double>(job.model_bytes()), label);
  page.Gauge("bmuf_job_block_momentum", "Block momentum in force.", job.block_momentum(), label);
  page.Gauge("bmuf_job_block_learning_rate", "Block learning rate in force.", job.block_learning_rate(), label);
  if (job.has_last_commit()) {
    const auto& at = job.last_commit().committed_at();
    page.Gauge("bmuf_job_last_commit_timestamp_seconds", "Wall clock at the newest commit.",
               static_cast<double>(at.seconds()) + at.nanos() * 1e-9, label);
    page.Gauge("bmuf_job_last_round_seconds", "From start to commit of the newest committed round.",
               Seconds(job.last_commit().duration()), label);
    page.Gauge("bmuf_job_last_commit_seconds", "From its last folded delta to its publication.",
               Seconds(job.last_commit().commit_time()), label);
  }
  std::map<v1::WorkerStatus::State, int> states;
  int series = 0;
  for (const v1::WorkerStatus& worker : job.workers()) {
    ++states[worker.state()];
    if (worker.state() != v1::WorkerStatus::STATE_ACTIVE || ++series > kMostWorkerSeries) continue;
    const Labels both = {{"job", job.job()}, {"worker", worker.worker()}};
    page.Gauge("bmuf_worker_block_seconds", "Time the worker's last block took to train.",
               Seconds(worker.last_block().block_time()), both);
    page.Counter("bmuf_worker_contributions_total", "Rounds the worker contributed to.",
                 static_cast<double>(worker.contributions()), both);
  }
  for (int state = v1::WorkerStatus::STATE_ACTIVE; state <= v1::WorkerStatus::STATE_EVICTED; ++state) {
    const auto s = static_cast<v1::WorkerStatus::State>(state);
    page.Gauge("bmuf_job_workers", "Workers, present or remembered.", states[s],
               {{"job", job.job()}, {"state", StateName(s)}});
  }
  for (const auto& [name, value] : job.counters()) {
    page.Counter("bmuf_" + name, "See server/engine/engine.h.", static_cast<double>(value), label);
  }
}

}  // namespace

Metrics::Metrics()
    : calls_(prometheus::BuildCounter().Name("bmuf_calls_total").Help("Calls that ended.").Register(registry_)),
      payload_(prometheus::BuildCounter()
                   .Name("bmuf_payload_bytes_total")
                   .Help("Payload bytes of pushes received and of models sent.")
                   .Register(registry_)),
      received_(payload_.Add({{"direction", "in"}})),
      sent_(payload_.Add({{"direction", "out"}})) {}

void Metrics::CountCall(const char* method, int code) {
  calls_.Add({{"method", method}, {"code", CodeName(code)}}).Increment();
}

std::string Metrics::Render(const v1::GetStatusResponse& status, uint64_t open_calls,
                            uint64_t log_lines_dropped) const {
  Page page;
  page.Gauge("bmuf_build_info", "Always 1.", 1, {{"build", status.build()}, {"kernels", status.kernels()}});
  page.Gauge("bmuf_coordinator_epoch", "Life of the coordinator.", static_cast<double>(status.epoch()));
  page.Gauge("bmuf_uptime_seconds", "Time since start.", Seconds(status.uptime()));
  page.Gauge("bmuf_draining", "1 while the daemon drains.", status.draining() ? 1 : 0);
  page.Gauge("bmuf_open_calls", "Calls that are open.", static_cast<double>(open_calls));
  page.Counter("bmuf_log_lines_dropped_total", "Log lines lost because nobody took them.",
               static_cast<double>(log_lines_dropped));
  const auto slow = status.counters().find("transfers_too_slow_total");
  page.Counter("bmuf_transfers_too_slow_total", "Transfers ended for lack of progress.",
               slow == status.counters().end() ? 0 : static_cast<double>(slow->second));
  for (const v1::JobStatus& job : status.jobs()) AddJob(job, page);
  std::vector<prometheus::MetricFamily> all = registry_.Collect();
  for (prometheus::MetricFamily& family : page.Take()) all.push_back(std::move(family));
  return prometheus::TextSerializer().Serialize(all);
}

std::string StatusPage(const v1::GetStatusResponse& status) {
  std::string page =
      absl::StrCat("bmuf-coordinator ", status.build(), ", epoch ", status.epoch(), ", kernels ", status.kernels(),
                   ", listening on ", status.listen(), status.draining() ? ", draining" : "", "\n");
  for (const v1::JobStatus& job : status.jobs()) {
    absl::StrAppend(&page, "\njob ", job.job(), ": ", StateName(job.state()), ", version ", job.version(), ", ",
                    job.model_bytes(), " bytes\n  ", job.round().reason(), "\n");
    int listed = 0;
    for (const v1::WorkerStatus& worker : job.workers()) {
      if (++listed > 100) {
        absl::StrAppend(&page, "  ... and ", job.workers_size() - 100, " more\n");
        break;
      }
      absl::StrAppendFormat(&page, "  %-24s %-8s silent %.1fs, %d contributions\n", worker.worker(),
                            StateName(worker.state()), Seconds(worker.silent_for()), worker.contributions());
    }
  }
  return page;
}

}  // namespace bmuf::ops
