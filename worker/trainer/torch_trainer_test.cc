#include "worker/trainer/torch_trainer.h"

#include <torch/script.h>
#include <torch/torch.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace bmuf::worker {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// Two classes of 8 x 8 images: bright left half, bright right half, with noise.
std::shared_ptr<const ImageData> TwoHalves() {
  auto data = std::make_shared<ImageData>();
  uint32_t noise = 1;
  for (Dataset* set : {&data->train, &data->test}) {
    set->rows = set->columns = 8;
    set->classes = 2;
    for (int i = 0; i < 64; ++i) {
      set->labels.push_back(i % 2);
      for (int p = 0; p < 64; ++p) {
        noise = noise * 1664525 + 1013904223;
        set->pixels.push_back((p % 8 < 4) == (i % 2 == 0) ? 200 + (noise >> 27) : (noise >> 27));
      }
    }
  }
  MeasurePixels(data.get());
  return data;
}

std::unique_ptr<Trainer> NewTrainer(const TorchTrainerOptions& options) {
  auto trainer = NewTorchTrainer(options, TwoHalves());
  EXPECT_TRUE(trainer.ok()) << trainer.status();
  return std::move(*trainer);
}

std::vector<uint32_t> AllSamples(int passes) {
  std::vector<uint32_t> samples;
  for (int p = 0; p < passes; ++p) {
    for (uint32_t i = 0; i < 64; ++i) samples.push_back((i * 37) % 64);
  }
  return samples;
}

BlockResult TrainOn(Trainer& trainer, const std::vector<uint32_t>& samples, uint32_t batch_size = 16) {
  Block block;
  block.samples = samples;
  block.batch_size = batch_size;
  auto result = trainer.Train(block);
  EXPECT_TRUE(result.ok()) << result.status();
  return result.value_or(BlockResult());
}

ModelState StateOf(const Trainer& trainer) {
  ModelState state = ModelState::For(trainer.manifest());
  EXPECT_TRUE(trainer.Store(&state).ok());
  return state;
}

std::vector<float> Values(const ModelState& state) { return {state.bmuf.begin(), state.bmuf.end()}; }

TEST(TorchTrainerTest, EveryModelAndOptimizerLearnsAnEasyTask) {
  for (const char* model : {"mlp", "cnn"}) {
    for (OptimizerKind kind : {OptimizerKind::kSgd, OptimizerKind::kNesterov, OptimizerKind::kAdamW}) {
      TorchTrainerOptions options;
      options.model = model;
      options.optimizer.kind = kind;
      options.optimizer.learning_rate = kind == OptimizerKind::kAdamW ? 1e-3 : 1e-2;
      auto trainer = NewTrainer(options);
      const Evaluation before = *trainer->Evaluate();
      const BlockResult result = TrainOn(*trainer, AllSamples(10));
      EXPECT_EQ(result.steps, 40u);
      EXPECT_EQ(result.samples, 640u);
      const Evaluation after = *trainer->Evaluate();
      EXPECT_EQ(after.samples, 64u);
      EXPECT_LT(after.loss, before.loss / 4) << model << static_cast<int>(kind);
      EXPECT_EQ(after.accuracy, 1.0) << model << static_cast<int>(kind);
    }
  }
}

TEST(TorchTrainerTest, TheManifestOfTheCnnHasRolesForBatchNorm) {
  TorchTrainerOptions options;
  options.model = "cnn";
  auto trainer = NewTrainer(options);
  std::map<std::string, const v1::TensorSpec*> by_name;
  for (const v1::TensorSpec& t : trainer->manifest().tensors()) by_name[t.name()] = &t;
  EXPECT_EQ(by_name.at("conv1.weight")->role(), v1::TENSOR_ROLE_BMUF);
  EXPECT_EQ(by_name.at("conv1.weight")->shape_size(), 4);
  EXPECT_EQ(by_name.at("bn1.weight")->role(), v1::TENSOR_ROLE_BMUF);
  EXPECT_EQ(by_name.at("bn1.running_var")->role(), v1::TENSOR_ROLE_MEAN);
  EXPECT_EQ(by_name.at("bn2.num_batches_tracked")->role(), v1::TENSOR_ROLE_MAX);
  EXPECT_EQ(by_name.at("bn2.num_batches_tracked")->dtype(), v1::DTYPE_I64);
  EXPECT_EQ(by_name.at("bn2.num_batches_tracked")->shape_size(), 0);
  const ModelState state = StateOf(*trainer);
  EXPECT_EQ(state.auxiliary.size(), (16 + 16 + 32 + 32) * 4u + 2 * 8u);
}

