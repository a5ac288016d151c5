// Log lines for people on a terminal and for machines elsewhere.
//
// Problem: a log pipe that nobody reads must not stop the daemon, and a peer that errs ten thousand times must not fill
// the disk.
// Idea: lines go through a bounded queue to a thread of their own, the oldest dropped when it is full; lines of one reason
// are limited to ten a second, with a count of what was left out.
#ifndef BMUF_SERVER_OPS_LOG_H_
#define BMUF_SERVER_OPS_LOG_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "core/base/clock.h"
#include "spdlog/async_logger.h"
#include "spdlog/details/thread_pool.h"
#include "spdlog/spdlog.h"

namespace bmuf::ops {

struct LogLine {
  spdlog::level::level_enum level = spdlog::level::info;
  std::string text;  // What peers contributed is escaped already.
  std::string job;
  uint64_t round = 0;
  std::string worker;
  std::string reason;  // Lines with a reason are limited, each reason for itself.
};

// "12:01:05.123 W text  job=lm round=7 worker=w3" or {"time":...,"level":...,"text":...,"job":...}.
std::string FormatText(const LogLine& line, absl::Time now);
std::string FormatJson(const LogLine& line, absl::Time now);

// Thread-safe. Lines that are queued are written before it is gone, unless nobody reads them for a second.
class Log {
 public:
  struct Options {
    std::string level = "info";  // trace, debug, info, warn or error.
    bool json = false;
  };
  // Writes to `sink` (default: standard error). Errors: INVALID_ARGUMENT for an unknown level.
  static absl::StatusOr<std::unique_ptr<Log>> Create(const Options& options, const Clock& clock,
                                                     spdlog::sink_ptr sink = nullptr);
  ~Log();

  // Never blocks on the sink.
  void Write(const LogLine& line) ABSL_LOCKS_EXCLUDED(mu_);

 private:
  Log(bool json, const Clock& clock) : json_(json), clock_(clock) {}
  bool Admit(const LogLine& line, uint64_t* left_out) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Emit(const LogLine& line);

  struct Budget {
    MonotonicTime second_began;
    int written = 0;
    uint64_t left_out = 0;
  };

  const bool json_;
  const Clock& clock_;
  std::shared_ptr<spdlog::details::thread_pool> thread_;
  std::shared_ptr<spdlog::logger> logger_;

  absl::Mutex mu_;
  std::map<std::string, Budget> budgets_ ABSL_GUARDED_BY(mu_);  // By reason: a closed set.
};

}  // namespace bmuf::ops

#endif  // BMUF_SERVER_OPS_LOG_H_
