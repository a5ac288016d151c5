#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "server/ops/http.h"
#include "server/ops/log.h"
#include "server/ops/metrics.h"
#include "server/ops/open_calls.h"

namespace bmuf::ops {
namespace {

using testing::HasSubstr;
using testing::Not;

std::string ReadAll(int fd) {
  std::string all;
  char buffer[4096];
  for (ssize_t n; (n = read(fd, buffer, sizeof(buffer))) > 0;) all.append(buffer, n);
  return all;
}

TEST(LogTest, JsonLinesCarryJobRoundAndWorker) {
  Log::Line line;
  line.job = "lm";
  line.round = 7;
  line.worker = "w3";
  line.text = "said \"hello\"\n\xff";
  const auto parsed = nlohmann::json::parse(Log::Format(line, absl::UnixEpoch(), true));
  EXPECT_EQ(parsed["job"], "lm");
  EXPECT_EQ(parsed["round"], 7);
  EXPECT_EQ(parsed["worker"], "w3");
  EXPECT_EQ(parsed["time"], "1970-01-01T00:00:00.000Z");
  EXPECT_THAT(Log::Format(line, absl::UnixEpoch(), true), Not(HasSubstr("\n")));
}

TEST(LogTest, LinesOfOneReasonAreThinnedOutAndSummedUp) {
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  ManualClock clock;
  {
    auto log = Log::Create({"info", false, 1000, ends[1]}, clock);
    ASSERT_TRUE(log.ok());
    Log::Line line;
    line.reason = "STALE_ROUND";
    line.text = "refused";
    for (int i = 0; i < 25; ++i) (*log)->Write(line);
    clock.Advance(absl::Seconds(1));
    (*log)->Write(line);
    line.level = Log::Level::kDebug;
    (*log)->Write(line);  // Below the level.
  }
  close(ends[1]);
  const std::string text = ReadAll(ends[0]);
  close(ends[0]);
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), Log::kMostPerSecond + 2);
  EXPECT_THAT(text, HasSubstr("15 more lines about STALE_ROUND were left out"));
}

TEST(LogTest, AReaderThatHangsDoesNotHoldUpTheWriter) {
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  ASSERT_GT(fcntl(ends[1], F_SETPIPE_SZ, 4096), 0);
  {
    auto log = Log::Create({"info", true, 16, ends[1]}, Clock::Real());
    Log::Line line;
    line.text = std::string(500, 'x');
    for (int i = 0; i < 200; ++i) (*log)->Write(line);
    EXPECT_GT((*log)->dropped_lines(), 100u);
  }
  // Lets the thread that is stuck in write() go.
  std::signal(SIGPIPE, SIG_IGN);
  close(ends[0]);
}

TEST(LogTest, AnUnknownLevelIsRefused) {
  EXPECT_EQ(Log::Create({"loud", true, 16, 2}, Clock::Real()).status().code(), absl::StatusCode::kInvalidArgument);
}

std::string Get(const std::string& address, const std::string& request) {
  const auto parsed = ParseHostPort(address);
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in to = {};
  to.sin_family = AF_INET;
  to.sin_port = htons(static_cast<uint16_t>(parsed->port));
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  EXPECT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&to), sizeof(to)), 0);
  EXPECT_EQ(write(fd, request.data(), request.size()), static_cast<ssize_t>(request.size()));
  const std::string answer = ReadAll(fd);
  close(fd);
  return answer;
}

