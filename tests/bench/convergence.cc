// What block momentum costs in accuracy: the same data, the same total number of samples, one or many trajectories.
//
// Problem: N workers that meet every H steps do N times fewer steps each; how much of the accuracy is lost depends on
// the outer rule, H, the inner optimizer and the data, and only a measurement says it.
// Idea: trainers and the coordinator's own block filter in one process, without a network. One trajectory with plain
// SGD is the reference; then every combination of --trajectories, --rules, --steps and --reset with the same total
// samples. Usage:  bazel run --config=opt //tests/bench:convergence -- --json out.json --plot out.svg
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/synchronization/blocking_counter.h"
#include "core/base/clock.h"
#include "core/base/status_macros.h"
#include "core/base/thread_pool.h"
#include "core/filter/filter.h"
#include "core/kernels/kernels.h"
#include "nlohmann/json.hpp"
#include "tests/bench/convergence_plot.h"
#include "worker/data/dataset.h"
#include "worker/data/sample_stream.h"
#include "worker/trainer/node_reducer.h"
#include "worker/trainer/torch_trainer.h"

namespace bmuf::bench {
namespace {

using worker::Block;
using worker::BlockResult;
using worker::Evaluation;
using worker::ImageData;
using worker::ModelState;
using worker::SampleStream;
using worker::TorchTrainerOptions;
using worker::Trainer;

struct Settings {
  std::string data = worker::kFashionMnistDirectory;
  std::string model = "mlp";
  std::string optimizer = "sgd";
  std::string schedule = "linear";
  double learning_rate = 0.05;
  double momentum = 0.9;
  double weight_decay = 0;
  double epochs = 20;
  uint32_t batch_size = 64;
  uint64_t seed = 1;
  uint32_t warmup_steps = 0;
  int threads = 2;
  int points = 15;
  std::vector<uint32_t> trajectories = {4, 8, 16};
  std::vector<std::string> rules = {"averaging", "classical", "nesterov", "diloco"};
  std::vector<uint32_t> steps = {10, 40};
  std::vector<std::string> resets = {"on"};
  double reference_learning_rate = 0;
  bool no_reference = false;
  std::string json, plot;
};

// One line of the table.
struct Run {
  std::string rule;
  uint32_t trajectories = 1;
  double block_learning_rate = 1;
  double block_momentum = 0;
  uint32_t block_steps = 0;
  bool reset = true;
  // Results.
  uint64_t rounds = 0;
  uint64_t samples_per_trajectory = 0;
  Evaluation final;
  double seconds = 0;
  bool diverged = false;  // A model was not finite; the run ended there.
  Curve curve;            // x = samples per trajectory, y = accuracy.
};

absl::StatusOr<Run> RunOf(const std::string& rule, uint32_t trajectories, uint32_t steps, bool reset) {
  Run run;
  run.rule = rule;
  run.trajectories = trajectories;
  run.block_steps = steps;
  run.reset = reset;
  if (rule == "classical" || rule == "nesterov") {
    run.block_momentum = 1 - 1.0 / trajectories;
  } else if (rule == "diloco") {
    run.block_learning_rate = 0.7;
    run.block_momentum = 0.9;
  } else if (rule != "averaging") {
    return absl::InvalidArgumentError(
        absl::StrCat("rule \"", rule, "\": choose averaging, classical, nesterov, diloco"));
  }
  return run;
}

// The coordinator's arithmetic: exact accumulation, mean, block filter. The reference just keeps its parameters.
class Outer {
 public:
  static absl::StatusOr<std::unique_ptr<Outer>> New(const Run& run, const v1::Manifest& manifest,
                                                    const ModelState& initial) {
    ASSIGN_OR_RETURN(const Kernels* kernels, KernelsByName("auto"));
    return std::unique_ptr<Outer>(new Outer(run, manifest, *kernels, initial));
  }

