#include "worker/options.h"

#include <unistd.h>

#include <cmath>
#include <sstream>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "worker/exit_codes.h"

namespace bmuf::worker {
namespace {

// Host names may hold what a worker name may not, and be longer.
std::string DefaultName() {
  char host[256] = "worker";
  gethostname(host, sizeof(host) - 1);
  std::string name;
  for (const char* c = host; *c != 0 && name.size() < 40; ++c) {
    const bool fits = ('a' <= *c && *c <= 'z') || ('A' <= *c && *c <= 'Z') || ('0' <= *c && *c <= '9') || *c == '-';
    name.push_back(fits ? *c : '-');
  }
  return absl::StrCat("w-", name, "-", getpid());
}

absl::Status Interpret(const std::string& devices, const std::string& optimizer, const std::string& schedule,
                       WorkerOptions* options) {
  auto parsed_devices = ParseDevices(devices);
  if (!parsed_devices.ok()) return parsed_devices.status();
  options->devices = *std::move(parsed_devices);
  const auto parsed_optimizer = ParseOptimizer(optimizer);
  if (!parsed_optimizer.ok()) return parsed_optimizer.status();
  options->optimizer.kind = *parsed_optimizer;
  const auto parsed_schedule = ParseSchedule(schedule);
  if (!parsed_schedule.ok()) return parsed_schedule.status();
  options->optimizer.schedule = *parsed_schedule;
  if (!std::isfinite(options->optimizer.learning_rate) || options->optimizer.learning_rate <= 0) {
    return absl::InvalidArgumentError("--lr must be above 0");
  }
  if (!(options->optimizer.momentum >= 0 && options->optimizer.momentum < 1)) {
    return absl::InvalidArgumentError("--momentum must be in [0, 1)");
  }
  if (!(options->optimizer.weight_decay >= 0) || std::isinf(options->optimizer.weight_decay)) {
    return absl::InvalidArgumentError("--weight-decay must be 0 or more");
  }
  return absl::OkStatus();
}

}  // namespace

ParsedOptions ParseOptions(int argc, const char* const* argv) {
  ParsedOptions parsed;
  WorkerOptions& o = parsed.options;
  o.name = DefaultName();
  std::string devices = "cpu:1", optimizer = "sgd", schedule = "linear";

  CLI::App app("bmuf-worker: trains an image classifier as one worker of a job.", "bmuf-worker");
  app.option_defaults()->always_capture_default();
  app.add_option("--coordinator", o.coordinator, "Address of the coordinator, host:port")->required();
  app.add_option("--job", o.job, "Job to join")->required();
  app.add_option("--name", o.name,
                 "Worker name, unique in the job; a second process of one name takes the first's place");
  app.add_option("--devices", devices, "cpu:K for K trajectories on the CPU, or cuda:0,cuda:1,... for one on each GPU");
  app.add_option("--threads-per-device", o.threads_per_device, "CPU threads of each trajectory")
      ->check(CLI::Range(1, 1024));
  app.add_option("--model", o.model, "mlp, cnn or a TorchScript file: [batch,1,rows,columns] to logits");
  app.add_option("--data", o.data, "Directory of {train,t10k}-{images-idx3,labels-idx1}-ubyte[.gz]");
  app.add_option("--batch-size", o.batch_size, "Samples of a local step; the same for all workers of a job")
      ->check(CLI::Range(1u, 1u << 20));
  app.add_option("--optimizer", optimizer, "Inner optimizer: sgd, nesterov, adamw");
  app.add_option("--lr", o.optimizer.learning_rate, "Inner learning rate");
  app.add_option("--schedule", schedule, "Inner learning rate over the job's rounds: constant, linear, cosine");
  app.add_option("--momentum", o.optimizer.momentum, "Inner momentum of sgd and nesterov");
  app.add_option("--weight-decay", o.optimizer.weight_decay, "Inner weight decay");
  app.add_option("--seed", o.seed, "Of the fresh parameters, should this worker bring the initial model");
  app.add_option("--eval-every", o.eval_every, "Rounds between evaluations on the test set; 0: at the end only");
  app.add_option("--rounds", o.rounds, "Leave after this round if the job has no limit of its own; 0: never");
  app.add_option("--codec", o.codec, "Encoding of the pushed delta: fp32, bf16, fp16, int8")
      ->check(CLI::IsMember({"fp32", "bf16", "fp16", "int8"}));
  app.footer(kExitCodesText);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    std::ostringstream out;
    const int code = app.exit(e, out, out);
    parsed.exit_code = code == 0 ? kExitDone : kExitUsage;
    parsed.text = out.str();
    return parsed;
  }
  if (absl::Status status = Interpret(devices, optimizer, schedule, &o); !status.ok()) {
    parsed.exit_code = kExitUsage;
    parsed.text = absl::StrCat(std::string(status.message()), "\nRun with --help for more information.\n");
    return parsed;
  }
  parsed.run = true;
  return parsed;
}

}  // namespace bmuf::worker
