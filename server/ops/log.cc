#include "server/ops/log.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "nlohmann/json.hpp"
#include "spdlog/sinks/stdout_sinks.h"

namespace bmuf::ops {
namespace {

constexpr size_t kQueuedLines = 8192;
constexpr int kLinesPerReasonAndSecond = 10;

char Letter(spdlog::level::level_enum level) {
  switch (level) {
    case spdlog::level::trace:
      return 'T';
    case spdlog::level::debug:
      return 'D';
    case spdlog::level::warn:
      return 'W';
    case spdlog::level::err:
    case spdlog::level::critical:
      return 'E';
    default:
      return 'I';
  }
}

}  // namespace

std::string FormatText(const LogLine& line, absl::Time now) {
  std::string text = absl::FormatTime("%H:%M:%E3S ", now, absl::LocalTimeZone());
  text += Letter(line.level);
  absl::StrAppend(&text, " ", line.text);
  if (!line.job.empty()) absl::StrAppend(&text, "  job=", line.job);
  if (line.round > 0) absl::StrAppend(&text, " round=", line.round);
  if (!line.worker.empty()) absl::StrAppend(&text, " worker=", line.worker);
  if (!line.reason.empty()) absl::StrAppend(&text, " reason=", line.reason);
  return text;
}

std::string FormatJson(const LogLine& line, absl::Time now) {
  nlohmann::ordered_json json;
  json["time"] = absl::FormatTime("%Y-%m-%dT%H:%M:%E3SZ", now, absl::UTCTimeZone());
  const auto level = spdlog::level::to_string_view(line.level);
  json["level"] = std::string(level.data(), level.size());
  json["text"] = line.text;
  if (!line.job.empty()) json["job"] = line.job;
  if (line.round > 0) json["round"] = line.round;
  if (!line.worker.empty()) json["worker"] = line.worker;
  if (!line.reason.empty()) json["reason"] = line.reason;
  return json.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

absl::StatusOr<std::unique_ptr<Log>> Log::Create(const Options& options, const Clock& clock, spdlog::sink_ptr sink) {
  const auto level = spdlog::level::from_str(options.level);
  // from_str says "off" for what it does not know.
  if (level == spdlog::level::off) {
    return absl::InvalidArgumentError(
        absl::StrCat("log level \"", options.level, "\" is not trace, debug, info, warn or error"));
  }
  if (sink == nullptr) sink = std::make_shared<spdlog::sinks::stderr_sink_mt>();
  std::unique_ptr<Log> log(new Log(options.json, clock));
  log->thread_ = std::make_shared<spdlog::details::thread_pool>(kQueuedLines, 1);
  log->logger_ = std::make_shared<spdlog::async_logger>("bmuf", std::move(sink), log->thread_,
                                                        spdlog::async_overflow_policy::overrun_oldest);
  log->logger_->set_pattern("%v");
  log->logger_->set_level(level);
  log->logger_->flush_on(spdlog::level::info);
  return log;
}

Log::~Log() = default;

bool Log::Admit(const LogLine& line, uint64_t* left_out) {
  *left_out = 0;
  if (line.reason.empty()) return true;
  Budget& budget = budgets_[line.reason];
  const MonotonicTime now = clock_.Now();
  if (budget.written == 0 || now - budget.second_began >= absl::Seconds(1)) {
    *left_out = budget.left_out;
    budget = Budget{now, 0, 0};
  }
  if (budget.written >= kLinesPerReasonAndSecond) {
    ++budget.left_out;
    return false;
  }
  ++budget.written;
  return true;
}

void Log::Emit(const LogLine& line) {
  const absl::Time now = clock_.WallNow();
  const std::string text = json_ ? FormatJson(line, now) : FormatText(line, now);
  logger_->log(line.level, spdlog::string_view_t(text.data(), text.size()));
}

void Log::Write(const LogLine& line) {
  if (!logger_->should_log(line.level)) return;
  uint64_t left_out = 0;
  {
    absl::MutexLock lock(&mu_);
    if (!Admit(line, &left_out)) return;
  }
  if (left_out > 0) {
    LogLine summary;
    summary.level = line.level;
    summary.reason = line.reason;
    summary.text = absl::StrCat(left_out, " more lines of this kind were left out");
    Emit(summary);
  }
  Emit(line);
}

}  // namespace bmuf::ops