  // Turns `broadcast` into the next version. DATA_LOSS if a local model is not finite; nothing changed then.
  absl::Status Commit(const std::vector<ModelState>& locals, ModelState* broadcast) {
    if (run_.rule == "reference") {
      *broadcast = locals[0].Clone();
      return absl::OkStatus();
    }
    const size_t n = model_.size();
    std::fill(sum_.begin(), sum_.end(), 0.0);
    std::vector<AlignedBuffer<uint8_t>> auxiliary;
    for (const ModelState& local : locals) {
      kernels_.subtract(scratch_.data(), local.bmuf.data(), broadcast->bmuf.data(), n);
      if (kernels_.first_non_finite(scratch_.data(), n) != n) return absl::DataLossError("not finite");
      kernels_.accumulate(sum_.data(), scratch_.data(), 1.0, n);
      auxiliary.push_back(local.auxiliary.Clone());
    }
    kernels_.mean(scratch_.data(), sum_.data(), static_cast<double>(locals.size()), n);
    OuterArrays arrays;
    arrays.mean = scratch_.data();
    arrays.model_in = arrays.model_out = model_.data();
    arrays.v_in = arrays.v_out = v_.data();
    arrays.broadcast_out = ArraysOf(step_.variant).look_ahead ? broadcast->bmuf.data() : nullptr;
    ApplyFilter(kernels_, step_, arrays, 0, n);
    if (arrays.broadcast_out == nullptr) broadcast->bmuf = model_.Clone();
    return worker::ReduceAuxiliary(manifest_, auxiliary, &broadcast->auxiliary);
  }

 private:
  Outer(const Run& run, const v1::Manifest& manifest, const Kernels& kernels, const ModelState& initial)
      : run_(run),
        manifest_(manifest),
        kernels_(kernels),
        model_(initial.bmuf.Clone()),
        v_(initial.bmuf.size()),
        scratch_(initial.bmuf.size()),
        sum_(initial.bmuf.size()) {
    v1::OuterOptimizer outer;
    outer.set_variant(run.rule == "averaging"   ? v1::VARIANT_AVERAGING
                      : run.rule == "classical" ? v1::VARIANT_CLASSICAL
                                                : v1::VARIANT_NESTEROV);
    outer.set_block_learning_rate(run.block_learning_rate);
    outer.set_block_momentum(run.block_momentum);
    step_ = ResolveStep(outer, run.trajectories, 1.0);
  }

  const Run run_;
  const v1::Manifest manifest_;
  const Kernels& kernels_;
  FilterStep step_;
  AlignedBuffer<float> model_, v_, scratch_;
  AlignedBuffer<double> sum_;
};

class Experiment {
 public:
  Experiment(const Settings& settings, std::shared_ptr<const ImageData> data)
      : settings_(settings), data_(std::move(data)), pool_("bench", std::max(settings.threads, 1)) {}

  absl::Status Train(Run* run) {
    const MonotonicTime start = Clock::Real().Now();
    const uint64_t block = uint64_t{run->block_steps} * settings_.batch_size;
    const auto total = static_cast<uint64_t>(settings_.epochs * static_cast<double>(data_->train.size()));
    const uint64_t per_round = block * run->trajectories;
    const uint64_t warmup = uint64_t{settings_.warmup_steps} * settings_.batch_size;
    run->rounds = total > warmup ? (total - warmup) / per_round : 0;
    if (run->rounds == 0) return absl::InvalidArgumentError("fewer samples than one round needs");

    std::vector<std::unique_ptr<Trainer>> trainers(run->trajectories);
    for (auto& trainer : trainers) {
      ASSIGN_OR_RETURN(trainer, worker::NewTorchTrainer(TrainerOptions(*run), data_));
    }
    ModelState model = ModelState::For(trainers[0]->manifest());
    SampleStream stream(settings_.seed, data_->train.size());
    if (warmup > 0) {
      const std::vector<uint32_t> samples = stream.Slice(0, warmup);
      RETURN_IF_ERROR(trainers[0]->Train(BlockOf(samples, 0, warmup, total)).status());
      RETURN_IF_ERROR(trainers[0]->ResetInnerState());
    }
    RETURN_IF_ERROR(trainers[0]->Store(&model));
    ASSIGN_OR_RETURN(std::unique_ptr<Outer> outer, Outer::New(*run, trainers[0]->manifest(), model));

    std::vector<ModelState> locals;
    for (uint32_t k = 0; k < run->trajectories; ++k) locals.push_back(model.Clone());
    uint64_t position = warmup;
    for (uint64_t round = 1; round <= run->rounds; ++round) {
      const std::vector<uint32_t> samples = stream.Slice(position, per_round);
      RETURN_IF_ERROR(ForEach(run->trajectories, [&](size_t k) -> absl::Status {
        Trainer& trainer = *trainers[k];
        RETURN_IF_ERROR(trainer.Load(model));
        if (run->reset && round > 1) RETURN_IF_ERROR(trainer.ResetInnerState());
        const auto mine = absl::MakeConstSpan(samples).subspan(k * block, block);
        RETURN_IF_ERROR(trainer.Train(BlockOf(mine, position, position + per_round, total)).status());
        return trainer.Store(&locals[k]);
      }));
      position += per_round;
      const absl::Status committed = outer->Commit(locals, &model);
      run->diverged = absl::IsDataLoss(committed);
      if (!run->diverged) RETURN_IF_ERROR(committed);
      const uint64_t points = static_cast<uint64_t>(std::max(settings_.points, 1));
      if (round * points / run->rounds != (round - 1) * points / run->rounds || round == run->rounds || run->diverged) {
        RETURN_IF_ERROR(trainers[0]->Load(model));
        ASSIGN_OR_RETURN(run->final, trainers[0]->Evaluate());
        run->curve.emplace_back(static_cast<double>(warmup + round * block), run->final.accuracy);
      }
      if (run->diverged) break;  // The coordinator refuses such a delta.
    }
    run->samples_per_trajectory = warmup + run->rounds * block;
    run->seconds = absl::ToDoubleSeconds(Clock::Real().Now() - start);
    return absl::OkStatus();
  }

