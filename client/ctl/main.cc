// bmufctl: the operators' command. One call to the daemon per command; tables for people, --json for scripts.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iostream>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "bmuf/v1/admin_service.grpc.pb.h"
#include "client/ctl/text.h"
#include "core/base/crc32c.h"
#include "core/base/error.h"
#include "core/config/yaml_proto.h"
#include "google/protobuf/util/json_util.h"
#include "grpcpp/grpcpp.h"

namespace bmuf::ctl {
namespace {

// Exit codes, as in --help.
constexpr int kOk = 0;
constexpr int kRefused = 1;
constexpr int kUsage = 64;
constexpr int kUnreachable = 69;
constexpr int kIo = 74;

constexpr absl::Duration kCallTimeout = absl::Seconds(10);

struct Flags {
  std::string server = "127.0.0.1:7070";
  bool json = false;
  std::string job, worker, reason, config_file, output;
  std::vector<std::string> settings;
  uint32_t limit = 20;
  uint32_t every = 1;
  uint64_t version = 0;
  bool has_version = false, broadcast = false;
};

std::string Json(const google::protobuf::Message& message) {
  google::protobuf::util::JsonPrintOptions options;
  options.add_whitespace = true;
  options.always_print_primitive_fields = true;
  options.preserve_proto_field_names = true;
  std::string text;
  (void)google::protobuf::util::MessageToJsonString(message, &text, options);  // Cannot fail on our own messages.
  return text;
}

class Commands {
 public:
  explicit Commands(const Flags& flags) : flags_(flags) {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
    stub_ = v1::AdminService::NewStub(
        grpc::CreateCustomChannel(flags.server, grpc::InsecureChannelCredentials(), arguments));
  }

  int Jobs() { return Call<v1::ListJobsResponse>(&v1::AdminService::Stub::ListJobs, v1::ListJobsRequest(), JobsTable); }

  int Create() {
    v1::CreateJobRequest request;
    request.set_job(flags_.job);
    if (!flags_.config_file.empty()) {
      std::ifstream file(flags_.config_file);
      std::stringstream text;
      text << file.rdbuf();
      if (!file) return Fail(kUsage, absl::StrCat("cannot read ", flags_.config_file));
      absl::Status merged = MergeYaml(text.str(), flags_.config_file, *request.mutable_config());
      if (!merged.ok()) return Fail(kUsage, std::string(merged.message()));
    }
    if (int code = ApplySettings(*request.mutable_config()); code != kOk) return code;
    return Call<v1::CreateJobResponse>(&v1::AdminService::Stub::CreateJob, request, [](const auto& r) {
      return absl::StrCat("created job ", r.job().name(), "\n", ToYaml(r.job().config()));
    });
  }

  int Set() {
    v1::UpdateJobRequest request;
    request.set_job(flags_.job);
    if (int code = ApplySettings(*request.mutable_changes()); code != kOk) return code;
    return Call<v1::UpdateJobResponse>(&v1::AdminService::Stub::UpdateJob, request, [](const auto& r) {
      return absl::StrCat("job ", r.job().name(), " from the next round on:\n", ToYaml(r.job().config()));
    });
  }

  int Status() {
    v1::GetStatusRequest request;
    request.set_job(flags_.job);
    return Call<v1::GetStatusResponse>(&v1::AdminService::Stub::GetStatus, request, [](const auto& r) {
      std::string text = DaemonText(r);
      for (const v1::JobStatus& job : r.jobs()) absl::StrAppend(&text, "\n", StatusText(job));
      return text;
    });
  }

  int Ping() {
    const absl::Time begin = absl::Now();
    return Call<v1::GetStatusResponse>(&v1::AdminService::Stub::GetStatus, v1::GetStatusRequest(), [&](const auto& r) {
      return absl::StrCat(DaemonText(r), "answered in ", Short(absl::Now() - begin), "\n");
    });
  }

