// What the block loop needs of something that trains.
//
// Problem: the loop, the exchange and the tests must not know which framework does the arithmetic.
// Idea: a model is a manifest and two runs of bytes in the wire's layout (see Manifest in proto/bmuf/v1/types.proto):
// one float32 vector of all `bmuf` tensors, and the raw values of the auxiliary ones (`mean`, `max`, `first`).
// Usage:  ASSIGN_OR_RETURN(auto trainer, NewTorchTrainer(options, data));       // worker/trainer/torch_trainer.h
//         trainer->Load(broadcast); trainer->Train(block); trainer->Store(&local);
#ifndef BMUF_WORKER_TRAINER_TRAINER_H_
#define BMUF_WORKER_TRAINER_TRAINER_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "bmuf/v1/types.pb.h"
#include "core/base/aligned_buffer.h"
#include "worker/trainer/schedule.h"

namespace bmuf::worker {

// Values of one model in the layout of its manifest.
struct ModelState {
  AlignedBuffer<float> bmuf;         // All tensors of role BMUF, in order, row-major.
  AlignedBuffer<uint8_t> auxiliary;  // Those of role MEAN, MAX and FIRST, in order, little-endian, without padding.

  // Zeros of the right sizes.
  static ModelState For(const v1::Manifest& manifest);
  ModelState Clone() const { return {bmuf.Clone(), auxiliary.Clone()}; }
};

// Elements of one tensor; 1 for a scalar.
size_t ElementCount(const v1::TensorSpec& tensor);
// Bytes of one element; 0 if the type is unknown.
size_t ElementBytes(v1::DType dtype);

enum class OptimizerKind { kSgd, kNesterov, kAdamW };

// "sgd" (heavy ball), "nesterov" or "adamw"; INVALID_ARGUMENT names the choices.
absl::StatusOr<OptimizerKind> ParseOptimizer(const std::string& name);

// The inner optimizer. Formulas as in torch.optim.{SGD,AdamW}.
struct OptimizerOptions {
  OptimizerKind kind = OptimizerKind::kSgd;
  Schedule schedule = Schedule::kLinear;
  double learning_rate = 0.05;
  double momentum = 0.9;      // sgd, nesterov.
  double weight_decay = 0.0;  // sgd, nesterov: added to the gradient; adamw: decoupled.
  double beta1 = 0.9;         // adamw.
  double beta2 = 0.999;       // adamw.
  double epsilon = 1e-8;      // adamw.
};

// Some local steps.
struct Block {
  absl::Span<const uint32_t> samples;  // Indices into the training set; `batch_size` of them make one step.
  uint32_t batch_size = 64;
  // Position in the whole training, in [0, 1], before the first and after the last step: for the schedule.
  double progress_begin = 0;
  double progress_end = 0;
};

struct BlockResult {
  uint64_t samples = 0;
  uint64_t steps = 0;
  double loss = 0;  // Mean over the steps; not finite if the training diverged.
};

struct Evaluation {
  uint64_t samples = 0;
  double loss = 0;      // Mean cross entropy.
  double accuracy = 0;  // In [0, 1].
};

// One trajectory: a model, its inner optimizer and its training set. Thread-compatible: one call at a time, from any
// thread. Every call blocks for as long as it computes. Statuses beside those named: INTERNAL (a fault of the
// framework; its text follows); the parameters are then undefined until the next Load.
class Trainer {
 public:
  virtual ~Trainer() = default;

  // The model's tensors. Constant.
  virtual const v1::Manifest& manifest() const = 0;

  // Takes all values from `state`. INVALID_ARGUMENT on wrong sizes, nothing changed. Inner optimizer state stays.
  virtual absl::Status Load(const ModelState& state) = 0;
  // Writes all values to `state`, which must have the manifest's sizes (INVALID_ARGUMENT otherwise).
  virtual absl::Status Store(ModelState* state) const = 0;
  // The bmuf section where it lives: in the memory of the trainer's device. Valid as long as the trainer.
  virtual const float* device_parameters() const = 0;

  // Trains floor(samples / batch_size) steps. INVALID_ARGUMENT if that is 0 or an index is beyond the data.
  virtual absl::StatusOr<BlockResult> Train(const Block& block) = 0;

  // Forgets momentum and moments of the inner optimizer; parameters stay.
  virtual absl::Status ResetInnerState() = 0;

  // Loss and accuracy on the whole test set, in evaluation mode.
  virtual absl::StatusOr<Evaluation> Evaluate() = 0;
};

}  // namespace bmuf::worker

#endif  // BMUF_WORKER_TRAINER_TRAINER_H_