 private:
  TorchTrainerOptions TrainerOptions(const Run& run) const {
    TorchTrainerOptions options;
    options.model = settings_.model;
    options.seed = settings_.seed;
    options.optimizer.kind = *worker::ParseOptimizer(settings_.optimizer);
    options.optimizer.schedule = *worker::ParseSchedule(settings_.schedule);
    const bool reference = run.rule == "reference" && settings_.reference_learning_rate > 0;
    options.optimizer.learning_rate = reference ? settings_.reference_learning_rate : settings_.learning_rate;
    options.optimizer.momentum = settings_.momentum;
    options.optimizer.weight_decay = settings_.weight_decay;
    return options;
  }

  Block BlockOf(absl::Span<const uint32_t> samples, uint64_t begin, uint64_t end, uint64_t total) const {
    Block block;
    block.samples = samples;
    block.batch_size = settings_.batch_size;
    block.progress_begin = static_cast<double>(begin) / static_cast<double>(total);
    block.progress_end = static_cast<double>(end) / static_cast<double>(total);
    return block;
  }

  absl::Status ForEach(size_t count, const std::function<absl::Status(size_t)>& body) {
    std::vector<absl::Status> results(count);
    absl::BlockingCounter left(static_cast<int>(count));
    for (size_t k = 0; k < count; ++k) {
      pool_.Schedule([&, k] {
        results[k] = body(k);
        left.DecrementCount();
      });
    }
    left.Wait();
    for (const absl::Status& status : results) RETURN_IF_ERROR(status);
    return absl::OkStatus();
  }

