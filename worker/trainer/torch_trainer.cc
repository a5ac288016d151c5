#include "worker/trainer/torch_trainer.h"

#include <dlfcn.h>
#include <torch/script.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <functional>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/limits.h"
#include "core/base/status_macros.h"

namespace bmuf::worker {
namespace {

constexpr int64_t kEvaluationBatch = 500;

// Runs `body` (returning absl::Status), turning what libtorch throws into a status.
template <typename Body>
absl::Status Guarded(const char* what, Body body) {
  try {
    return body();
  } catch (const c10::Error& e) {
    return absl::InternalError(absl::StrCat(what, ": ", e.what_without_backtrace()));
  } catch (const std::exception& e) {
    return absl::InternalError(absl::StrCat(what, ": ", e.what()));
  }
}

// OpenBLAS would start a pool of its own below every trajectory; libtorch does not pass its setting on.
void SetThreads(int threads) {
  at::set_num_threads(threads);
  using SetOpenBlasThreads = void (*)(int);
  static const auto set_blas = reinterpret_cast<SetOpenBlasThreads>(dlsym(RTLD_DEFAULT, "openblas_set_num_threads"));
  if (set_blas != nullptr) set_blas(threads);
}

struct MlpImpl : torch::nn::Module {
  MlpImpl(int64_t inputs, int64_t classes)
      : fc1(register_module("fc1", torch::nn::Linear(inputs, 256))),
        fc2(register_module("fc2", torch::nn::Linear(256, 128))),
        fc3(register_module("fc3", torch::nn::Linear(128, classes))) {}
  torch::Tensor forward(const torch::Tensor& x) { return fc3(torch::relu(fc2(torch::relu(fc1(x.flatten(1)))))); }
  torch::nn::Linear fc1, fc2, fc3;
};

struct CnnImpl : torch::nn::Module {
  CnnImpl(int64_t rows, int64_t columns, int64_t classes)
      : conv1(register_module("conv1", Convolution(1, 16))),
        bn1(register_module("bn1", torch::nn::BatchNorm2d(16))),
        conv2(register_module("conv2", Convolution(16, 32))),
        bn2(register_module("bn2", torch::nn::BatchNorm2d(32))),
        fc1(register_module("fc1", torch::nn::Linear(32 * (rows / 4) * (columns / 4), 128))),
        fc2(register_module("fc2", torch::nn::Linear(128, classes))) {}
  torch::Tensor forward(torch::Tensor x) {
    x = torch::max_pool2d(torch::relu(bn1(conv1(x))), 2);
    x = torch::max_pool2d(torch::relu(bn2(conv2(x))), 2);
    return fc2(torch::relu(fc1(x.flatten(1))));
  }
  // Without bias: batch norm takes it out again.
  static torch::nn::Conv2d Convolution(int64_t in, int64_t out) {
    return torch::nn::Conv2d(torch::nn::Conv2dOptions(in, out, 3).padding(1).bias(false));
  }
  torch::nn::Conv2d conv1;
  torch::nn::BatchNorm2d bn1;
  torch::nn::Conv2d conv2;
  torch::nn::BatchNorm2d bn2;
  torch::nn::Linear fc1, fc2;
};

struct NamedTensor {
  std::string name;
  torch::Tensor tensor;
};

// A C++ module or a TorchScript one behind the same few calls.
struct Model {
  std::function<torch::Tensor(const torch::Tensor&)> forward;
  std::function<void(bool)> set_training;
  std::vector<NamedTensor> parameters;
  std::vector<NamedTensor> buffers;
};

template <typename M>
Model FromModule(std::shared_ptr<M> module, torch::Device device) {
  module->to(device);
  Model model;
  model.forward = [module](const torch::Tensor& x) { return module->forward(x); };
  model.set_training = [module](bool on) { module->train(on); };
  for (const auto& p : module->named_parameters()) model.parameters.push_back({p.key(), p.value()});
  for (const auto& b : module->named_buffers()) model.buffers.push_back({b.key(), b.value()});
  return model;
}

Model FromScript(const std::string& path, torch::Device device) {
  torch::jit::Module module = torch::jit::load(path, device);
  Model model;
  model.forward = [module](const torch::Tensor& x) mutable { return module.forward({x}).toTensor(); };
  model.set_training = [module](bool on) mutable { module.train(on); };
  for (const auto& p : module.named_parameters()) model.parameters.push_back({p.name, p.value});
  for (const auto& b : module.named_buffers()) model.buffers.push_back({b.name, b.value});
  return model;
}

// The inner optimizer on one vector of parameters. Formulas of torch.optim.SGD (dampening 0) and torch.optim.AdamW.
class FlatOptimizer {
 public:
  FlatOptimizer(const OptimizerOptions& options, torch::Tensor parameters, torch::Tensor gradient)
      : options_(options), x_(std::move(parameters)), g_(std::move(gradient)), m_(torch::zeros_like(x_)) {
    if (options.kind == OptimizerKind::kAdamW) v_ = torch::zeros_like(x_);
  }

