#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <sstream>
#include <string>

#include "core/base/clock.h"
#include "gtest/gtest.h"
#include "server/ops/http_server.h"
#include "server/ops/log.h"
#include "server/ops/metrics.h"
#include "spdlog/sinks/ostream_sink.h"

namespace bmuf::ops {
namespace {

LogLine Line(const std::string& text, const std::string& reason = "") {
  LogLine line;
  line.text = text;
  line.job = "lm";
  line.round = 7;
  line.worker = "w3";
  line.reason = reason;
  return line;
}

TEST(LogTest, EveryLineNamesJobRoundAndWorker) {
  const absl::Time time = absl::FromUnixSeconds(1'700'000'000);
  EXPECT_NE(FormatText(Line("joined"), time).find("I joined  job=lm round=7 worker=w3"), std::string::npos);
  EXPECT_EQ(FormatJson(Line("said \"hi\""), time),
            R"({"time":"2023-11-14T22:13:20.000Z","level":"info","text":"said \"hi\"","job":"lm","round":7,"worker":"w3"})");
}

TEST(LogTest, ManyLinesOfOneReasonBecomeACount) {
  std::ostringstream out;
  ManualClock clock;
  {
    auto log = Log::Create({"info", false}, clock, std::make_shared<spdlog::sinks::ostream_sink_mt>(out));
    ASSERT_TRUE(log.ok());
    for (int i = 0; i < 1000; ++i) (*log)->Write(Line("bad", "BAD_CHUNK"));
    (*log)->Write(Line("another", "STALE_ROUND"));
    clock.Advance(absl::Seconds(2));
    (*log)->Write(Line("bad", "BAD_CHUNK"));
    LogLine quiet = Line("quiet");
    quiet.level = spdlog::level::debug;
    (*log)->Write(quiet);
  }
  const std::string text = out.str();
  size_t lines = 0;
  for (char c : text) lines += c == '\n';
  EXPECT_EQ(lines, 10u + 1 + 2) << text;
  EXPECT_NE(text.find("990 more lines"), std::string::npos) << text;
  EXPECT_EQ(text.find("quiet"), std::string::npos);
}

TEST(LogTest, RefusesAnUnknownLevel) { EXPECT_FALSE(Log::Create({"loud", false}, Clock::Real()).ok()); }

TEST(MetricsTest, NamesWhatOperatorsAlertOn) {
  v1::GetStatusResponse status;
  status.set_epoch(3);
  v1::JobStatus* job = status.add_jobs();
  job->set_job("lm");
  job->set_state(v1::JOB_STATE_RUNNING);
  (*job->mutable_counters())["workers_expired_total"] = 1;
  job->mutable_last_commit()->mutable_committed_at()->set_seconds(1'700'000'000);
  v1::WorkerStatus* worker = job->add_workers();
  worker->set_worker("w3");
  worker->set_state(v1::WorkerStatus::STATE_ACTIVE);
  worker->set_rejected(2);
  const std::string text = MetricsText(status);
  for (const char* line :
       {"bmuf_workers_expired_total{job=\"lm\"} 1", "bmuf_last_commit_timestamp_seconds{job=\"lm\"} 1700000000",
        "bmuf_worker_rejected_total{job=\"lm\",worker=\"w3\"} 2", "bmuf_job_state{job=\"lm\",state=\"RUNNING\"} 1",
        "bmuf_workers{job=\"lm\",state=\"ACTIVE\"} 1", "bmuf_epoch 3"}) {
    EXPECT_NE(text.find(line), std::string::npos) << line << " in\n" << text;
  }
}

std::string Get(const std::string& address, const std::string& path) {
  const size_t colon = address.rfind(':');
  addrinfo hints = {}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  getaddrinfo(address.substr(0, colon).c_str(), address.substr(colon + 1).c_str(), &hints, &found);
  const int fd = socket(found->ai_family, SOCK_STREAM, 0);
  std::string answer;
  if (connect(fd, found->ai_addr, found->ai_addrlen) == 0) {
    const std::string request = "GET " + path + " HTTP/1.0\r\n\r\n";
    (void)!write(fd, request.data(), request.size());
    char buffer[4096];
    for (ssize_t n; (n = read(fd, buffer, sizeof(buffer))) > 0;) answer.append(buffer, n);
  }
  close(fd);
  freeaddrinfo(found);
  return answer;
}

TEST(HttpServerTest, AnswersItsPathsAndNoOthers) {
  auto server = HttpServer::Start("127.0.0.1:0", {{"/metrics", [] { return HttpAnswer{200, "text/plain", "m 1\n"}; }}});
  ASSERT_TRUE(server.ok()) << server.status();
  EXPECT_NE(Get((*server)->address(), "/metrics").find("m 1\n"), std::string::npos);
  EXPECT_NE(Get((*server)->address(), "/metrics").find("200"), std::string::npos);
  EXPECT_NE(Get((*server)->address(), "/etc/passwd").find("404"), std::string::npos);
  auto second = HttpServer::Start((*server)->address(), {});
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(HttpServer::Start("nonsense", {}).status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace bmuf::ops