  int Rounds() {
    v1::ListRoundsRequest request;
    request.set_job(flags_.job);
    request.set_limit(flags_.limit);
    return Call<v1::ListRoundsResponse>(&v1::AdminService::Stub::ListRounds, request, RoundsTable);
  }

  int Pause() {
    v1::PauseJobRequest request;
    request.set_job(flags_.job);
    request.set_reason(flags_.reason);
    return Call<v1::PauseJobResponse>(&v1::AdminService::Stub::PauseJob, request,
                                      [&](const auto&) { return absl::StrCat("paused job ", flags_.job, "\n"); });
  }

  int Resume() {
    v1::ResumeJobRequest request;
    request.set_job(flags_.job);
    return Call<v1::ResumeJobResponse>(&v1::AdminService::Stub::ResumeJob, request,
                                       [&](const auto&) { return absl::StrCat("resumed job ", flags_.job, "\n"); });
  }

  int Evict() {
    v1::EvictWorkerRequest request;
    request.set_job(flags_.job);
    request.set_worker(flags_.worker);
    return Call<v1::EvictWorkerResponse>(&v1::AdminService::Stub::EvictWorker, request, [&](const auto&) {
      return absl::StrCat("evicted worker ", flags_.worker, " of job ", flags_.job, "\n");
    });
  }

  int Readmit() {
    v1::ReadmitWorkerRequest request;
    request.set_job(flags_.job);
    request.set_worker(flags_.worker);
    return Call<v1::ReadmitWorkerResponse>(&v1::AdminService::Stub::ReadmitWorker, request, [&](const auto&) {
      return absl::StrCat("worker ", flags_.worker, " may join job ", flags_.job, " again\n");
    });
  }

  int Drain() {
    return Call<v1::DrainResponse>(&v1::AdminService::Stub::Drain, v1::DrainRequest(),
                                   [](const auto&) { return std::string("draining\n"); });
  }

  int Watch() {
    const bool terminal = isatty(STDOUT_FILENO) != 0 && !flags_.json;
    grpc::ClientContext context;
    v1::WatchJobRequest request;
    request.set_job(flags_.job);
    std::unique_ptr<grpc::ClientReader<v1::WatchJobResponse>> stream = stub_->WatchJob(&context, request);
    v1::WatchJobResponse message;
    uint64_t shown_round = 0;
    std::string shown_reason;
    while (stream->Read(&message)) {
      const v1::JobStatus& status = message.status();
      if (flags_.json) {
        std::cout << Json(status) << std::endl;
      } else {
        shown_round = ShowCommits(status, shown_round, terminal);
        if (terminal) {
          std::cout << "\r\x1b[K" << ProgressLine(status, 100) << std::flush;
        }
      }
      if (status.state() == v1::JOB_STATE_FINISHED || status.state() == v1::JOB_STATE_FAILED) {
        if (!flags_.json) {
          std::cout << (terminal ? "\r\x1b[K" : "") << "job " << status.job() << " " << Name(status.state())
                    << (status.state_reason().empty() ? "" : ": ") << status.state_reason() << std::endl;
        }
        context.TryCancel();
        return status.state() == v1::JOB_STATE_FINISHED ? kOk : kRefused;
      }
    }
    return Finish(stream->Finish());
  }

