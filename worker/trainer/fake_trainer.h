// A trainer for tests of what stands above it.
#ifndef BMUF_WORKER_TRAINER_FAKE_TRAINER_H_
#define BMUF_WORKER_TRAINER_FAKE_TRAINER_H_

#include <cstdint>
#include <vector>

#include "worker/trainer/trainer.h"

namespace bmuf::worker {

// "Trains" by adding, to its one parameter, the sum of its sample numbers; remembers what it was given.
class FakeTrainer : public Trainer {
 public:
  FakeTrainer() {
    v1::TensorSpec* t = manifest_.add_tensors();
    t->set_name("w");
    t->set_dtype(v1::DTYPE_F32);
    t->set_role(v1::TENSOR_ROLE_BMUF);
  }
  const v1::Manifest& manifest() const override { return manifest_; }
  absl::Status Load(const ModelState& state) override {
    w_ = state.bmuf[0];
    return absl::OkStatus();
  }
  absl::Status Store(ModelState* state) const override {
    state->bmuf[0] = w_;
    return absl::OkStatus();
  }
  const float* device_parameters() const override { return &w_; }
  absl::StatusOr<BlockResult> Train(const Block& block) override {
    if (fail) return absl::InternalError("no power");
    samples.assign(block.samples.begin(), block.samples.end());
    for (uint32_t i : samples) w_ += static_cast<float>(i);
    return BlockResult{samples.size(), samples.size() / block.batch_size, loss};
  }
  absl::Status ResetInnerState() override {
    ++resets;
    return absl::OkStatus();
  }
  absl::StatusOr<Evaluation> Evaluate() override { return Evaluation{1, w_, 0}; }

  bool fail = false;
  double loss = 0;
  int resets = 0;
  std::vector<uint32_t> samples;

 private:
  v1::Manifest manifest_;
  float w_ = 0;
};

}  // namespace bmuf::worker

#endif  // BMUF_WORKER_TRAINER_FAKE_TRAINER_H_
