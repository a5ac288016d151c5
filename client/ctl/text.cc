#include "client/ctl/text.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"

namespace bmuf::ctl {
namespace {

absl::Duration ToDuration(const google::protobuf::Duration& d) {
  return absl::Seconds(d.seconds()) + absl::Nanoseconds(d.nanos());
}

std::string Without(const std::string& name, const char* prefix) {
  return std::string(absl::StripPrefix(name, prefix));
}

std::string Metric(const v1::RoundRecord& record, const std::string& name, const char* format) {
  double mean = 0;
  if (!MeanMetric(record, name, &mean)) return "-";
  return absl::StrFormat("%.*f", format[0] - '0', mean);
}

}  // namespace

std::string Table::ToString() const {
  std::vector<size_t> width(rows_[0].size());
  for (const auto& row : rows_) {
    for (size_t i = 0; i < row.size(); ++i) width[i] = std::max(width[i], row[i].size());
  }
  std::string text;
  for (const auto& row : rows_) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) {
      absl::StrAppend(&line, row[i]);
      if (i + 1 < row.size()) line.append(width[i] - row[i].size() + 2, ' ');
    }
    absl::StrAppend(&text, line, "\n");
  }
  return text;
}

std::string Short(absl::Duration d) {
  if (d < absl::ZeroDuration()) d = absl::ZeroDuration();
  if (d < absl::Seconds(1)) return absl::StrFormat("%dms", absl::ToInt64Milliseconds(d));
  const double seconds = absl::ToDoubleSeconds(d);
  if (seconds < 60) return absl::StrFormat("%.1fs", seconds);
  const int64_t whole = absl::ToInt64Seconds(d);
  if (whole < 3600) return absl::StrFormat("%dm%02ds", whole / 60, whole % 60);
  if (whole < 86400) return absl::StrFormat("%dh%02dm", whole / 3600, whole / 60 % 60);
  return absl::StrFormat("%dd%02dh", whole / 86400, whole / 3600 % 24);
}

std::string Short(const google::protobuf::Duration& d) { return Short(ToDuration(d)); }

std::string Bytes(uint64_t bytes) {
  if (bytes < 1024) return absl::StrCat(bytes, " B");
  double value = static_cast<double>(bytes);
  const char* const kUnits[] = {"KiB", "MiB", "GiB", "TiB"};
  int unit = -1;
  while (value >= 1024 && unit < 3) {
    value /= 1024;
    ++unit;
  }
  return absl::StrFormat("%.1f %s", value, kUnits[unit]);
}

std::string Name(v1::JobState state) { return Without(v1::JobState_Name(state), "JOB_STATE_"); }
std::string Name(v1::RoundPhase phase) { return Without(v1::RoundPhase_Name(phase), "ROUND_PHASE_"); }
std::string Name(v1::Variant variant) { return Without(v1::Variant_Name(variant), "VARIANT_"); }
std::string Name(v1::WorkerStatus::State state) { return Without(v1::WorkerStatus::State_Name(state), "STATE_"); }
std::string Name(v1::WorkerStatus::Part part) { return Without(v1::WorkerStatus::Part_Name(part), "PART_"); }

std::string JobsTable(const v1::ListJobsResponse& jobs) {
  Table table({"JOB", "STATE", "ROUND", "VERSION", "VARIANT", "BLOCK LR", "BLOCK MOMENTUM", "REASON"});
  for (const v1::Job& job : jobs.jobs()) {
    const v1::OuterOptimizer& outer = job.config().outer();
    table.Add({job.name(), Name(job.state()), absl::StrCat(job.round()), absl::StrCat(job.version()),
               Name(outer.variant()), absl::StrCat(outer.block_learning_rate()),
               outer.has_block_momentum() ? absl::StrCat(outer.block_momentum()) : "auto", job.state_reason()});
  }
  return table.ToString();
}

std::string DaemonText(const v1::GetStatusResponse& status) {
  return absl::StrCat("bmuf-coordinator ", status.build(), " at ", status.listen(), ", epoch ", status.epoch(), ", up ",
                      Short(status.uptime()), ", kernels ", status.kernels(), status.draining() ? ", DRAINING" : "",
                      "\n");
}