  int Export() {
    v1::ExportModelRequest request;
    request.set_job(flags_.job);
    if (flags_.has_version) request.set_version(flags_.version);
    request.set_kind(flags_.broadcast ? v1::MODEL_EXPORT_KIND_BROADCAST : v1::MODEL_EXPORT_KIND_MODEL);
    grpc::ClientContext context;
    auto stream = stub_->ExportModel(&context, request);
    // Written beside its place and renamed when whole: a reader never sees half a model.
    const std::string temporary = absl::StrCat(flags_.output, ".tmp.", getpid());
    std::ofstream file(temporary, std::ios::binary | std::ios::trunc);
    v1::ExportModelResponse part;
    uint64_t written = 0, total = 0, version = 0;
    while (stream->Read(&part)) {
      total = part.total_bytes();
      version = part.version();
      if (part.offset() != written || Crc32c(part.data().data(), part.data().size()) != part.crc32c()) {
        context.TryCancel();
        std::remove(temporary.c_str());
        return Fail(kIo, absl::StrCat("the export was damaged on its way at byte ", written, "; try again"));
      }
      file.write(part.data().data(), static_cast<std::streamsize>(part.data().size()));
      written += part.data().size();
    }
    const grpc::Status status = stream->Finish();
    file.close();
    if (!status.ok()) {
      std::remove(temporary.c_str());
      return Finish(status);
    }
    if (written != total || !file || std::rename(temporary.c_str(), flags_.output.c_str()) != 0) {
      std::remove(temporary.c_str());
      return Fail(kIo, absl::StrCat("cannot write ", flags_.output, " (", written, " of ", total, " bytes arrived)"));
    }
    std::cout << "version " << version << " of job " << flags_.job << ": " << Bytes(total) << " in " << flags_.output
              << "\n";
    return kOk;
  }

 private:
  template <typename Response, typename Method, typename Request, typename Format>
  int Call(Method method, const Request& request, Format format) {
    grpc::ClientContext context;
    context.set_deadline(absl::ToChronoTime(absl::Now() + kCallTimeout));
    Response response;
    const grpc::Status status = ((*stub_).*method)(&context, request, &response);
    if (!status.ok()) return Finish(status);
    std::cout << (flags_.json ? Json(response) : format(response));
    if (flags_.json) std::cout << std::endl;
    return kOk;
  }

  // Prints each commit once, those between two messages included.
  uint64_t ShowCommits(const v1::JobStatus& status, uint64_t shown, bool terminal) {
    const uint64_t newest = status.last_commit().round();
    if (newest <= shown) return shown;
    std::vector<v1::RoundRecord> records = {status.last_commit()};
    if (newest > shown + 1) {
      grpc::ClientContext context;
      context.set_deadline(absl::ToChronoTime(absl::Now() + kCallTimeout));
      v1::ListRoundsRequest request;
      request.set_job(flags_.job);
      request.set_before(newest);
      // The first message of a watch does not tell the whole past.
      request.set_limit(shown == 0 ? 10 : static_cast<uint32_t>(std::min<uint64_t>(1000, newest - shown - 1)));
      v1::ListRoundsResponse missed;
      if (stub_->ListRounds(&context, request, &missed).ok()) {
        records.insert(records.end(), missed.rounds().begin(), missed.rounds().end());
      }
    }
    for (auto it = records.rbegin(); it != records.rend(); ++it) {
      const bool last = it->round() == newest && status.state() != v1::JOB_STATE_RUNNING;
      if (it->round() > shown && (last || it->round() % flags_.every == 0))
        std::cout << (terminal ? "\r\x1b[K" : "") << RoundLine(*it) << std::endl;
    }
    return newest;
  }

  int ApplySettings(v1::JobConfig& config) {
    for (const std::string& setting : flags_.settings) {
      const std::vector<std::string> parts = absl::StrSplit(setting, absl::MaxSplits('=', 1));
      if (parts.size() != 2) return Fail(kUsage, absl::StrCat("\"", setting, "\" is not path=value"));
      absl::Status set = SetField(parts[0], parts[1], config);
      if (!set.ok()) return Fail(kUsage, std::string(set.message()));
    }
    return kOk;
  }

  int Fail(int code, const std::string& text) {
    std::cerr << "bmufctl: " << text << "\n";
    return code;
  }

