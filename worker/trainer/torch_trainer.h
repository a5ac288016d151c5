// A Trainer on libtorch: image classification with cross entropy.
//
// Models: `mlp` (pixels-256-128-classes, ReLU), `cnn` (two 3x3 convolutions of 16 and 32 channels with batch norm, ReLU
// and 2x2 max pooling, then 128 and classes), or the path of a TorchScript file whose forward takes float32 images
// [batch, 1, rows, columns] and returns logits [batch, classes]. Pixels are standardised with mean and deviation of the
// training set.
//
// Roles: trained parameters `bmuf`, frozen parameters `first`, float32 buffers `mean`, int32 and int64 buffers `max`.
// All parameters live in one vector, and their gradients in another: the optimizer is a few vector operations and the
// exchange copies nothing together.
#ifndef BMUF_WORKER_TRAINER_TORCH_TRAINER_H_
#define BMUF_WORKER_TRAINER_TORCH_TRAINER_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "worker/data/dataset.h"
#include "worker/trainer/device.h"
#include "worker/trainer/trainer.h"

namespace bmuf::worker {

struct TorchTrainerOptions {
  std::string model = "mlp";  // mlp, cnn or the path of a TorchScript file.
  OptimizerOptions optimizer;
  Device device;
  int threads = 1;    // CPU threads of one trajectory.
  uint64_t seed = 0;  // Of the initial parameters.
};

// Builds the model with fresh parameters from `seed` (a TorchScript file brings its own). Not thread-safe against
// itself: it seeds the framework's global generator. Statuses: INVALID_ARGUMENT (a model that does not fit the images,
// or with tensors of a type that cannot be exchanged; the tensor is named), NOT_FOUND (no such file),
// FAILED_PRECONDITION (a GPU was asked for and this libtorch has none), INTERNAL (the framework's own text).
absl::StatusOr<std::unique_ptr<Trainer>> NewTorchTrainer(const TorchTrainerOptions& options,
                                                         std::shared_ptr<const ImageData> data);

}  // namespace bmuf::worker

#endif  // BMUF_WORKER_TRAINER_TORCH_TRAINER_H_