  void Reset() {
    m_.zero_();
    if (v_.defined()) v_.zero_();
    steps_ = 0;
  }

  void Step(double learning_rate) {
    ++steps_;
    if (options_.kind == OptimizerKind::kAdamW) {
      x_.mul_(1 - learning_rate * options_.weight_decay);
      m_.mul_(options_.beta1).add_(g_, 1 - options_.beta1);
      v_.mul_(options_.beta2).addcmul_(g_, g_, 1 - options_.beta2);
      const double correction1 = 1 - std::pow(options_.beta1, steps_);
      const double correction2 = 1 - std::pow(options_.beta2, steps_);
      x_.addcdiv_(m_, v_.sqrt().div_(std::sqrt(correction2)).add_(options_.epsilon), -learning_rate / correction1);
      return;
    }
    if (options_.weight_decay != 0) g_.add_(x_, options_.weight_decay);
    m_.mul_(options_.momentum).add_(g_);
    if (options_.kind == OptimizerKind::kNesterov) {
      x_.add_(g_, -learning_rate).add_(m_, -learning_rate * options_.momentum);
    } else {
      x_.add_(m_, -learning_rate);
    }
  }

 private:
  const OptimizerOptions options_;
  torch::Tensor x_, g_;  // Shared with the model.
  torch::Tensor m_, v_;
  int64_t steps_ = 0;
};

absl::Status CheckShape(const NamedTensor& t) {
  if (t.tensor.numel() == 0) {
    return absl::InvalidArgumentError(absl::StrCat("tensor ", t.name, " is empty; remove it from the model"));
  }
  if (t.tensor.dim() > static_cast<int64_t>(limits::kMaxTensorRank)) {
    return absl::InvalidArgumentError(
        absl::StrCat("tensor ", t.name, " has more than ", limits::kMaxTensorRank, " dimensions"));
  }
  return absl::OkStatus();
}

class TorchTrainer : public Trainer {
 public:
  TorchTrainer(const TorchTrainerOptions& options, std::shared_ptr<const ImageData> data)
      : options_(options),
        data_(std::move(data)),
        device_(options.device.kind == Device::Kind::kCuda ? torch::Device(torch::kCUDA, options.device.index)
                                                           : torch::Device(torch::kCPU)) {}

  // Called once, before anything else.
  absl::Status Init() {
    if (device_.is_cuda() &&
        !(torch::cuda::is_available() && device_.index() < static_cast<int>(torch::cuda::device_count()))) {
      return absl::FailedPreconditionError(absl::StrCat("device ", options_.device.ToString(), ": this libtorch sees ",
                                                        torch::cuda::device_count(),
                                                        " GPUs (Debian's is built without CUDA); use cpu:K"));
    }
    SetThreads(options_.threads);
    RETURN_IF_ERROR(Build());
    RETURN_IF_ERROR(Flatten());
    for (const NamedTensor& b : model_.buffers) RETURN_IF_ERROR(AddBuffer(b));
    if (manifest_.tensors_size() > static_cast<int>(limits::kMaxTensors)) {
      return absl::InvalidArgumentError(absl::StrCat("the model has more than ", limits::kMaxTensors, " tensors"));
    }
    optimizer_ = std::make_unique<FlatOptimizer>(options_.optimizer, flat_, gradient_);
    train_images_ = ImagesOf(data_->train);
    train_labels_ = LabelsOf(data_->train);
    return CheckForward();
  }