  int Finish(const grpc::Status& status) {
    if (status.ok()) return kOk;
    if (status.error_code() == grpc::StatusCode::UNAVAILABLE ||
        status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED) {
      return Fail(kUnreachable, absl::StrCat("no answer from ", flags_.server, ": ", status.error_message()));
    }
    google::rpc::Status rpc;
    std::string reason;
    if (rpc.ParseFromString(status.error_details())) reason = ReasonName(ReasonOf(FromRpcStatus(rpc)));
    return Fail(kRefused, absl::StrCat(status.error_message(), reason.empty() ? "" : absl::StrCat(" [", reason, "]")));
  }

  const Flags& flags_;
  std::unique_ptr<v1::AdminService::Stub> stub_;
};

int Main(int argc, char** argv) {
  Flags flags;
  CLI::App app(
      "Operates a bmuf-coordinator.\n\nExit codes: 0 done, 1 refused by the coordinator, 64 wrong usage, "
      "69 no answer, 74 cannot write a file.",
      "bmufctl");
  app.require_subcommand(1);
  app.fallthrough();
  app.add_option("--server", flags.server, "Address of the daemon")->envname("BMUF_SERVER")->capture_default_str();
  app.add_flag("--json", flags.json, "Print the answer as JSON");

  std::function<int(Commands&)> run;
  const auto command = [&](const char* name, const char* what, int (Commands::*method)()) {
    CLI::App* sub = app.add_subcommand(name, what);
    sub->callback([&run, method] { run = [method](Commands& c) { return (c.*method)(); }; });
    return sub;
  };
  const auto with_job = [&](CLI::App* sub) {
    sub->add_option("job", flags.job, "Job name")->required();
    return sub;
  };
  const auto with_worker = [&](CLI::App* sub) {
    sub->add_option("worker", flags.worker, "Worker name")->required();
    return sub;
  };

  command("ping", "Ask the daemon for a sign of life", &Commands::Ping);
  command("jobs", "List the jobs", &Commands::Jobs);
  CLI::App* create = with_job(command("create", "Create a job", &Commands::Create));
  create->add_option("--config", flags.config_file, "YAML file with the job's rules");
  create->add_option("--set", flags.settings, "path=value, for instance outer.block_learning_rate=0.7");
  command("status", "Who is waited for, until when, why, and what happens then", &Commands::Status)
      ->add_option("job", flags.job, "Only this job");
  with_job(command("watch", "One line a round, until the job ends", &Commands::Watch))
      ->add_option("--every", flags.every, "A line every so many rounds only")
      ->check(CLI::Range(1u, 1'000'000u));
  with_job(command("rounds", "The newest commits", &Commands::Rounds))
      ->add_option("--limit", flags.limit, "How many")
      ->capture_default_str();
  with_job(command("set", "Change rules from the next round on", &Commands::Set))
      ->add_option("settings", flags.settings, "path=value, for instance barrier.soft_timeout=30s")
      ->required();
  with_job(command("pause", "No commits until resume", &Commands::Pause))
      ->add_option("--reason", flags.reason, "Shown to workers and operators");
  with_job(command("resume", "End a pause", &Commands::Resume));
  with_worker(with_job(command("evict", "Remove a worker and refuse its name", &Commands::Evict)));
  with_worker(with_job(command("readmit", "Let an evicted worker join again", &Commands::Readmit)));
  CLI::App* exporting = with_job(command("export", "Write the model as safetensors", &Commands::Export));
  exporting->add_option("file", flags.output, "Where to")->required();
  CLI::Option* version = exporting->add_option("--version", flags.version, "Which version (default: the newest)");
  exporting->add_flag("--broadcast", flags.broadcast, "What workers train from, instead of the model");
  command("drain", "Let the open rounds end, then stop the daemon", &Commands::Drain);

  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    return app.exit(e) == 0 ? kOk : kUsage;
  }
  flags.has_version = version->count() > 0;
  Commands commands(flags);
  return run(commands);
}

}  // namespace
}  // namespace bmuf::ctl

int main(int argc, char** argv) { return bmuf::ctl::Main(argc, argv); }