TEST(TorchTrainerTest, LoadGivesBackWhatStoreTookStatisticsIncluded) {
  TorchTrainerOptions options;
  options.model = "cnn";
  auto a = NewTrainer(options);
  TrainOn(*a, AllSamples(2));
  const ModelState trained = StateOf(*a);
  options.seed = 99;
  auto b = NewTrainer(options);
  EXPECT_NE(Values(StateOf(*b)), Values(trained));
  ASSERT_TRUE(b->Load(trained).ok());
  EXPECT_EQ(Values(StateOf(*b)), Values(trained));
  EXPECT_EQ(std::memcmp(StateOf(*b).auxiliary.data(), trained.auxiliary.data(), trained.auxiliary.size()), 0);
  EXPECT_EQ(b->Evaluate()->loss, a->Evaluate()->loss);
  int64_t batches = 0;  // The last tensor: bn2.num_batches_tracked.
  std::memcpy(&batches, trained.auxiliary.data() + trained.auxiliary.size() - 8, 8);
  EXPECT_EQ(batches, 8);
  EXPECT_EQ(std::memcmp(b->device_parameters(), trained.bmuf.data(), trained.bmuf.size_bytes()), 0);
}

TEST(TorchTrainerTest, LoadRefusesWrongSizes) {
  auto trainer = NewTrainer({});
  ModelState wrong = StateOf(*trainer);
  wrong.bmuf = AlignedBuffer<float>(3);
  EXPECT_EQ(trainer->Load(wrong).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(trainer->Store(&wrong).code(), absl::StatusCode::kInvalidArgument);
}

TEST(TorchTrainerTest, OneSeedGivesOneResult) {
  auto a = NewTrainer({}), b = NewTrainer({});
  EXPECT_EQ(TrainOn(*a, AllSamples(2)).loss, TrainOn(*b, AllSamples(2)).loss);
  EXPECT_EQ(Values(StateOf(*a)), Values(StateOf(*b)));
}

// Two blocks from the same start: with the inner state reset in between they are equal, without they are not.
TEST(TorchTrainerTest, ResetForgetsTheInnerOptimizersState) {
  for (OptimizerKind kind : {OptimizerKind::kSgd, OptimizerKind::kAdamW}) {
    TorchTrainerOptions options;
    options.optimizer.kind = kind;
    options.optimizer.learning_rate = 1e-3;
    auto trainer = NewTrainer(options);
    const ModelState start = StateOf(*trainer);
    const auto block = [&] {
      EXPECT_TRUE(trainer->Load(start).ok());
      TrainOn(*trainer, AllSamples(1));
      return Values(StateOf(*trainer));
    };
    const std::vector<float> first = block();
    EXPECT_NE(block(), first);
    ASSERT_TRUE(trainer->ResetInnerState().ok());
    EXPECT_EQ(block(), first);
  }
}

// Against the framework's own optimizers on the same model.
TEST(TorchTrainerTest, OptimizersFollowTorchsDefinitions) {
  for (OptimizerKind kind : {OptimizerKind::kSgd, OptimizerKind::kNesterov, OptimizerKind::kAdamW}) {
    const auto data = TwoHalves();
    TorchTrainerOptions options;
    options.optimizer.kind = kind;
    options.optimizer.learning_rate = 0.01;
    options.optimizer.weight_decay = 0.1;
    options.optimizer.schedule = Schedule::kConstant;
    options.seed = 3;
    auto trainer = NewTrainer(options);

    torch::nn::Sequential model(torch::nn::Linear(64, 256), torch::nn::ReLU(), torch::nn::Linear(256, 128),
                                torch::nn::ReLU(), torch::nn::Linear(128, 2));
    const ModelState start = StateOf(*trainer);
    size_t offset = 0;
    for (torch::Tensor& p : model->parameters()) {
      torch::NoGradGuard no_grad;
      p.copy_(torch::from_blob(const_cast<float*>(start.bmuf.data() + offset), p.sizes()));
      offset += p.numel();
    }
    std::unique_ptr<torch::optim::Optimizer> optimizer;
    if (kind == OptimizerKind::kAdamW) {
      optimizer = std::make_unique<torch::optim::AdamW>(model->parameters(),
                                                        torch::optim::AdamWOptions(0.01).weight_decay(0.1));
    } else {
      optimizer = std::make_unique<torch::optim::SGD>(
          model->parameters(),
          torch::optim::SGDOptions(0.01).momentum(0.9).weight_decay(0.1).nesterov(kind == OptimizerKind::kNesterov));
    }
    const std::vector<uint32_t> samples = AllSamples(2);
    for (size_t step = 0; step < samples.size() / 16; ++step) {
      torch::Tensor x = torch::empty({16, 64}), y = torch::empty({16}, torch::kInt64);
      for (int i = 0; i < 16; ++i) {
        const uint32_t sample = samples[step * 16 + i];
        y[i] = static_cast<int64_t>(data->train.labels[sample]);
        for (int p = 0; p < 64; ++p) x[i][p] = static_cast<float>(data->train.pixels[sample * 64 + p]);
      }
      x = (x - data->pixel_mean) / data->pixel_deviation;
      optimizer->zero_grad();
      torch::nn::functional::cross_entropy(model->forward(x), y).backward();
      optimizer->step();
    }
    TrainOn(*trainer, samples);
    const ModelState end = StateOf(*trainer);
    offset = 0;
    for (const torch::Tensor& p : model->parameters()) {
      const torch::Tensor ours = torch::from_blob(const_cast<float*>(end.bmuf.data() + offset), p.sizes());
      EXPECT_LT((ours - p).abs().max().item<float>(), 1e-4) << static_cast<int>(kind);
      offset += p.numel();
    }
  }
}

TEST(TorchTrainerTest, TheScheduleScalesTheLearningRate) {
  auto trainer = NewTrainer({});
  const ModelState start = StateOf(*trainer);
  const std::vector<uint32_t> samples = AllSamples(1);
  Block block;
  block.samples = samples;
  block.progress_begin = block.progress_end = 1;  // Linear: nothing is left.
  ASSERT_TRUE(trainer->Train(block).ok());
  EXPECT_EQ(Values(StateOf(*trainer)), Values(start));
}

TEST(TorchTrainerTest, RefusesABlockWithoutABatchOrBeyondTheData) {
  auto trainer = NewTrainer({});
  const std::vector<uint32_t> beyond(64, 64);
  Block block;
  EXPECT_EQ(trainer->Train(block).status().code(), absl::StatusCode::kInvalidArgument);
  block.samples = beyond;
  EXPECT_THAT(std::string(trainer->Train(block).status().message()), HasSubstr("sample 64"));
}

TEST(TorchTrainerTest, RefusesGpusThatAreNotThere) {
  if (torch::cuda::is_available()) GTEST_SKIP() << "this machine has a GPU";
  TorchTrainerOptions options;
  options.device = {Device::Kind::kCuda, 0};
  const absl::Status status = NewTorchTrainer(options, TwoHalves()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr("cuda:0"), HasSubstr("cpu:K")));
}