std::string StatusText(const v1::JobStatus& status) {
  const v1::RoundStatus& round = status.round();
  std::string text = absl::StrCat("job ", status.job(), ": ", Name(status.state()));
  if (!status.state_reason().empty()) absl::StrAppend(&text, " (", status.state_reason(), ")");
  absl::StrAppend(&text, ", ",
                  status.has_model() ? absl::StrCat("version ", status.version(), " of ", Bytes(status.model_bytes()))
                                     : "no model yet",
                  absl::StrFormat(", block learning rate %g, block momentum %g", status.block_learning_rate(),
                                  status.block_momentum()),
                  ", ", status.total_samples(), " samples\n");
  absl::StrAppend(&text, "round ", round.round(),
                  round.attempt() > 1 ? absl::StrCat(", attempt ", round.attempt()) : "", ": ", Name(round.phase()),
                  ", have ", round.have(), " of ", round.expected(), " (need ", round.need(), "), open for ",
                  Short(round.open_for()), "\n");
  if (!round.reason().empty()) absl::StrAppend(&text, "  ", round.reason(), "\n");
  if (round.has_deadline()) {
    const absl::Time deadline = absl::FromUnixSeconds(round.deadline().seconds());
    absl::StrAppend(&text, "  next deadline at ", absl::FormatTime("%H:%M:%S", deadline, absl::LocalTimeZone()),
                    ", in ", Short(round.time_to_deadline()), "\n");
  }
  if (status.workers().empty()) return text;
  Table table({"WORKER", "STATE", "PART", "UPLOAD", "STEPS", "SILENT", "ROUNDS", "REFUSED", "LAST BLOCK"});
  for (const v1::WorkerStatus& worker : status.workers()) {
    const std::string upload =
        worker.total_bytes() == 0
            ? "-"
            : absl::StrFormat("%d%%", static_cast<int>(100.0 * static_cast<double>(worker.received_bytes()) /
                                                       static_cast<double>(worker.total_bytes())));
    table.Add({worker.worker(), Name(worker.state()), Name(worker.part()), upload, absl::StrCat(worker.steps_done()),
               Short(worker.silent_for()), absl::StrCat(worker.contributions()), absl::StrCat(worker.rejected()),
               worker.has_last_block() ? Short(worker.last_block().block_time()) : "-"});
  }
  absl::StrAppend(&text, table.ToString());
  return text;
}

bool MeanMetric(const v1::RoundRecord& record, const std::string& name, double* mean) {
  double sum = 0, weight = 0;
  for (const v1::Contribution& part : record.contributions()) {
    const auto it = part.facts().metrics().find(name);
    if (it == part.facts().metrics().end() || !std::isfinite(it->second)) continue;
    sum += part.weight() * it->second;
    weight += part.weight();
  }
  if (weight <= 0) return false;
  *mean = sum / weight;
  return true;
}

std::string RoundsTable(const v1::ListRoundsResponse& rounds) {
  Table table({"ROUND", "CONTRIBUTORS", "WEIGHT", "VARIANT", "BLOCK LR", "BLOCK MOMENTUM", "|MEAN|", "LOSS", "ACCURACY",
               "TOOK", "DIGEST", "CLOSED BECAUSE"});
  for (const v1::RoundRecord& r : rounds.rounds()) {
    table.Add({absl::StrCat(r.round()), absl::StrCat(r.contributions_size(), " of ", r.expected()),
               absl::StrFormat("%g", r.total_weight()), Name(r.variant()),
               absl::StrFormat("%g", r.block_learning_rate()), absl::StrFormat("%g", r.block_momentum()),
               absl::StrFormat("%.4g", r.mean_norm()), Metric(r, "loss", "4"), Metric(r, "accuracy", "4"),
               Short(r.duration()), absl::StrFormat("%08x", r.model_digest()), r.reason()});
  }
  return table.ToString();
}

std::string RoundLine(const v1::RoundRecord& record) {
  std::string line =
      absl::StrCat("round ", record.round(), " committed: ", record.contributions_size(), " of ", record.expected());
  double mean = 0;
  if (MeanMetric(record, "loss", &mean)) absl::StrAppendFormat(&line, ", loss %.4f", mean);
  if (MeanMetric(record, "accuracy", &mean)) absl::StrAppendFormat(&line, ", accuracy %.4f", mean);
  absl::StrAppend(&line, ", ", Short(record.duration()), " (", record.reason(), ")");
  return line;
}

std::string ProgressLine(const v1::JobStatus& status, int width) {
  const v1::RoundStatus& round = status.round();
  // Bytes count only where they are known; a folded delta counts whole.
  double done = round.have();
  for (const v1::AwaitedWorker& worker : round.awaited()) {
    if (worker.total_bytes() > 0) {
      done += static_cast<double>(worker.received_bytes()) / static_cast<double>(worker.total_bytes());
    }
  }
  const double fraction = round.expected() == 0 ? 0 : std::min(1.0, done / round.expected());
  constexpr int kBar = 20;
  const int filled = static_cast<int>(fraction * kBar);
  std::string line =
      absl::StrCat("round ", round.round(), " [", std::string(filled, '#'), std::string(kBar - filled, '.'), "] ",
                   round.have(), "/", round.expected(), " ", round.reason());
  if (static_cast<int>(line.size()) > width) line = line.substr(0, std::max(0, width));
  return line;
}

}  // namespace bmuf::ctl