  const Settings settings_;
  const std::shared_ptr<const ImageData> data_;
  ThreadPool pool_;
};

std::string Label(const Run& run) {
  if (run.rule == "reference") return "one trajectory, plain SGD";
  std::string name = run.rule == "diloco" ? "nesterov" : run.rule;
  if (run.rule != "averaging") {
    absl::StrAppendFormat(&name, " ζ=%.3g η=%.3g", run.block_learning_rate, run.block_momentum);
  }
  absl::StrAppendFormat(&name, ", H=%u, %s", run.block_steps, run.reset ? "reset" : "kept");
  return name;
}

constexpr char kRow[] = "%-12s %-10s %5s %6s %5s %6s %7s %13s %9s %8s %8s\n";

void PrintHeader() {
  std::printf(kRow, "trajectories", "rule", "zeta", "eta", "H", "reset", "rounds", "samples/traj.", "accuracy",
              "gap/pp", "seconds");
  std::fflush(stdout);
}

void PrintRow(const Run& run, double reference) {
  const bool single = run.rule == "reference";
  const std::string gap =
      std::isfinite(reference) ? absl::StrFormat("%+.2f", (run.final.accuracy - reference) * 100) : "";
  std::printf(kRow, absl::StrCat(run.trajectories).c_str(), run.rule.c_str(),
              single ? "-" : absl::StrFormat("%.3g", run.block_learning_rate).c_str(),
              single ? "-" : absl::StrFormat("%.4g", run.block_momentum).c_str(),
              single ? "-" : absl::StrCat(run.block_steps).c_str(),
              single      ? "-"
              : run.reset ? "on"
                          : "off",
              single ? "-" : absl::StrCat(run.rounds).c_str(), absl::StrCat(run.samples_per_trajectory).c_str(),
              (run.diverged ? std::string("diverged") : absl::StrFormat("%.4f", run.final.accuracy)).c_str(),
              gap.c_str(), absl::StrFormat("%.1f", run.seconds).c_str());
  std::fflush(stdout);
}

nlohmann::json ToJson(const Settings& settings, const std::vector<Run>& runs) {
  nlohmann::json out;
  out["settings"] = {{"model", settings.model},
                     {"optimizer", settings.optimizer},
                     {"schedule", settings.schedule},
                     {"learning_rate", settings.learning_rate},
                     {"momentum", settings.momentum},
                     {"weight_decay", settings.weight_decay},
                     {"epochs", settings.epochs},
                     {"batch_size", settings.batch_size},
                     {"warmup_steps", settings.warmup_steps},
                     {"seed", settings.seed}};
  for (const Run& run : runs) {
    nlohmann::json row = {{"trajectories", run.trajectories},
                          {"rule", run.rule},
                          {"block_learning_rate", run.block_learning_rate},
                          {"block_momentum", run.block_momentum},
                          {"block_steps", run.block_steps},
                          {"reset_inner_state", run.reset},
                          {"rounds", run.rounds},
                          {"samples_per_trajectory", run.samples_per_trajectory},
                          {"diverged", run.diverged},
                          {"accuracy", run.final.accuracy},
                          {"loss", run.final.loss},
                          {"seconds", run.seconds}};
    for (const auto& [x, y] : run.curve) row["curve"].push_back({{"samples_per_trajectory", x}, {"accuracy", y}});
    out["runs"].push_back(row);
  }
  return out;
}

absl::Status WriteFile(const std::string& path, const std::string& text) {
  std::ofstream file(path);
  file << text;
  file.close();
  if (file.fail()) return absl::UnavailableError(absl::StrCat(path, ": cannot be written"));
  return absl::OkStatus();
}

// One panel for each number of trajectories, the reference in all of them.
std::string PlotOf(const std::vector<Run>& runs) {
  std::map<uint32_t, Panel> panels;
  const Run* reference = nullptr;
  for (const Run& run : runs) {
    if (run.rule == "reference") {
      reference = &run;
      continue;
    }
    Panel& panel = panels[run.trajectories];
    panel.title = absl::StrCat(run.trajectories, " trajectories");
    panel.lines.push_back({Label(run), run.curve, false});
  }
  std::vector<Panel> ordered;
  for (auto& [trajectories, panel] : panels) {
    if (reference != nullptr) panel.lines.push_back({Label(*reference), reference->curve, true});
    ordered.push_back(std::move(panel));
  }
  return PlotSvg("Test accuracy against samples per trajectory (same total)", "samples per trajectory", "test accuracy",
                 ordered);
}

absl::Status RunAll(const Settings& settings) {
  RETURN_IF_ERROR(worker::ParseOptimizer(settings.optimizer).status());
  RETURN_IF_ERROR(worker::ParseSchedule(settings.schedule).status());
  std::vector<Run> runs;
  if (!settings.no_reference) {
    Run reference;
    reference.rule = "reference";
    reference.block_steps = settings.steps[0];
    reference.reset = false;
    runs.push_back(reference);
  }
  for (uint32_t n : settings.trajectories) {
    for (uint32_t h : settings.steps) {
      for (const std::string& reset : settings.resets) {
        for (const std::string& rule : settings.rules) {
          ASSIGN_OR_RETURN(Run run, RunOf(rule, n, h, reset == "on"));
          runs.push_back(std::move(run));
        }
      }
    }
  }
  ASSIGN_OR_RETURN(ImageData loaded, worker::LoadImageData(settings.data));
  const auto data = std::make_shared<const ImageData>(std::move(loaded));
  std::printf("%s, %zu training samples x %g passes in every run, batch %u, %s lr %g %s\n\n", settings.model.c_str(),
              data->train.size(), settings.epochs, settings.batch_size, settings.optimizer.c_str(),
              settings.learning_rate, settings.schedule.c_str());
  PrintHeader();
  Experiment experiment(settings, data);
  double reference = std::nan("");
  for (Run& run : runs) {
    RETURN_IF_ERROR(experiment.Train(&run));
    if (run.rule == "reference") reference = run.final.accuracy;
    PrintRow(run, reference);
  }
  if (!settings.json.empty()) RETURN_IF_ERROR(WriteFile(settings.json, ToJson(settings, runs).dump(2) + "\n"));
  if (!settings.plot.empty()) RETURN_IF_ERROR(WriteFile(settings.plot, PlotOf(runs)));
  return absl::OkStatus();
}

int Main(int argc, char** argv) {
  Settings s;
  CLI::App app("Accuracy of many trajectories under block momentum against one with plain SGD, on Fashion-MNIST.");
  app.option_defaults()->always_capture_default();
  app.add_option("--data", s.data, "Directory of the IDX files");
  app.add_option("--model", s.model, "mlp, cnn or a TorchScript file");
  app.add_option("--optimizer", s.optimizer, "Inner optimizer: sgd, nesterov, adamw");
  app.add_option("--schedule", s.schedule, "Inner learning rate over the run: constant, linear, cosine");
  app.add_option("--lr", s.learning_rate, "Inner learning rate");
  app.add_option("--reference-lr", s.reference_learning_rate, "That of the reference; 0: the same");
  app.add_option("--momentum", s.momentum, "Inner momentum");
  app.add_option("--weight-decay", s.weight_decay, "Inner weight decay");
  app.add_option("--epochs", s.epochs, "Passes over the data of every run, all trajectories together")
      ->check(CLI::PositiveNumber);
  app.add_option("--batch-size", s.batch_size, "Samples of one local step")->check(CLI::PositiveNumber);
  app.add_option("--seed", s.seed, "Of parameters and shards");
  app.add_option("--warmup-steps", s.warmup_steps, "Steps that one trajectory trains before the first round");
  app.add_option("--threads", s.threads, "Trajectories that train at the same time")->check(CLI::PositiveNumber);
  app.add_option("--points", s.points, "Evaluations along a run")->check(CLI::PositiveNumber);
  app.add_option("--trajectories", s.trajectories, "Numbers of trajectories")
      ->delimiter(',')
      ->check(CLI::PositiveNumber);
  app.add_option("--rules", s.rules,
                 "averaging; classical and nesterov with eta = 1 - 1/N; diloco: nesterov, zeta 0.7, eta 0.9")
      ->delimiter(',');
  app.add_option("--steps", s.steps, "Local steps of a block (H)")->delimiter(',')->check(CLI::PositiveNumber);
  app.add_option("--reset", s.resets, "Inner state after a block: on (reset), off (kept)")
      ->delimiter(',')
      ->check(CLI::IsMember({"on", "off"}));
  app.add_flag("--no-reference", s.no_reference, "Skip the single trajectory");
  app.add_option("--json", s.json, "Write all results here");
  app.add_option("--plot", s.plot, "Write an SVG of accuracy against samples per trajectory here");
  CLI11_PARSE(app, argc, argv);
  // `bazel run` starts elsewhere; files belong where the person is.
  if (const char* directory = std::getenv("BUILD_WORKING_DIRECTORY"); directory != nullptr && chdir(directory) != 0) {
    std::perror(directory);
    return 1;
  }
  const absl::Status status = RunAll(s);
  if (status.ok()) return 0;
  std::fprintf(stderr, "convergence: %s\n", std::string(status.message()).c_str());
  return 1;
}

}  // namespace
}  // namespace bmuf::bench

int main(int argc, char** argv) { return bmuf::bench::Main(argc, argv); }
