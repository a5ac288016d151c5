// bmuf-coordinator: the only place that knows every concrete class of the server.
#include <grpc/support/log.h>
#include <malloc.h>
#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/synchronization/notification.h"
#include "bmuf/v1/config.pb.h"
#include "core/base/names.h"
#include "core/base/status_macros.h"
#include "core/base/thread_pool.h"
#include "core/config/yaml_proto.h"
#include "core/kernels/kernels.h"
#include "server/coordinator/coordinator.h"
#include "server/coordinator/loop.h"
#include "server/daemon_config.h"
#include "server/ops/http.h"
#include "server/ops/log.h"
#include "server/ops/metrics.h"
#include "server/ops/open_calls.h"
#include "server/service/grpc_server.h"
#include "server/service/services.h"
#include "server/service/telemetry.h"
#include "server/service/watchdog.h"
#include "server/storage/memory_ledger.h"

namespace bmuf {
namespace {

constexpr char kBuild[] = "0.1.0";

constexpr int kExitOk = 0;
constexpr int kExitJobFailed = 1;
constexpr int kExitConfig = 64;
constexpr int kExitIo = 74;
constexpr int kExitInsecure = 78;

constexpr char kExitCodes[] =
    "Exit status:\n"
    "   0  drained, or all jobs finished (exit_when_done)\n"
    "   1  a job failed (exit_when_done)\n"
    "  64  mistake in the configuration or on the command line\n"
    "  65  the state is damaged (not in this build: state is in memory)\n"
    "  70  internal check failed\n"
    "  74  input or output: an address cannot be listened on, a file cannot be written, state cannot be kept\n"
    "  75  another daemon has taken over the state\n"
    "  78  plaintext beyond this machine was not asked for\n"
    " 128+n  a second signal n ended the drain\n"
    "\n"
    "Configuration: defaults < file (--config) < environment (BMUF_LISTEN, BMUF_LOG_LEVEL, ...) < flags.\n";

// Answers of the coordinator that main waits for.
constexpr absl::Duration kStatusTime = absl::Seconds(1);
// How long open calls may go on after the drain, and how long the last answers may take on their way.
constexpr absl::Duration kCallsGrace = absl::Seconds(5);
constexpr absl::Duration kAnswersGrace = absl::Milliseconds(500);

int Fail(int code, const std::string& what) {
  std::cerr << "bmuf-coordinator: " << what << std::endl;
  return code;
}

// ------------------------------------------------------------------------------------------------- configuration

// Fields that one word can set: those have an environment variable and a flag.
bool IsScalar(const google::protobuf::FieldDescriptor& field) {
  if (field.is_repeated()) return false;
  return field.message_type() == nullptr || field.message_type()->full_name() == "google.protobuf.Duration";
}

// What the command line says beside the configuration.
struct CommandLine {
  std::string config_path;
  bool print_config = false;
  bool check_config = false;
  bool insecure = false;
  std::vector<std::string> jobs;
  std::map<std::string, std::string> values;  // By field name.
};

absl::StatusOr<v1::DaemonConfig> LoadConfig(const CommandLine& line) {
  ConfigSources sources;
  if (!line.config_path.empty()) {
    std::ifstream file(line.config_path);
    std::stringstream text;
    text << file.rdbuf();
    if (!file.is_open() || file.bad())
      return absl::InvalidArgumentError(absl::StrCat("cannot read ", line.config_path));
    sources.file_name = line.config_path;
    sources.file_text = text.str();
  }
  sources.environment = [](const std::string& name) -> const char* { return std::getenv(name.c_str()); };
  sources.flags.assign(line.values.begin(), line.values.end());
  if (line.insecure) sources.flags.emplace_back("insecure_plaintext", "true");
  ASSIGN_OR_RETURN(v1::DaemonConfig config,
                   ResolveDaemonConfig(sources, std::thread::hardware_concurrency(), UsableMemoryBytes()));
  RETURN_IF_ERROR(ops::ParseHostPort(config.listen()).status());
  if (!config.metrics_listen().empty()) RETURN_IF_ERROR(ops::ParseHostPort(config.metrics_listen()).status());
  for (const std::string& name : line.jobs) {
    RETURN_IF_ERROR(ValidateName("--job", name));
    const bool known = std::any_of(config.jobs().begin(), config.jobs().end(),
                                   [&](const v1::ConfiguredJob& job) { return job.name() == name; });
    if (!known) config.add_jobs()->set_name(name);
  }
  return config;
}

// ------------------------------------------------------------------------------------------------------- the daemon

std::string RandomToken() {
  char bytes[16];
  // Cannot fail for so few bytes.
  if (getentropy(bytes, sizeof(bytes)) != 0) std::abort();
  return absl::BytesToHexString(absl::string_view(bytes, sizeof(bytes)));
}

// Complete or absent: whoever waits for the file never reads half of it.
absl::Status WritePortFile(const std::string& path, const std::string& text) {
  const std::string temporary = absl::StrCat(path, ".new");
  std::ofstream file(temporary, std::ios::trunc);
  file << text;
  file.close();
  if (!file || std::rename(temporary.c_str(), path.c_str()) != 0) {
    return absl::UnavailableError(absl::StrCat("cannot write ", path));
  }
  return absl::OkStatus();
}

void RaiseFileLimit() {
  rlimit limit;
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
}

// The daemon's status, or an error if the loop does not answer soon.
absl::StatusOr<v1::GetStatusResponse> StatusSoon(coordinator::Coordinator& coordinator) {
  struct Waiter {
    absl::Notification answered;
    absl::StatusOr<v1::GetStatusResponse> answer = absl::DeadlineExceededError("the loop does not answer");
  };
  auto waiter = std::make_shared<Waiter>();
  coordinator.GetStatus({}, [waiter](absl::StatusOr<v1::GetStatusResponse> answer) {
    waiter->answer = std::move(answer);
    waiter->answered.Notify();
  });
  if (!waiter->answered.WaitForNotificationWithTimeout(kStatusTime)) {
    return absl::DeadlineExceededError("the loop does not answer");
  }
  return waiter->answer;
}

std::string CallsPage(const ops::OpenCalls& calls, const Clock& clock) {
  std::string page =
      absl::StrCat(calls.size(), " calls open, ", calls.opened(), " since start\nage deadline method peer\n");
  const MonotonicTime now = clock.Now();
  for (const ops::OpenCall& call : calls.List(1000)) {
    absl::StrAppend(&page, absl::FormatDuration(absl::Trunc(now - call.began, absl::Milliseconds(1))), " ",
                    call.allowed == absl::InfiniteDuration()
                        ? "none"
                        : absl::FormatDuration(absl::Trunc(call.allowed - (now - call.began), absl::Milliseconds(1))),
                    " ", call.method, " ", call.peer, "\n");
  }
  return page;
}

ops::HttpServer::Handlers Pages(coordinator::Coordinator& coordinator, const ops::Metrics& metrics,
                                const ops::OpenCalls& calls, const ops::Log& log, const Clock& clock) {
  const auto with_status = [&coordinator](std::function<ops::HttpAnswer(const v1::GetStatusResponse&)> page) {
    return [&coordinator, page = std::move(page)]() -> ops::HttpAnswer {
      const absl::StatusOr<v1::GetStatusResponse> status = StatusSoon(coordinator);
      if (!status.ok())
        return {503, "text/plain; charset=utf-8", absl::StrCat(std::string(status.status().message()), "\n")};
      return page(*status);
    };
  };
  const auto text = [](std::string body) { return ops::HttpAnswer{200, "text/plain; charset=utf-8", std::move(body)}; };
  const auto overview = with_status([text](const v1::GetStatusResponse& s) { return text(ops::StatusPage(s)); });
  return {
      {"/", overview},
      {"/status", overview},
      {"/metrics", with_status([&](const v1::GetStatusResponse& s) {
         return ops::HttpAnswer{200, "text/plain; version=0.0.4; charset=utf-8",
                                metrics.Render(s, calls.size(), log.dropped_lines())};
       })},
      {"/healthz", with_status([text](const v1::GetStatusResponse&) { return text("ok\n"); })},
      {"/readyz", with_status([text](const v1::GetStatusResponse& s) {
         return s.draining() ? ops::HttpAnswer{503, "text/plain; charset=utf-8", "draining\n"} : text("ready\n");
       })},
      {"/debug/rpcs", [&, text] { return text(CallsPage(calls, clock)); }},
  };
}

int Serve(const v1::DaemonConfig& config) {
  // Before any thread starts: all of them leave the signals to the one that waits for them.
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  std::signal(SIGPIPE, SIG_IGN);
  RaiseFileLimit();
  // The library's own lines are neither ours nor in our format; its errors reach us as statuses.
  gpr_set_log_function([](gpr_log_func_args*) {});

  const Clock& clock = Clock::Real();
  ops::Log::Options log_options;
  log_options.level = config.log_level();
  log_options.json = config.log_format() == v1::LOG_FORMAT_UNSPECIFIED ? isatty(STDERR_FILENO) == 0
                                                                       : config.log_format() == v1::LOG_FORMAT_JSON;
  absl::StatusOr<std::unique_ptr<ops::Log>> made_log = ops::Log::Create(log_options, clock);
  if (!made_log.ok()) return Fail(kExitConfig, std::string(made_log.status().message()));
  ops::Log& log = **made_log;
  const auto say = [&log](ops::Log::Level level, std::string text) {
    ops::Log::Line line;
    line.level = level;
    line.text = std::move(text);
    log.Write(line);
  };
  const auto fail = [&](int code, const std::string& what) {
    say(ops::Log::Level::kError, what);
    log.Flush();
    return code;
  };

  const Kernels& kernels = **KernelsByName(config.kernels());
  ThreadPool pool("bmuf-compute", config.compute_threads());
  MemoryBudget budget(config.memory_limit_bytes());
  storage::MemoryLedger ledger(Epoch(static_cast<uint64_t>(absl::ToUnixSeconds(clock.WallNow()))));
  const absl::StatusOr<Epoch> epoch = ledger.RaiseEpoch();
  if (!epoch.ok()) return fail(kExitIo, std::string(epoch.status().message()));

  service::Telemetry telemetry(log, [&log](int code) {
    log.Flush();
    _exit(code);
  });
  coordinator::Seams seams;
  coordinator::Loop::Options loop_options;
  loop_options.pause_grace = absl::Seconds(1);
  coordinator::Loop loop(clock, loop_options);
  std::atomic<service::GrpcServer*> serving{nullptr};
  absl::Notification ended;
  coordinator::Coordinator::Ending ending = coordinator::Coordinator::Ending::kDrained;
  coordinator::Coordinator::Options options;
  options.job_defaults = config.job_defaults();
  options.drain_timeout =
      absl::Seconds(config.drain_timeout().seconds()) + absl::Nanoseconds(config.drain_timeout().nanos());
  options.exit_when_done = config.exit_when_done();
  options.build = kBuild;
  options.on_ending = [&](coordinator::Coordinator::Ending why) {
    ending = why;
    ended.Notify();
  };
  options.on_draining = [&serving] {
    if (service::GrpcServer* server = serving.load(); server != nullptr) server->SetServing(false);
  };
  coordinator::Coordinator coordinator({loop, [&pool](std::function<void()> task) { pool.Schedule(std::move(task)); },
                                        pool, kernels, budget, ledger, *epoch, telemetry, seams, RandomToken},
                                       std::move(options));
  std::thread loop_thread([&loop] { loop.Run(); });
  pthread_setname_np(loop_thread.native_handle(), "bmuf-loop");
  const auto stop_loop = [&] {
    loop.Stop();
    loop_thread.join();
  };

  for (const v1::ConfiguredJob& job : config.jobs()) {
    v1::CreateJobRequest request;
    request.set_job(job.name());
    *request.mutable_config() = job.config();
    absl::Notification answered;
    absl::Status created;
    coordinator.CreateJob(request, [&](const absl::StatusOr<v1::CreateJobResponse>& answer) {
      created = answer.status();
      answered.Notify();
    });
    answered.WaitForNotification();
    if (!created.ok()) {
      stop_loop();
      return fail(kExitConfig, absl::StrCat("job ", job.name(), ": ", std::string(created.message())));
    }
  }

  ops::OpenCalls open_calls;
  ops::Metrics metrics;
  service::CallBook book{clock, open_calls, metrics};
  service::Watchdog watchdog(clock);
  service::CoordinatorServiceImpl coordinator_service({coordinator, book, watchdog});
  service::AdminServiceImpl admin_service({coordinator, book, watchdog});
  service::GrpcServer::Options server_options;
  server_options.listen = config.listen();
  server_options.reflection = config.reflection();
  absl::StatusOr<std::unique_ptr<service::GrpcServer>> server =
      service::GrpcServer::Start(server_options, {&coordinator_service, &admin_service});
  std::unique_ptr<ops::HttpServer> http;
  absl::Status started = server.status();
  if (started.ok() && !config.metrics_listen().empty()) {
    absl::StatusOr<std::unique_ptr<ops::HttpServer>> page =
        ops::HttpServer::Start(config.metrics_listen(), Pages(coordinator, metrics, open_calls, log, clock));
    started = page.status();
    if (page.ok()) http = *std::move(page);
  }
  const std::string metrics_address = http == nullptr ? "" : http->address();
  if (started.ok()) {
    coordinator.SetListenAddress((*server)->address());
    if (!config.port_file().empty()) {
      started = WritePortFile(config.port_file(),
                              absl::StrCat((*server)->address(), "\n", http == nullptr ? "" : metrics_address + "\n"));
    }
  }

  if (started.ok()) {
    serving = server->get();
    if (!config.state_dir().empty())
      say(ops::Log::Level::kWarning, "state_dir is not used: this build keeps state in memory");
    say(ops::Log::Level::kInfo,
        absl::StrCat("bmuf-coordinator ", kBuild, " listens on ", (*server)->address(),
                     http == nullptr ? "" : absl::StrCat(", metrics on ", metrics_address), "; epoch ", epoch->value(),
                     ", kernels ", kernels.name, ", ", config.compute_threads(), " compute threads, ",
                     config.memory_limit_bytes() >> 20, " MiB for models"));
    std::thread([signals, &coordinator, &log, say] {
      int number = 0;
      sigwait(&signals, &number);
      say(ops::Log::Level::kInfo, absl::StrCat("signal ", number, ": draining; once more ends at once"));
      coordinator.Drain({}, [](const absl::StatusOr<v1::DrainResponse>&) {});
      sigwait(&signals, &number);
      say(ops::Log::Level::kWarning, absl::StrCat("signal ", number, " again: ending at once"));
      log.Flush();
      _exit(128 + number);
    }).detach();
    ended.WaitForNotification();
    serving = nullptr;
    (*server)->SetServing(false);
    say(ops::Log::Level::kInfo, "ending");
  }

  coordinator.Abandon();
  // Not the library's own grace: it would wait for connections on which nothing happens any more.
  open_calls.WaitUntilNone(kCallsGrace);
  if (server.ok()) (*server)->Shutdown(kAnswersGrace);
  http.reset();
  stop_loop();
  int code = kExitOk;
  if (!started.ok()) {
    code = fail(kExitIo, std::string(started.message()));
  } else if (ending == coordinator::Coordinator::Ending::kSomeFailed) {
    code = kExitJobFailed;
  }
  log.Flush();
  // The thread that waits for signals is still there and refers to what would be destroyed.
  _exit(code);
}

int Main(int argc, char** argv) {
  CommandLine line;
  CLI::App app("The coordinator of BMUF training: workers push block deltas, it publishes the global model.",
               "bmuf-coordinator");
  app.footer(kExitCodes);
  app.set_version_flag("--version", kBuild);
  app.add_option("--config", line.config_path, "Configuration file (YAML, see proto/bmuf/v1/config.proto)");
  app.add_flag("--print-config", line.print_config, "Print the configuration in force as YAML and exit");
  app.add_flag("--check-config", line.check_config, "Check the configuration and exit");
  app.add_flag("--insecure-i-understand", line.insecure,
               "Let anyone reach a non-loopback address without TLS (insecure_plaintext)");
  app.add_option("--job", line.jobs, "Create a job of this name with the defaults; may be repeated");
  const google::protobuf::Descriptor& schema = *v1::DaemonConfig::descriptor();
  for (int i = 0; i < schema.field_count(); ++i) {
    const auto& field = *schema.field(i);
    if (!IsScalar(field) || field.name() == "insecure_plaintext") continue;
    const std::string flag = absl::StrCat("--", absl::StrReplaceAll(field.name(), {{"_", "-"}}));
    const std::string help = absl::StrCat("Sets ", field.name(), " of the configuration");
    if (field.cpp_type() == google::protobuf::FieldDescriptor::CPPTYPE_BOOL) {
      app.add_flag_callback(
          flag, [&line, name = field.name()] { line.values[name] = "true"; }, help);
    } else {
      app.add_option_function<std::string>(
          flag, [&line, name = field.name()](const std::string& value) { line.values[name] = value; }, help);
    }
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    const int code = app.exit(e);
    return code == 0 ? kExitOk : kExitConfig;
  }
  absl::StatusOr<v1::DaemonConfig> config = LoadConfig(line);
  if (!config.ok()) return Fail(kExitConfig, std::string(config.status().message()));
  if (line.print_config) {
    std::cout << ToYaml(*config);
    return kExitOk;
  }
  if (!ops::IsLoopback(ops::ParseHostPort(config->listen())->host) && !config->insecure_plaintext()) {
    return Fail(kExitInsecure,
                absl::StrCat("listen: ", config->listen(),
                             " is reachable from other machines and this build speaks no TLS, so that anyone there can "
                             "read and change models; if that is wanted, say --insecure-i-understand or "
                             "insecure_plaintext: true"));
  }
  if (line.check_config) return kExitOk;
  return Serve(*config);
}

}  // namespace
}  // namespace bmuf

int main(int argc, char** argv) {
  GOOGLE_PROTOBUF_VERIFY_VERSION;
  // Buffers of model size come and go with every push: each its own mapping, or the heaps of the threads keep them and
  // memory grows with the number of workers.
  mallopt(M_MMAP_THRESHOLD, 1 << 20);
  return bmuf::Main(argc, argv);
}
