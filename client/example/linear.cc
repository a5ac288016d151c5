// A whole worker in C++: fits y = <truth, x> by SGD in blocks. Its Python twin is linear.py; both may train in one job.
//   linear HOST:PORT JOB WORKER
#include <cstdio>
#include <random>
#include <vector>

#include "client/bmuf.h"

namespace {

constexpr size_t kInputs = 8;
constexpr float kLearningRate = 0.05f;

// One block of plain SGD on `w`; samples are drawn from `random`.
bmuf::BlockFacts TrainBlock(std::vector<float>& w, uint32_t steps, std::mt19937& random) {
  std::normal_distribution<float> normal;
  double loss = 0;
  for (uint32_t step = 0; step < steps; ++step) {
    float x[kInputs], error = 0;
    for (size_t i = 0; i < kInputs; ++i) {
      x[i] = normal(random);
      error += (w[i] - static_cast<float>(i)) * x[i];  // The truth is 0, 1, 2, ...
    }
    for (size_t i = 0; i < kInputs; ++i) w[i] -= kLearningRate * error * x[i];
    loss += 0.5 * error * error;
  }
  bmuf::BlockFacts facts;
  facts.samples = facts.steps = steps;
  facts.metrics["loss"] = loss / steps;
  return facts;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) return std::fprintf(stderr, "usage: linear HOST:PORT JOB WORKER\n"), 64;
  std::vector<float> w(kInputs, 0.0f);
  bmuf::Options options;
  options.target = argv[1];
  options.job = argv[2];
  options.worker = argv[3];
  options.log = [](const std::string& line) { std::fprintf(stderr, "%s\n", line.c_str()); };

  auto session = bmuf::Session::Join(options, {{"w", {kInputs}, w.data()}});
  if (!session.ok()) return std::fprintf(stderr, "%s\n", session.status().ToString().c_str()), 69;
  std::mt19937 random((*session)->rank());
  while (!(*session)->done()) {
    bmuf::BlockFacts facts = TrainBlock(w, (*session)->block_steps(), random);
    if (absl::Status s = (*session)->Sync(facts); !s.ok()) {
      return std::fprintf(stderr, "%s\n", s.ToString().c_str()), 69;
    }
  }
  std::printf("version %llu w", static_cast<unsigned long long>((*session)->version()));
  for (float value : w) std::printf(" %.9g", static_cast<double>(value));
  std::printf("\n");
  return 0;
}
