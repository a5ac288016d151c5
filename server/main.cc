// bmuf-coordinator: the only place that knows every concrete class.
#include <fcntl.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <thread>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/synchronization/notification.h"
#include "core/base/clock.h"
#include "core/base/status_macros.h"
#include "core/base/thread_pool.h"
#include "core/config/yaml_proto.h"
#include "core/kernels/kernels.h"
#include "server/coordinator/coordinator.h"
#include "server/daemon_config.h"
#include "server/model/memory_budget.h"
#include "server/ops/http_server.h"
#include "server/ops/log.h"
#include "server/ops/metrics.h"
#include "server/service/grpc_server.h"
#include "server/storage/memory_ledger.h"

namespace bmuf {
namespace {

constexpr char kBuild[] = "0.1.0";

// As documented in --help.
enum ExitCode { kDrained = 0, kUsage = 64, kInternal = 70, kIo = 74, kInsecure = 78 };

constexpr char kDescription[] =
    "Keeps a global model, applies block learning rate and block momentum to the block deltas of its workers, and "
    "broadcasts the result.\n\n"
    "Configuration: defaults, then --config FILE (YAML), then environment (BMUF_LISTEN, BMUF_LOG_LEVEL, ...), then flags.\n"
    "Signals: SIGTERM or SIGINT lets the open rounds end (at most drain_timeout) and exits 0; a second one exits at once.\n"
    "Exit codes: 0 drained, or all jobs finished with exit_when_done; 64 wrong usage or configuration; 70 internal "
    "fault, or a job failed with exit_when_done; 74 I/O, port taken; 78 insecure configuration.";

// An unguessable session token.
std::string RandomToken() {
  static thread_local std::random_device device;
  std::string token;
  for (int i = 0; i < 4; ++i) absl::StrAppendFormat(&token, "%08x", device());
  return token;
}

// What the coordinator says, as log lines.
class LogObserver : public coordinator::Observer {
 public:
  explicit LogObserver(ops::Log& log) : log_(log) {}

  void OnAnnouncement(const coordinator::Announcement& a) override {
    ops::LogLine line;
    switch (a.level) {
      case coordinator::Announcement::Level::kDebug:
        line.level = spdlog::level::debug;
        break;
      case coordinator::Announcement::Level::kWarning:
        line.level = spdlog::level::warn;
        break;
      case coordinator::Announcement::Level::kError:
        line.level = spdlog::level::err;
        break;
      default:
        line.level = spdlog::level::info;
    }
    line.text = a.text;
    line.job = a.job;
    line.round = a.round;
    line.worker = a.worker;
    line.reason = a.reason;
    log_.Write(line);
  }

  void OnFatal(const absl::Status& why) override {
    // Nothing more may be acknowledged: the process ends here, and its successor recovers.
    std::fprintf(stderr, "bmuf-coordinator: state can no longer be kept: %s\n", std::string(why.message()).c_str());
    std::_Exit(kIo);
  }