class TorchScriptTest : public ::testing::Test {
 protected:
  // A linear classifier of 8 x 8 images with a running mean, a counter and a frozen scale.
  static torch::jit::Module Linear() {
    torch::jit::Module m("Linear");
    torch::manual_seed(1);
    m.register_attribute("training", c10::BoolType::get(), true);  // As every module that comes from Python.
    m.register_parameter("weight", (torch::randn({2, 64}) * 0.01).set_requires_grad(true), false);
    m.register_parameter("scale", torch::ones({1}).set_requires_grad(false), false);
    m.register_buffer("seen", torch::zeros({}, torch::kInt64));
    m.register_buffer("average", torch::zeros({1}));
    m.define(R"(
      def forward(self, x):
        if self.training:
          self.seen.add_(1)
          self.average.mul_(0.9).add_(0.1 * x.mean())
        return torch.matmul(x.flatten(1), self.weight.t()) * self.scale
    )");
    return m;
  }
  std::string path_ = absl::StrCat(getenv("TEST_TMPDIR"), "/model.pt");
};

TEST_F(TorchScriptTest, TrainsAFileWithRolesByTheKindOfTensor) {
  Linear().save(path_);
  TorchTrainerOptions options;
  options.model = path_;
  auto trainer = NewTrainer(options);
  std::map<std::string, v1::TensorRole> roles;
  for (const v1::TensorSpec& t : trainer->manifest().tensors()) roles[t.name()] = t.role();
  EXPECT_EQ(roles, (std::map<std::string, v1::TensorRole>{{"weight", v1::TENSOR_ROLE_BMUF},
                                                          {"scale", v1::TENSOR_ROLE_FIRST},
                                                          {"seen", v1::TENSOR_ROLE_MAX},
                                                          {"average", v1::TENSOR_ROLE_MEAN}}));
  TrainOn(*trainer, AllSamples(5));
  EXPECT_EQ(trainer->Evaluate()->accuracy, 1.0);
}

TEST_F(TorchScriptTest, NamesWhatCannotBeExchanged) {
  torch::jit::Module m = Linear();
  m.register_buffer("wide", torch::zeros({2}, torch::kFloat64));
  m.save(path_);
  TorchTrainerOptions options;
  options.model = path_;
  absl::Status status = NewTorchTrainer(options, TwoHalves()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr("wide"), HasSubstr("Double")));
}

TEST_F(TorchScriptTest, RefusesAModelForOtherImagesAMissingFileAndGarbage) {
  torch::jit::Module m("Other");
  m.register_parameter("weight", torch::zeros({2, 100}).set_requires_grad(true), false);
  m.define("def forward(self, x):\n  return torch.matmul(x.flatten(1), self.weight.t())\n");
  m.save(path_);
  TorchTrainerOptions options;
  options.model = path_;
  absl::Status status = NewTorchTrainer(options, TwoHalves()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("[batch, 1, 8, 8]"));

  options.model = "resnet";
  status = NewTorchTrainer(options, TwoHalves()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(status.message()), HasSubstr("neither mlp nor cnn nor a file"));

  std::ofstream(path_) << "not a model";
  options.model = path_;
  EXPECT_EQ(NewTorchTrainer(options, TwoHalves()).status().code(), absl::StatusCode::kInternal);
}

}  // namespace
}  // namespace bmuf::worker