  const v1::Manifest& manifest() const override { return manifest_; }
  const float* device_parameters() const override { return flat_.data_ptr<float>(); }

  absl::Status Load(const ModelState& state) override {
    RETURN_IF_ERROR(CheckSizes(state));
    return Guarded("load", [&] {
      torch::NoGradGuard no_grad;
      flat_.copy_(torch::from_blob(const_cast<float*>(state.bmuf.data()), {flat_.numel()}, torch::kFloat32));
      size_t offset = 0;
      for (torch::Tensor& t : auxiliary_) {
        torch::Tensor host = torch::empty(t.sizes(), t.options().device(torch::kCPU));
        std::memcpy(host.data_ptr(), state.auxiliary.data() + offset, host.nbytes());
        t.copy_(host);
        offset += host.nbytes();
      }
      return absl::OkStatus();
    });
  }

  absl::Status Store(ModelState* state) const override {
    RETURN_IF_ERROR(CheckSizes(*state));
    return Guarded("store", [&] {
      torch::NoGradGuard no_grad;
      torch::from_blob(state->bmuf.data(), {flat_.numel()}, torch::kFloat32).copy_(flat_);
      size_t offset = 0;
      for (const torch::Tensor& t : auxiliary_) {
        const torch::Tensor host = t.to(torch::kCPU).contiguous();
        std::memcpy(state->auxiliary.data() + offset, host.data_ptr(), host.nbytes());
        offset += host.nbytes();
      }
      return absl::OkStatus();
    });
  }

  absl::StatusOr<BlockResult> Train(const Block& block) override {
    const uint64_t steps = block.batch_size == 0 ? 0 : block.samples.size() / block.batch_size;
    if (steps == 0) return absl::InvalidArgumentError("a block needs at least one batch");
    for (uint32_t i : block.samples) {
      if (i >= data_->train.size()) return absl::InvalidArgumentError(absl::StrCat("there is no training sample ", i));
    }
    BlockResult result;
    RETURN_IF_ERROR(Guarded("training", [&] {
      SetThreads(options_.threads);
      model_.set_training(true);
      torch::Tensor loss_sum = torch::zeros({}, device_);
      const std::vector<int64_t> wide(block.samples.begin(), block.samples.end());
      const torch::Tensor indices =
          torch::from_blob(const_cast<int64_t*>(wide.data()), {static_cast<int64_t>(wide.size())}, torch::kInt64)
              .to(device_);
      for (uint64_t step = 0; step < steps; ++step) {
        const torch::Tensor batch = indices.narrow(0, static_cast<int64_t>(step * block.batch_size), block.batch_size);
        const torch::Tensor x = Standardise(train_images_.index_select(0, batch));
        const torch::Tensor y = train_labels_.index_select(0, batch);
        gradient_.zero_();
        const torch::Tensor loss = torch::nn::functional::cross_entropy(model_.forward(x), y);
        loss.backward();
        torch::NoGradGuard no_grad;
        loss_sum.add_(loss.detach());
        const double progress = block.progress_begin + (block.progress_end - block.progress_begin) *
                                                           static_cast<double>(step) / static_cast<double>(steps);
        optimizer_->Step(options_.optimizer.learning_rate * LearningRateFactor(options_.optimizer.schedule, progress));
      }
      result.loss = loss_sum.item<double>() / static_cast<double>(steps);
      return absl::OkStatus();
    }));
    result.steps = steps;
    result.samples = steps * block.batch_size;
    return result;
  }

  absl::Status ResetInnerState() override {
    return Guarded("reset", [&] {
      optimizer_->Reset();
      return absl::OkStatus();
    });
  }

