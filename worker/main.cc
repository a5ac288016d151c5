// bmuf-worker: one process of K trajectories that trains in a job. This file knows every concrete class.
#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "core/base/clock.h"
#include "core/base/status_macros.h"
#include "worker/client_exchange.h"
#include "worker/data/dataset.h"
#include "worker/exit_codes.h"
#include "worker/options.h"
#include "worker/report.h"
#include "worker/trainer/node_reducer.h"
#include "worker/trainer/torch_trainer.h"
#include "worker/trainer/trajectories.h"
#include "worker/worker.h"

namespace bmuf::worker {
namespace {

// Written by the signal handler, which can reach nothing else. Threads of BLAS exist before main, so that masks would
// not do.
int signal_pipe_write = -1;

extern "C" void OnStopSignal(int) {
  const char byte = 's';
  [[maybe_unused]] const ssize_t ignored = write(signal_pipe_write, &byte, 1);
}

// Calls `stop` on the first SIGTERM or SIGINT; a second one ends the process as usual.
class StopOnSignal {
 public:
  explicit StopOnSignal(std::function<void()> stop) {
    if (pipe2(pipe_, O_CLOEXEC) != 0) return;
    signal_pipe_write = pipe_[1];
    struct sigaction action = {};
    action.sa_handler = OnStopSignal;
    action.sa_flags = SA_RESTART | SA_RESETHAND;
    sigaction(SIGTERM, &action, nullptr);
    sigaction(SIGINT, &action, nullptr);
    thread_ = std::thread([this, stop = std::move(stop)] {
      char byte = 0;
      while (read(pipe_[0], &byte, 1) < 0 && errno == EINTR) {
      }
      if (byte == 's') stop();
    });
  }
  ~StopOnSignal() {
    if (!thread_.joinable()) return;
    signal(SIGTERM, SIG_DFL);
    signal(SIGINT, SIG_DFL);
    const char byte = 'e';
    [[maybe_unused]] const ssize_t ignored = write(pipe_[1], &byte, 1);
    thread_.join();
    close(pipe_[0]);
    close(pipe_[1]);
  }

 private:
  int pipe_[2] = {-1, -1};
  std::thread thread_;
};

int Fail(int code, const absl::Status& status) {
  std::fprintf(stderr, "bmuf-worker: %s\n", std::string(status.message()).c_str());
  return code;
}

absl::StatusOr<std::unique_ptr<Trajectories>> NewTrajectories(const WorkerOptions& options,
                                                              std::shared_ptr<const ImageData> data, Report& report) {
  std::vector<std::unique_ptr<Trainer>> trainers;
  for (const Device& device : options.devices) {
    TorchTrainerOptions torch;
    torch.model = options.model;
    torch.optimizer = options.optimizer;
    torch.device = device;
    torch.threads = options.threads_per_device;
    torch.seed = options.seed;
    ASSIGN_OR_RETURN(std::unique_ptr<Trainer> trainer, NewTorchTrainer(torch, data));
    trainers.push_back(std::move(trainer));
  }
  std::unique_ptr<NodeReducer> reducer = NewCpuNodeReducer();
  const bool gpus_only = std::all_of(options.devices.begin(), options.devices.end(),
                                     [](const Device& d) { return d.kind == Device::Kind::kCuda; });
  if (gpus_only && options.devices.size() > 1) {
    auto nccl = NewNcclNodeReducer(options.devices);
    if (nccl.ok()) {
      reducer = *std::move(nccl);
    } else {
      report.Line(absl::StrCat("reducing on the CPU: ", std::string(nccl.status().message())));
    }
  }
  return std::make_unique<Trajectories>(std::move(trainers), std::move(reducer), data->train.size());
}

v1::Codec CodecOf(const std::string& name) {
  if (name == "bf16") return v1::CODEC_BF16;
  if (name == "fp16") return v1::CODEC_FP16;
  if (name == "int8") return v1::CODEC_INT8;
  return v1::CODEC_FP32;
}

int ExitCodeOf(Finish::Outcome outcome) {
  switch (outcome) {
    case Finish::Outcome::kDone:
    case Finish::Outcome::kStopped:
      return kExitDone;
    case Finish::Outcome::kUnreachable:
      return kExitUnreachable;
    case Finish::Outcome::kRefused:
    case Finish::Outcome::kJobFailed:
      return kExitRefused;
  }
  return kExitInternal;
}

int ExitCodeOfModel(const absl::Status& status) {
  if (absl::IsNotFound(status) || absl::IsInvalidArgument(status)) return kExitData;
  return absl::IsFailedPrecondition(status) ? kExitDeviceMissing : kExitInternal;
}

int Main(int argc, char** argv) {
  const ParsedOptions parsed = ParseOptions(argc, argv);
  if (!parsed.run) {
    std::fputs(parsed.text.c_str(), parsed.exit_code == kExitDone ? stdout : stderr);
    return parsed.exit_code;
  }
  const WorkerOptions& options = parsed.options;
  Report report(stdout, isatty(STDOUT_FILENO) != 0);

  absl::StatusOr<ImageData> loaded = LoadImageData(options.data);
  if (!loaded.ok()) return Fail(kExitData, loaded.status());
  const auto data = std::make_shared<const ImageData>(*std::move(loaded));
  absl::StatusOr<std::unique_ptr<Trajectories>> trajectories = NewTrajectories(options, data, report);
  if (!trajectories.ok()) return Fail(ExitCodeOfModel(trajectories.status()), trajectories.status());
  const ModelState sizes = ModelState::For((*trajectories)->manifest());
  report.Line(absl::StrFormat("worker %s: model %s with %d parameters, %d trajectories, %d training samples",
                              options.name, options.model, sizes.bmuf.size(), (*trajectories)->count(),
                              data->train.size()));

  client::LinkOptions link;
  link.target = options.coordinator;
  link.job = options.job;
  link.worker = options.name;
  link.trajectories = (*trajectories)->count();
  link.client_info = "bmuf-worker";
  link.log = [&report](const std::string& text) { report.Line(text); };
  auto exchange = ClientExchange::Create(std::move(link), (*trajectories)->manifest(), CodecOf(options.codec));
  if (!exchange.ok()) return Fail(kExitUsage, exchange.status());

  Worker::Options worker_options;
  worker_options.batch_size = options.batch_size;
  worker_options.loop.rounds = options.rounds;
  worker_options.loop.eval_every = options.eval_every;
  Worker worker(worker_options, **trajectories, **exchange, Clock::Real(), report);
  absl::StatusOr<Finish> finish = absl::InternalError("not started");
  {
    StopOnSignal stop([&worker] { worker.RequestStop(); });
    finish = worker.Run();
  }
  if (!finish.ok()) return Fail(kExitInternal, finish.status());
  const int code = ExitCodeOf(finish->outcome);
  if (code != kExitDone) return Fail(code, absl::UnknownError(finish->reason));
  if (finish->outcome == Finish::Outcome::kStopped) report.Line("stopped by a signal");
  return code;
}

}  // namespace
}  // namespace bmuf::worker

int main(int argc, char** argv) { return bmuf::worker::Main(argc, argv); }
