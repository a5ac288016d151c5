#include "server/ops/metrics.h"

#include <map>
#include <utility>
#include <vector>

#include "prometheus/metric_family.h"
#include "prometheus/text_serializer.h"

namespace bmuf::ops {
namespace {

using Labels = std::vector<std::pair<std::string, std::string>>;

double Seconds(const google::protobuf::Duration& d) {
  return static_cast<double>(d.seconds()) + static_cast<double>(d.nanos()) / 1e9;
}

// Families by name, in the order of their names.
class Families {
 public:
  void Gauge(const std::string& name, const std::string& help, const Labels& labels, double value) {
    prometheus::ClientMetric& metric = Add(name, help, prometheus::MetricType::Gauge, labels);
    metric.gauge.value = value;
  }
  void Counter(const std::string& name, const std::string& help, const Labels& labels, double value) {
    prometheus::ClientMetric& metric = Add(name, help, prometheus::MetricType::Counter, labels);
    metric.counter.value = value;
  }
  std::string Text() const {
    std::vector<prometheus::MetricFamily> all;
    for (const auto& [name, family] : families_) all.push_back(family);
    return prometheus::TextSerializer().Serialize(all);
  }

 private:
  prometheus::ClientMetric& Add(const std::string& name, const std::string& help, prometheus::MetricType type,
                                const Labels& labels) {
    prometheus::MetricFamily& family = families_[name];
    family.name = name;
    family.help = help;
    family.type = type;
    family.metric.emplace_back();
    for (const auto& [key, value] : labels) family.metric.back().label.push_back({key, value});
    return family.metric.back();
  }

  std::map<std::string, prometheus::MetricFamily> families_;
};

void AddJob(const v1::JobStatus& job, Families& out) {
  const Labels labels = {{"job", job.job()}};
  const auto with = [&](const char* key, const std::string& value) {
    Labels more = labels;
    more.emplace_back(key, value);
    return more;
  };
  for (const auto& [name, value] : job.counters()) {
    out.Counter("bmuf_" + name, "See server/engine/engine.h.", labels, static_cast<double>(value));
  }
  const v1::RoundStatus& round = job.round();
  out.Gauge("bmuf_round", "The open round.", labels, static_cast<double>(round.round()));
  out.Gauge("bmuf_round_attempt", "Attempt of the open round.", labels, round.attempt());
  out.Gauge("bmuf_version", "Newest published version.", labels, static_cast<double>(job.version()));
  for (int state = v1::JOB_STATE_INITIALIZING; state <= v1::JOB_STATE_FAILED; ++state) {
    const std::string name = v1::JobState_Name(static_cast<v1::JobState>(state)).substr(sizeof("JOB_STATE_") - 1);
    out.Gauge("bmuf_job_state", "1 for the state the job is in.", with("state", name), job.state() == state ? 1 : 0);
  }
  out.Gauge("bmuf_round_open_seconds", "Time since the open round started.", labels, Seconds(round.open_for()));
  out.Gauge("bmuf_round_have", "Deltas folded in the open round.", labels, round.have());
  out.Gauge("bmuf_round_expected", "Workers expected in the open round.", labels, round.expected());
  out.Gauge("bmuf_round_need", "Contributors needed before a deadline may close the round.", labels, round.need());
  if (job.has_last_commit()) {
    const v1::RoundRecord& last = job.last_commit();
    out.Gauge("bmuf_last_commit_timestamp_seconds", "Wall clock of the newest commit.", labels,
              static_cast<double>(last.committed_at().seconds()));
    out.Gauge("bmuf_last_commit_seconds", "From the last folded delta to publication.", labels,
              Seconds(last.commit_time()));
    out.Gauge("bmuf_last_round_seconds", "From start to commit.", labels, Seconds(last.duration()));
    out.Gauge("bmuf_mean_delta_norm", "L2 norm of the newest mean delta.", labels, last.mean_norm());
  }
  out.Gauge("bmuf_block_learning_rate", "In force.", labels, job.block_learning_rate());
  out.Gauge("bmuf_block_momentum", "In force.", labels, job.block_momentum());
  out.Gauge("bmuf_model_bytes", "Model in bytes of F32.", labels, static_cast<double>(job.model_bytes()));
  out.Gauge("bmuf_total_samples", "Samples committed.", labels, static_cast<double>(job.total_samples()));

  std::map<std::string, int> states = {{"ACTIVE", 0}, {"EXPIRED", 0}, {"LEFT", 0}, {"EVICTED", 0}};
  int series = 0;
  for (const v1::WorkerStatus& worker : job.workers()) {
    ++states[v1::WorkerStatus::State_Name(worker.state()).substr(sizeof("STATE_") - 1)];
    if (worker.state() != v1::WorkerStatus::STATE_ACTIVE || ++series > kMaxWorkerSeries) continue;
    const Labels of_worker = with("worker", worker.worker());
    out.Gauge("bmuf_worker_silent_seconds", "Time since the last sign of life.", of_worker,
              Seconds(worker.silent_for()));
    out.Counter("bmuf_worker_rejected_total", "Pushes refused for their content.", of_worker,
                static_cast<double>(worker.rejected()));
    if (worker.has_last_block()) {
      out.Gauge("bmuf_worker_block_seconds", "Time the last block took to train.", of_worker,
                Seconds(worker.last_block().block_time()));
    }
  }
  for (const auto& [state, count] : states) {
    out.Gauge("bmuf_workers", "Members by state.", with("state", state), count);
  }
}

}  // namespace

std::string MetricsText(const v1::GetStatusResponse& status) {
  Families out;
  out.Gauge("bmuf_up", "1.", {}, 1);
  out.Gauge("bmuf_epoch", "Coordinator epoch.", {}, static_cast<double>(status.epoch()));
  out.Gauge("bmuf_uptime_seconds", "Time since start.", {}, Seconds(status.uptime()));
  out.Gauge("bmuf_draining", "1 while the daemon drains.", {}, status.draining() ? 1 : 0);
  for (const v1::JobStatus& job : status.jobs()) AddJob(job, out);
  return out.Text();
}

}  // namespace bmuf::ops
