// The command line of bmuf-worker.
#ifndef BMUF_WORKER_OPTIONS_H_
#define BMUF_WORKER_OPTIONS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "worker/data/dataset.h"
#include "worker/trainer/device.h"
#include "worker/trainer/trainer.h"

namespace bmuf::worker {

struct WorkerOptions {
  std::string coordinator;
  std::string job;
  std::string name;  // Default: host name and process id.
  std::vector<Device> devices;
  int threads_per_device = 1;
  std::string model = "mlp";
  std::string data = kFashionMnistDirectory;
  uint32_t batch_size = 64;
  OptimizerOptions optimizer;
  uint64_t seed = 0;        // Of fresh parameters; shards follow the job's seed.
  uint64_t eval_every = 0;  // Rounds; 0: at the end only.
  uint64_t rounds = 0;      // For a job without an end of its own.
  std::string codec = "fp32";
};

// What the command line asked for.
struct ParsedOptions {
  bool run = false;  // False: print `text` and end with `exit_code` (--help: 0; a mistake: 64).
  int exit_code = 0;
  std::string text;
  WorkerOptions options;
};

ParsedOptions ParseOptions(int argc, const char* const* argv);

}  // namespace bmuf::worker

#endif  // BMUF_WORKER_OPTIONS_H_