  absl::StatusOr<Evaluation> Evaluate() override {
    Evaluation result;
    RETURN_IF_ERROR(Guarded("evaluation", [&] {
      SetThreads(options_.threads);
      model_.set_training(false);
      torch::NoGradGuard no_grad;
      const torch::Tensor images = ImagesOf(data_->test), labels = LabelsOf(data_->test);
      int64_t correct = 0;
      for (int64_t at = 0; at < images.size(0); at += kEvaluationBatch) {
        const int64_t size = std::min(kEvaluationBatch, images.size(0) - at);
        const torch::Tensor logits = model_.forward(Standardise(images.narrow(0, at, size)));
        const torch::Tensor y = labels.narrow(0, at, size);
        result.loss += torch::nn::functional::cross_entropy(logits, y).item<double>() * static_cast<double>(size);
        correct += logits.argmax(1).eq(y).sum().item<int64_t>();
      }
      result.samples = data_->test.size();
      result.loss /= static_cast<double>(result.samples);
      result.accuracy = static_cast<double>(correct) / static_cast<double>(result.samples);
      return absl::OkStatus();
    }));
    return result;
  }

 private:
  absl::Status Build() {
    const Dataset& train = data_->train;
    const auto rows = static_cast<int64_t>(train.rows), columns = static_cast<int64_t>(train.columns);
    if (options_.model == "cnn" && (rows < 4 || columns < 4)) {
      return absl::InvalidArgumentError("model cnn needs images of at least 4 x 4");
    }
    const bool script = options_.model != "mlp" && options_.model != "cnn";
    std::error_code ignored;
    if (script && !std::filesystem::exists(options_.model, ignored)) {
      return absl::NotFoundError(absl::StrCat("model \"", options_.model, "\": neither mlp nor cnn nor a file"));
    }
    return Guarded("building the model", [&] {
      torch::manual_seed(options_.seed);
      if (options_.model == "mlp") {
        model_ = FromModule(std::make_shared<MlpImpl>(rows * columns, train.classes), device_);
      } else if (options_.model == "cnn") {
        model_ = FromModule(std::make_shared<CnnImpl>(rows, columns, train.classes), device_);
      } else {
        model_ = FromScript(options_.model, device_);
      }
      return absl::OkStatus();
    });
  }

  // Moves the trained parameters into one vector and their gradients into another.
  absl::Status Flatten() {
    std::vector<torch::Tensor> trained;
    std::set<void*> seen;  // A tensor shared by two modules is one tensor.
    int64_t elements = 0;
    for (const NamedTensor& p : model_.parameters) {
      if (!seen.insert(p.tensor.unsafeGetTensorImpl()).second) continue;
      RETURN_IF_ERROR(CheckShape(p));
      if (p.tensor.scalar_type() != torch::kFloat32) {
        return absl::InvalidArgumentError(
            absl::StrCat("parameter ", p.name, " is ", c10::toString(p.tensor.scalar_type()), "; need float32"));
      }
      if (!p.tensor.requires_grad()) {
        AddAuxiliary(p, v1::DTYPE_F32, v1::TENSOR_ROLE_FIRST);
        continue;
      }
      AddSpec(p, v1::DTYPE_F32, v1::TENSOR_ROLE_BMUF);
      trained.push_back(p.tensor);
      elements += p.tensor.numel();
    }
    if (trained.empty()) return absl::InvalidArgumentError("the model has no trainable parameter");
    return Guarded("flattening the parameters", [&] {
      torch::NoGradGuard no_grad;
      flat_ = torch::empty({elements}, torch::TensorOptions(torch::kFloat32).device(device_));
      gradient_ = torch::zeros_like(flat_);
      int64_t offset = 0;
      for (torch::Tensor& p : trained) {
        torch::Tensor view = flat_.narrow(0, offset, p.numel()).view(p.sizes());
        view.copy_(p);
        p.set_data(view);
        // Backward adds into a gradient that is there already, hence into the vector.
        p.mutable_grad() = gradient_.narrow(0, offset, p.numel()).view(p.sizes());
        offset += p.numel();
      }
      return absl::OkStatus();
    });
  }

  absl::Status AddBuffer(const NamedTensor& b) {
    RETURN_IF_ERROR(CheckShape(b));
    switch (b.tensor.scalar_type()) {
      case torch::kFloat32:
        AddAuxiliary(b, v1::DTYPE_F32, v1::TENSOR_ROLE_MEAN);
        return absl::OkStatus();
      case torch::kInt32:
        AddAuxiliary(b, v1::DTYPE_I32, v1::TENSOR_ROLE_MAX);
        return absl::OkStatus();
      case torch::kInt64:
        AddAuxiliary(b, v1::DTYPE_I64, v1::TENSOR_ROLE_MAX);
        return absl::OkStatus();
      default:
        return absl::InvalidArgumentError(absl::StrCat("buffer ", b.name, " is ", c10::toString(b.tensor.scalar_type()),
                                                       "; need float32, int32 or int64"));
    }
  }

