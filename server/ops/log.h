// The daemon's log: one line per event, for people on a terminal, JSON for machines.
//
// Problem: a full pipe behind stderr must not stop the daemon, and a misbehaving peer must not fill the log.
// Idea: lines go into a bounded queue that a thread of its own writes out; if that thread hangs, the oldest lines are
// dropped and counted. Lines with a reason are limited per reason; what was left out is summed up in one line.
// Usage:
//   ASSIGN_OR_RETURN(auto log, Log::Create({.level = "info", .json = true}));
//   log->Write({Log::Level::kInfo, "lm", 7, "w3", "worker w3 joined"});
#ifndef BMUF_SERVER_OPS_LOG_H_
#define BMUF_SERVER_OPS_LOG_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "core/base/clock.h"

namespace bmuf::ops {

// Thread-safe. Write never waits for the disk or the terminal.
class Log {
 public:
  enum class Level { kTrace, kDebug, kInfo, kWarning, kError };
  // A line. What peers contributed to it is escaped.
  struct Line {
    Level level = Level::kInfo;
    std::string job;     // May be empty.
    uint64_t round = 0;  // Shown with a job.
    std::string worker;  // May be empty.
    std::string text;
    std::string reason;  // May be empty; else at most kMostPerSecond lines of it a second.
  };
  static constexpr int kMostPerSecond = 10;

  struct Options {
    std::string level = "info";  // "trace", "debug", "info", "warn", "error".
    bool json = true;
    size_t queue_lines = 8192;
    int fd = 2;  // Not closed.
  };

  // Errors: InvalidArgument for an unknown level. `clock` outlives the log.
  static absl::StatusOr<std::unique_ptr<Log>> Create(Options options, const Clock& clock);
  // Waits up to a second for what is queued to be written; what the reader does not take by then is lost.
  ~Log();

  void Write(const Line& line) ABSL_LOCKS_EXCLUDED(mu_);
  // Waits up to a second for what was written so far. False if nobody takes it.
  bool Flush();
  // Lines lost because nobody took them.
  uint64_t dropped_lines() const;

  // A line without its end, as Write would print it. Exposed for tests.
  static std::string Format(const Line& line, absl::Time wall_now, bool json);

 private:
  struct Window {
    MonotonicTime began;
    int written = 0;
    uint64_t left_out = 0;
  };
  class Writer;

  Log(Options options, Level level, const Clock& clock);
  void Put(const Line& line);

  const Options options_;
  const Level level_;
  const Clock& clock_;
  std::shared_ptr<Writer> writer_;  // Constant until the end.

  absl::Mutex mu_;
  std::map<std::string, Window> windows_ ABSL_GUARDED_BY(mu_);  // By reason: a closed set.
};

}  // namespace bmuf::ops

#endif  // BMUF_SERVER_OPS_LOG_H_
