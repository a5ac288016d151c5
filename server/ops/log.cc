#include "server/ops/log.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"
#include "spdlog/async_logger.h"
#include "spdlog/details/thread_pool.h"
#include "spdlog/sinks/base_sink.h"

namespace bmuf::ops {
namespace {

constexpr absl::Duration kFlushTime = absl::Seconds(1);
constexpr absl::Duration kWindow = absl::Seconds(1);

const char* Name(Log::Level level) {
  switch (level) {
    case Log::Level::kTrace:
      return "trace";
    case Log::Level::kDebug:
      return "debug";
    case Log::Level::kInfo:
      return "info";
    case Log::Level::kWarning:
      return "warn";
    case Log::Level::kError:
      return "error";
  }
  return "info";
}

// Writes lines to a file descriptor and counts them.
class DescriptorSink : public spdlog::sinks::base_sink<std::mutex> {
 public:
  explicit DescriptorSink(int fd) : fd_(fd) {}

  // False if it did not come to `count` in time.
  bool WaitWritten(uint64_t count, absl::Duration timeout) {
    absl::MutexLock lock(&count_mu_);
    const auto enough = [this, count]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(count_mu_) { return written_ >= count; };
    return count_mu_.AwaitWithTimeout(absl::Condition(&enough), timeout);
  }

 protected:
  void sink_it_(const spdlog::details::log_msg& msg) override {
    std::string line(msg.payload.data(), msg.payload.size());
    line.push_back('\n');
    for (size_t done = 0; done < line.size();) {
      const ssize_t n = ::write(fd_, line.data() + done, line.size() - done);
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) break;  // Nobody reads any more: there is no other place to complain.
      done += static_cast<size_t>(n);
    }
    absl::MutexLock lock(&count_mu_);
    ++written_;
  }
  void flush_() override {}

 private:
  const int fd_;
  absl::Mutex count_mu_;
  uint64_t written_ ABSL_GUARDED_BY(count_mu_) = 0;
};

}  // namespace

class Log::Writer {
 public:
  Writer(size_t queue_lines, int fd)
      : sink_(std::make_shared<DescriptorSink>(fd)),
        pool_(std::make_shared<spdlog::details::thread_pool>(queue_lines, 1)),
        logger_(std::make_shared<spdlog::async_logger>("bmuf", sink_, pool_,
                                                       spdlog::async_overflow_policy::overrun_oldest)) {
    logger_->set_level(spdlog::level::trace);
  }

  void Put(const std::string& line) {
    posted_.fetch_add(1);
    logger_->log(spdlog::level::info, spdlog::string_view_t(line.data(), line.size()));
  }

  uint64_t dropped() const { return pool_->overrun_counter(); }

  // True if everything was written, so that its thread can be joined.
  bool Drain() {
    const uint64_t posted = posted_.load();
    return sink_->WaitWritten(posted - std::min<uint64_t>(posted, dropped()), kFlushTime);
  }

 private:
  const std::shared_ptr<DescriptorSink> sink_;
  const std::shared_ptr<spdlog::details::thread_pool> pool_;
  const std::shared_ptr<spdlog::async_logger> logger_;
  std::atomic<uint64_t> posted_{0};
};

absl::StatusOr<std::unique_ptr<Log>> Log::Create(Options options, const Clock& clock) {
  for (Level level : {Level::kTrace, Level::kDebug, Level::kInfo, Level::kWarning, Level::kError}) {
    if (options.level == Name(level)) return std::unique_ptr<Log>(new Log(std::move(options), level, clock));
  }
  return absl::InvalidArgumentError(
      absl::StrCat("log_level is \"", options.level, "\", not one of trace, debug, info, warn, error"));
}

Log::Log(Options options, Level level, const Clock& clock)
    : options_(std::move(options)),
      level_(level),
      clock_(clock),
      writer_(std::make_shared<Writer>(options_.queue_lines, options_.fd)) {}

Log::~Log() {
  if (writer_->Drain()) return;
  // If the reader hangs, joining the writer's thread hangs with it: another thread waits for that, or for the process's
  // end.
  std::thread([writer = std::move(writer_)]() mutable { writer.reset(); }).detach();
}

bool Log::Flush() { return writer_->Drain(); }

uint64_t Log::dropped_lines() const { return writer_->dropped(); }

std::string Log::Format(const Line& line, absl::Time wall_now, bool json) {
  if (json) {
    nlohmann::ordered_json object;
    object["time"] = absl::FormatTime("%Y-%m-%dT%H:%M:%E3SZ", wall_now, absl::UTCTimeZone());
    object["level"] = Name(line.level);
    if (!line.job.empty()) {
      object["job"] = line.job;
      object["round"] = line.round;
    }
    if (!line.worker.empty()) object["worker"] = line.worker;
    if (!line.reason.empty()) object["reason"] = line.reason;
    object["message"] = line.text;
    return object.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
  }
  std::string text =
      absl::StrCat(absl::FormatTime("%H:%M:%E3S", wall_now, absl::LocalTimeZone()), " ",
                   Name(line.level)[0] == 'w' || Name(line.level)[0] == 'e' ? absl::StrCat(Name(line.level), " ") : "");
  if (!line.job.empty()) {
    absl::StrAppend(&text, "[", line.job, " ", line.round, line.worker.empty() ? "" : " ", line.worker, "] ");
  }
  return absl::StrCat(text, line.text);
}

void Log::Put(const Line& line) { writer_->Put(Format(line, clock_.WallNow(), options_.json)); }

void Log::Write(const Line& line) {
  if (line.level < level_) return;
  if (line.reason.empty()) return Put(line);
  uint64_t left_out = 0;
  {
    absl::MutexLock lock(&mu_);
    const MonotonicTime now = clock_.Now();
    Window& window = windows_[line.reason];
    if (window.written == 0 || now - window.began >= kWindow) {
      left_out = std::exchange(window.left_out, 0);
      window.began = now;
      window.written = 0;
    }
    if (window.written >= kMostPerSecond) {
      ++window.left_out;
      return;
    }
    ++window.written;
  }
  if (left_out > 0) {
    Line summary;
    summary.level = line.level;
    summary.reason = line.reason;
    summary.text = absl::StrCat(left_out, " more lines about ", line.reason, " were left out");
    Put(summary);
  }
  Put(line);
}

}  // namespace bmuf::ops