TEST(HttpTest, KnownPathsAreServedAndOthersAreNot) {
  auto server = HttpServer::Start("127.0.0.1:0", {{"/healthz",
                                                   [] {
                                                     return HttpAnswer{200, "text/plain", "ok\n"};
                                                   }},
                                                  {"/readyz", [] {
                                                     return HttpAnswer{503, "text/plain", "no\n"};
                                                   }}});
  ASSERT_TRUE(server.ok()) << server.status();
  const std::string address = (*server)->address();
  EXPECT_THAT(Get(address, "GET /healthz?x=1 HTTP/1.0\r\n\r\n"), HasSubstr("200 OK"));
  EXPECT_THAT(Get(address, "GET /readyz HTTP/1.0\r\n\r\n"), HasSubstr("503"));
  EXPECT_THAT(Get(address, "GET /etc/passwd HTTP/1.0\r\n\r\n"), HasSubstr("404"));
  EXPECT_THAT(Get(address, "POST /healthz HTTP/1.0\r\nContent-Length: 1\r\n\r\nx"), Not(HasSubstr("200 OK")));
  const auto taken = HttpServer::Start(address, {});
  EXPECT_THAT(std::string(taken.status().message()), HasSubstr(address));
}

TEST(HttpTest, AddressesAreTakenApart) {
  EXPECT_EQ(ParseHostPort("[::1]:80")->host, "::1");
  EXPECT_EQ(ParseHostPort("0.0.0.0:65535")->port, 65535);
  for (const char* bad : {"nowhere", ":1", "a:", "a:65536", "a:-1", "::1:80", "a:x", ""}) {
    EXPECT_FALSE(ParseHostPort(bad).ok()) << bad;
  }
  for (const char* host : {"127.0.0.1", "127.9.9.9", "::1", "localhost"}) EXPECT_TRUE(IsLoopback(host)) << host;
  for (const char* host : {"0.0.0.0", "::", "10.0.0.1", "example.org"}) EXPECT_FALSE(IsLoopback(host)) << host;
}

TEST(MetricsTest, ThePageNamesJobsCountersAndCalls) {
  Metrics metrics;
  metrics.CountCall("Join", 0);
  metrics.CountCall("Join", 9);
  metrics.CountReceived(100);
  v1::GetStatusResponse status;
  v1::JobStatus* job = status.add_jobs();
  job->set_job("lm");
  job->set_state(v1::JOB_STATE_RUNNING);
  (*job->mutable_counters())["rounds_committed_total"] = 3;
  job->mutable_last_commit()->mutable_committed_at()->set_seconds(1000);
  v1::WorkerStatus* worker = job->add_workers();
  worker->set_worker("w0");
  worker->set_state(v1::WorkerStatus::STATE_ACTIVE);
  const std::string page = metrics.Render(status, 4, 5);
  EXPECT_THAT(page, HasSubstr("bmuf_rounds_committed_total{job=\"lm\"} 3"));
  EXPECT_THAT(page, HasSubstr("bmuf_job_state{job=\"lm\",state=\"running\"} 1"));
  EXPECT_THAT(page, HasSubstr("bmuf_job_last_commit_timestamp_seconds{job=\"lm\"} 1000"));
  EXPECT_THAT(page, HasSubstr("bmuf_worker_contributions_total{job=\"lm\",worker=\"w0\"} 0"));
  EXPECT_THAT(page, HasSubstr("code=\"FAILED_PRECONDITION\""));
  EXPECT_THAT(page, HasSubstr("bmuf_payload_bytes_total{direction=\"in\"} 100"));
  EXPECT_THAT(page, HasSubstr("bmuf_log_lines_dropped_total 5"));
  EXPECT_THAT(StatusPage(status), HasSubstr("job lm: running"));
}

TEST(OpenCallsTest, ACallIsListedAsLongAsItsTicketLives) {
  OpenCalls calls;
  auto first = calls.Open({"Join", "ipv4:127.0.0.1:1", MonotonicTime(), absl::Seconds(1)});
  auto second = calls.Open({"Leave", "", MonotonicTime(), absl::InfiniteDuration()});
  EXPECT_EQ(calls.List(10).size(), 2u);
  EXPECT_EQ(calls.List(1)[0].method, std::string("Join"));
  first.reset();
  EXPECT_EQ(calls.size(), 1u);
  EXPECT_EQ(calls.opened(), 2u);
  EXPECT_FALSE(calls.WaitUntilNone(absl::ZeroDuration()));
  second.reset();
  EXPECT_TRUE(calls.WaitUntilNone(absl::Seconds(10)));
}

}  // namespace
}  // namespace bmuf::ops