  void AddAuxiliary(const NamedTensor& t, v1::DType dtype, v1::TensorRole role) {
    AddSpec(t, dtype, role);
    auxiliary_.push_back(t.tensor);
  }

  void AddSpec(const NamedTensor& t, v1::DType dtype, v1::TensorRole role) {
    v1::TensorSpec* spec = manifest_.add_tensors();
    spec->set_name(t.name);
    spec->set_dtype(dtype);
    spec->set_role(role);
    for (int64_t dimension : t.tensor.sizes()) spec->add_shape(static_cast<uint64_t>(dimension));
  }

  absl::Status CheckSizes(const ModelState& state) const {
    size_t bytes = 0;
    for (const torch::Tensor& t : auxiliary_) bytes += t.nbytes();
    if (state.bmuf.size() == static_cast<size_t>(flat_.numel()) && state.auxiliary.size() == bytes) {
      return absl::OkStatus();
    }
    return absl::InvalidArgumentError(absl::StrCat("the model has ", flat_.numel(), " parameters and ", bytes,
                                                   " auxiliary bytes; was given ", state.bmuf.size(), " and ",
                                                   state.auxiliary.size()));
  }

  // A model for other images fails here, with a text that says so, and not in the first block.
  absl::Status CheckForward() {
    torch::Tensor logits;
    const absl::Status ran = Guarded("trying the model", [&] {
      torch::NoGradGuard no_grad;
      model_.set_training(false);
      logits = model_.forward(Standardise(train_images_.narrow(0, 0, 1)));
      return absl::OkStatus();
    });
    const Dataset& train = data_->train;
    if (!ran.ok() || logits.dim() != 2 || logits.size(1) < train.classes) {
      return absl::InvalidArgumentError(absl::StrCat("model ", options_.model, " does not turn images [batch, 1, ",
                                                     train.rows, ", ", train.columns, "] into logits [batch, ",
                                                     train.classes, "]",
                                                     ran.ok() ? "" : absl::StrCat(": ", std::string(ran.message()))));
    }
    return absl::OkStatus();
  }

  // [samples, 1, rows, columns] of bytes, sharing the data set's memory on a CPU.
  torch::Tensor ImagesOf(const Dataset& set) const {
    return torch::from_blob(
               const_cast<uint8_t*>(set.pixels.data()),
               {static_cast<int64_t>(set.size()), 1, static_cast<int64_t>(set.rows), static_cast<int64_t>(set.columns)},
               torch::kUInt8)
        .to(device_);
  }
  torch::Tensor LabelsOf(const Dataset& set) const {
    return torch::from_blob(const_cast<uint8_t*>(set.labels.data()), {static_cast<int64_t>(set.size())}, torch::kUInt8)
        .to(device_, torch::kInt64);
  }
  torch::Tensor Standardise(const torch::Tensor& bytes) const {
    return bytes.to(torch::kFloat32).sub_(data_->pixel_mean).mul_(1 / data_->pixel_deviation);
  }

  const TorchTrainerOptions options_;
  const std::shared_ptr<const ImageData> data_;
  const torch::Device device_;
  v1::Manifest manifest_;
  Model model_;
  torch::Tensor flat_, gradient_;         // All trained parameters; the model's are views of it.
  std::vector<torch::Tensor> auxiliary_;  // The model's own, in manifest order.
  torch::Tensor train_images_, train_labels_;
  std::unique_ptr<FlatOptimizer> optimizer_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Trainer>> NewTorchTrainer(const TorchTrainerOptions& options,
                                                         std::shared_ptr<const ImageData> data) {
  auto trainer = std::make_unique<TorchTrainer>(options, std::move(data));
  RETURN_IF_ERROR(Guarded("starting libtorch", [&] { return trainer->Init(); }));
  return std::unique_ptr<Trainer>(std::move(trainer));
}

}  // namespace bmuf::worker