 private:
  ops::Log& log_;
};

int Fail(ExitCode code, const std::string& text) {
  std::cerr << "bmuf-coordinator: " << text << std::endl;
  return code;
}

// Written whole or not at all: whoever waits for the file reads complete addresses.
absl::Status WritePortFile(const std::string& path, const std::string& text) {
  const std::string temporary = absl::StrCat(path, ".tmp.", getpid());
  std::ofstream file(temporary, std::ios::trunc);
  file << text;
  file.close();
  if (!file || std::rename(temporary.c_str(), path.c_str()) != 0) {
    std::remove(temporary.c_str());
    return absl::UnavailableError(absl::StrCat("cannot write port file ", path));
  }
  return absl::OkStatus();
}

// Waits for the answer of an asynchronous call of the coordinator.
template <typename Response, typename Request>
absl::StatusOr<Response> CallAndWait(coordinator::Coordinator& coordinator,
                                     void (coordinator::Coordinator::*method)(Request, coordinator::Reply<Response>),
                                     Request request) {
  struct Shared {
    absl::Notification done;
    absl::StatusOr<Response> answer = absl::UnknownError("no answer");
  };
  auto shared = std::make_shared<Shared>();
  (coordinator.*method)(std::move(request), [shared](absl::StatusOr<Response> answer) {
    shared->answer = std::move(answer);
    shared->done.Notify();
  });
  shared->done.WaitForNotification();
  return std::move(shared->answer);
}

int Run(const v1::DaemonConfig& config) {
  if (!IsLoopback(config.listen()) && !config.insecure_plaintext()) {
    return Fail(kInsecure, absl::StrCat("listening on ", config.listen(),
                                        " without TLS would let anyone on the network train; use a loopback address, "
                                        "or say --insecure-i-understand"));
  }
  // Before any thread starts, so that all of them leave these signals to the one that waits for them.
  sigset_t signals;
  sigemptyset(&signals);
  for (int signal : {SIGTERM, SIGINT}) sigaddset(&signals, signal);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  std::signal(SIGPIPE, SIG_IGN);

  const Clock& clock = Clock::Real();
  const bool json = config.log_format() == v1::LOG_FORMAT_JSON ||
                    (config.log_format() == v1::LOG_FORMAT_UNSPECIFIED && isatty(STDERR_FILENO) == 0);
  auto log = ops::Log::Create({config.log_level(), json}, clock);
  if (!log.ok()) return Fail(kUsage, std::string(log.status().message()));
  const auto say = [&](const std::string& text) {
    ops::LogLine line;
    line.text = text;
    (*log)->Write(line);
  };

  const Kernels& kernels = **KernelsByName(config.kernels());
  ThreadPool pool("compute", config.compute_threads());
  MemoryBudget budget(config.memory_limit_bytes());
  // State is in memory: seconds of the wall clock make a successor's epoch the higher one.
  storage::MemoryLedger ledger(Epoch(static_cast<uint64_t>(absl::ToUnixSeconds(clock.WallNow()))));
  absl::StatusOr<Epoch> epoch = ledger.RaiseEpoch();
  if (!epoch.ok()) return Fail(kIo, std::string(epoch.status().message()));
  LogObserver observer(**log);
  coordinator::Seams seams;

  coordinator::Loop::Options loop_options;
  loop_options.pause_grace = absl::Milliseconds(500);
  coordinator::Loop loop(clock, loop_options);
  std::atomic<int> exit_code{kDrained};
  absl::Notification ending;
  coordinator::Coordinator::Options options;
  options.job_defaults = config.job_defaults();
  options.drain_timeout = absl::Seconds(config.drain_timeout().seconds()) +
                          absl::Nanoseconds(config.drain_timeout().nanos());
  options.exit_when_done = config.exit_when_done();
  options.build = kBuild;
  options.on_ending = [&](coordinator::Coordinator::Ending how) {
    if (how == coordinator::Coordinator::Ending::kSomeFailed) exit_code = kInternal;
    ending.Notify();
  };
  coordinator::Coordinator::Parts parts{loop,
                                        [&pool](std::function<void()> task) { pool.Schedule(std::move(task)); },
                                        pool,
                                        kernels,
                                        budget,
                                        ledger,
                                        *epoch,
                                        observer,
                                        seams,
                                        RandomToken};
  auto coordinator = std::make_unique<coordinator::Coordinator>(std::move(parts), std::move(options));
  std::thread loop_thread([&] { loop.Run(); });
  // Ends the loop and then the coordinator, whatever the way out.
  const auto stop_loop = [&] {
    loop.Stop();
    loop_thread.join();
    coordinator.reset();
  };

  for (const v1::ConfiguredJob& job : config.jobs()) {
    v1::CreateJobRequest request;
    request.set_job(job.name());
    *request.mutable_config() = job.config();
    auto created = CallAndWait<v1::CreateJobResponse>(*coordinator, &coordinator::Coordinator::CreateJob, request);
    if (!created.ok()) {
      stop_loop();
      return Fail(kUsage, absl::StrCat("job ", job.name(), ": ", std::string(created.status().message())));
    }
  }

  service::GrpcServer::Options server_options;
  server_options.listen = config.listen();
  server_options.reflection = config.reflection();
  auto server = service::GrpcServer::Start(*coordinator, server_options);
  if (!server.ok()) {
    coordinator->Abandon();
    stop_loop();
    return Fail(kIo, std::string(server.status().message()));
  }
  coordinator->SetListenAddress((*server)->address());

  std::unique_ptr<ops::HttpServer> http;
  if (!config.metrics_listen().empty()) {
    const auto status_now = [&] {
      return CallAndWait<v1::GetStatusResponse>(*coordinator, &coordinator::Coordinator::GetStatus,
                                                v1::GetStatusRequest());
    };
    const auto ready = [&]() -> ops::HttpAnswer {
      const bool draining = !status_now().ok() || status_now()->draining();
      return {draining ? 503 : 200, "text/plain", draining ? "draining\n" : "ready\n"};
    };
    auto started = ops::HttpServer::Start(
        config.metrics_listen(),
        {{"/metrics",
          [&]() -> ops::HttpAnswer {
            auto status = status_now();
            if (!status.ok()) return {503, "text/plain", "ending\n"};
            return {200, "text/plain; version=0.0.4; charset=utf-8", ops::MetricsText(*status)};
          }},
         {"/healthz", [] { return ops::HttpAnswer{200, "text/plain", "ok\n"}; }},
         {"/readyz", ready},
         {"/debug/rpcs", [&] { return ops::HttpAnswer{200, "text/plain", (*server)->OpenCalls()}; }}});
    if (!started.ok()) {
      (*server)->Shutdown(absl::ZeroDuration());
      coordinator->Abandon();
      stop_loop();
      return Fail(kIo, std::string(started.status().message()));
    }
    http = *std::move(started);
  }

  const std::string metrics = http == nullptr ? "" : http->address();
  if (!config.port_file().empty()) {
    absl::Status written = WritePortFile(config.port_file(), absl::StrCat((*server)->address(), "\n", metrics, "\n"));
    if (!written.ok()) {
      http.reset();
      (*server)->Shutdown(absl::ZeroDuration());
      coordinator->Abandon();
      stop_loop();
      return Fail(kIo, std::string(written.message()));
    }
  }
  say(absl::StrCat("bmuf-coordinator ", kBuild, " serves on ", (*server)->address(),
                   metrics.empty() ? "" : absl::StrCat(", metrics on ", metrics), "; epoch ", epoch->value(),
                   ", kernels ", kernels.name, ", ", config.compute_threads(), " compute threads, memory limit ",
                   config.memory_limit_bytes(), " bytes; state is in memory"));

  // Waits for signals; the first drains, the second ends the process at once, which is always safe.
  const int signal_fd = signalfd(-1, &signals, SFD_CLOEXEC);
  std::thread signal_thread([&] {
    bool draining = false;
    signalfd_siginfo info;
    while (read(signal_fd, &info, sizeof(info)) == sizeof(info)) {
      if (info.ssi_signo == SIGTERM && info.ssi_pid == static_cast<uint32_t>(getpid()) && ending.HasBeenNotified()) {
        return;  // Our own, to end this thread.
      }
      if (draining) std::_Exit(128 + static_cast<int>(info.ssi_signo));
      draining = true;
      say("draining: no new rounds, no new members");
      (*server)->SetServing(false);
      coordinator->Drain(v1::DrainRequest(), [](const absl::StatusOr<v1::DrainResponse>&) {});
    }
  });

  ending.WaitForNotification();
  kill(getpid(), SIGTERM);
  signal_thread.join();
  close(signal_fd);
  http.reset();
  (*server)->SetServing(false);
  coordinator->Abandon();
  (*server)->Shutdown(absl::Seconds(2));
  stop_loop();
  say("ended");
  return exit_code;
}

int Main(int argc, char** argv) {
  std::string config_file;
  bool print = false, check = false, insecure = false, reflection = false, exit_when_done = false;
  std::vector<std::string> jobs;
  // Flag -> field of DaemonConfig.
  std::vector<std::pair<std::string, std::string>> values = {
      {"listen", ""},       {"metrics_listen", ""}, {"port_file", ""},    {"log_level", ""},
      {"log_format", ""},   {"kernels", ""},        {"drain_timeout", ""}, {"compute_threads", ""},
      {"memory_limit_bytes", ""}};

  CLI::App app(kDescription, "bmuf-coordinator");
  app.add_option("--config", config_file, "YAML file; its schema is proto/bmuf/v1/config.proto");
  app.add_flag("--print-config", print, "Print the resolved configuration and exit");
  app.add_flag("--check-config", check, "Check the configuration and exit");
  app.add_option("--job", jobs, "Create this job with default rules (repeatable)");
  app.add_flag("--insecure-i-understand", insecure, "Allow plaintext on an address others can reach");
  app.add_flag("--reflection", reflection, "Serve the gRPC reflection API");
  app.add_flag("--exit-when-done", exit_when_done, "Exit 0 when every job has finished");
  app.set_version_flag("--version", std::string(kBuild));
  std::vector<CLI::Option*> options;
  for (auto& [field, value] : values) {
    std::string flag = "--" + field;
    std::replace(flag.begin(), flag.end(), '_', '-');
    options.push_back(app.add_option(flag, value, absl::StrCat("Field ", field, " of the configuration")));
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    return app.exit(e) == 0 ? kDrained : kUsage;
  }

  ConfigSources sources;
  sources.environment = [](const std::string& name) -> const char* { return std::getenv(name.c_str()); };
  if (!config_file.empty()) {
    std::ifstream file(config_file);
    std::stringstream text;
    text << file.rdbuf();
    if (!file) return Fail(kUsage, absl::StrCat("cannot read ", config_file));
    sources.file_name = config_file;
    sources.file_text = text.str();
  }
  for (size_t i = 0; i < values.size(); ++i) {
    if (options[i]->count() > 0) sources.flags.push_back(values[i]);
  }
  if (insecure) sources.flags.emplace_back("insecure_plaintext", "true");
  if (reflection) sources.flags.emplace_back("reflection", "true");
  if (exit_when_done) sources.flags.emplace_back("exit_when_done", "true");
  absl::StatusOr<v1::DaemonConfig> config =
      ResolveDaemonConfig(sources, std::thread::hardware_concurrency(), UsableMemoryBytes());
  if (!config.ok()) return Fail(kUsage, std::string(config.status().message()));
  for (const std::string& job : jobs) config->add_jobs()->set_name(job);
  if (print) std::cout << ToYaml(*config);
  if (print || check) return kDrained;
  return Run(*config);
}

}  // namespace
}  // namespace bmuf

int main(int argc, char** argv) { return bmuf::Main(argc, argv); }
