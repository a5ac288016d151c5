#include "worker/trainer/trainer.h"

#include <cmath>
#include <cstring>
#include <limits>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/trainer/device.h"
#include "worker/trainer/fake_trainer.h"
#include "worker/trainer/node_reducer.h"
#include "worker/trainer/schedule.h"
#include "worker/trainer/trajectories.h"

namespace bmuf::worker {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::SizeIs;

TEST(ScheduleTest, FactorsAtTheEndsTheMiddleAndBeyond) {
  EXPECT_EQ(LearningRateFactor(Schedule::kConstant, 0.7), 1);
  EXPECT_EQ(LearningRateFactor(Schedule::kLinear, 0.25), 0.75);
  EXPECT_EQ(LearningRateFactor(Schedule::kLinear, 1.5), 0);
  EXPECT_EQ(LearningRateFactor(Schedule::kLinear, -1), 1);
  EXPECT_EQ(LearningRateFactor(Schedule::kCosine, 0), 1);
  EXPECT_NEAR(LearningRateFactor(Schedule::kCosine, 0.5), 0.5, 1e-15);
  EXPECT_NEAR(LearningRateFactor(Schedule::kCosine, 1), 0, 1e-15);
}

TEST(ScheduleTest, NamesAreCheckedAndTheChoicesTold) {
  EXPECT_EQ(*ParseSchedule("cosine"), Schedule::kCosine);
  EXPECT_EQ(*ParseOptimizer("adamw"), OptimizerKind::kAdamW);
  EXPECT_THAT(std::string(ParseSchedule("Linear").status().message()), HasSubstr("constant, linear or cosine"));
  EXPECT_THAT(std::string(ParseOptimizer("adam").status().message()), HasSubstr("sgd, nesterov or adamw"));
}

TEST(DeviceTest, OneEntryPerTrajectory) {
  EXPECT_THAT(*ParseDevices("cpu"), SizeIs(1));
  EXPECT_THAT(*ParseDevices("cpu:4"), SizeIs(4));
  const Device gpu0{Device::Kind::kCuda, 0}, gpu1{Device::Kind::kCuda, 1};
  EXPECT_THAT(*ParseDevices("cuda:0,cuda:1"), ElementsAre(gpu0, gpu1));
  EXPECT_THAT(*ParseDevices("cpu:1,cuda:1"), ElementsAre(Device{}, gpu1));
  EXPECT_EQ(gpu1.ToString(), "cuda:1");
}

TEST(DeviceTest, RefusesWhatNamesNoDevice) {
  for (const char* text : {"", "gpu:0", "cpu:0", "cpu:-1", "cpu:x", "cpu:5000", "cpu:", "cuda", "cuda:-1", "cuda:0,",
                           "cpu:1:1", "cpu:99999999999", "cpu:4000,cpu:4000"}) {
    EXPECT_EQ(ParseDevices(text).status().code(), absl::StatusCode::kInvalidArgument) << text;
  }
  EXPECT_THAT(std::string(ParseDevices("cuda:1,cuda:1").status().message()), HasSubstr("twice"));
}

TEST(NodeReducerTest, OnePartIsCopiedBitByBit) {
  const float part[] = {std::numeric_limits<float>::quiet_NaN(), -0.0f, 1e-42f, std::numeric_limits<float>::infinity()};
  const float* parts[] = {part};
  float out[4];
  ASSERT_TRUE(NewCpuNodeReducer()->Mean(parts, absl::MakeSpan(out)).ok());
  EXPECT_EQ(std::memcmp(part, out, sizeof(out)), 0);
}

TEST(NodeReducerTest, SumsInDoubleAndRoundsOnce) {
  constexpr size_t kSize = 2500;  // More than one piece, and a rest.
  std::vector<float> a(kSize, 1e8f), b(kSize, 1.0f), c(kSize, -1e8f), out(kSize);
  b[2400] = 4.0f;
  const float* parts[] = {a.data(), b.data(), c.data()};  // In float32, 1e8 + 1 - 1e8 would be 0.
  ASSERT_TRUE(NewCpuNodeReducer()->Mean(parts, absl::MakeSpan(out)).ok());
  EXPECT_EQ(out[0], 1.0f / 3);
  EXPECT_EQ(out[2400], 4.0f / 3);
  EXPECT_EQ(out[kSize - 1], 1.0f / 3);
}

v1::Manifest TestManifest() {
  v1::Manifest m;
  const auto add = [&](const char* name, std::vector<uint64_t> shape, v1::DType dtype, v1::TensorRole role) {
    v1::TensorSpec* t = m.add_tensors();
    t->set_name(name);
    for (uint64_t d : shape) t->add_shape(d);
    t->set_dtype(dtype);
    t->set_role(role);
  };
  add("running_mean", {2}, v1::DTYPE_F32, v1::TENSOR_ROLE_MEAN);
  add("weight", {2, 3}, v1::DTYPE_F32, v1::TENSOR_ROLE_BMUF);
  add("small", {}, v1::DTYPE_I32, v1::TENSOR_ROLE_MAX);
  add("batches", {}, v1::DTYPE_I64, v1::TENSOR_ROLE_MAX);
  add("frozen", {1}, v1::DTYPE_F32, v1::TENSOR_ROLE_FIRST);
  add("cache", {7}, v1::DTYPE_F32, v1::TENSOR_ROLE_LOCAL);
  add("peak", {1}, v1::DTYPE_F32, v1::TENSOR_ROLE_MAX);
  return m;
}

// The auxiliary section of TestManifest.
struct __attribute__((packed)) Auxiliary {
  float running_mean[2];
  int32_t small;
  int64_t batches;
  float frozen;
  float peak;
};

AlignedBuffer<uint8_t> Bytes(const Auxiliary& a) {
  AlignedBuffer<uint8_t> b(sizeof(a));
  std::memcpy(b.data(), &a, sizeof(a));
  return b;
}

TEST(ModelStateTest, SizesFollowTheManifest) {
  const ModelState state = ModelState::For(TestManifest());
  EXPECT_EQ(state.bmuf.size(), 6u);
  EXPECT_EQ(state.auxiliary.size(), sizeof(Auxiliary));
}

TEST(ReduceAuxiliaryTest, EachTensorByItsRole) {
  const int64_t big = (int64_t{1} << 53) + 1;  // Not a double.
  std::vector<AlignedBuffer<uint8_t>> parts;
  parts.push_back(Bytes({{1, 2}, -5, big, 10, -3}));
  parts.push_back(Bytes({{2, 6}, -7, 4, 11, -4}));
  AlignedBuffer<uint8_t> out(sizeof(Auxiliary));
  ASSERT_TRUE(ReduceAuxiliary(TestManifest(), parts, &out).ok());
  Auxiliary a;
  std::memcpy(&a, out.data(), sizeof(a));
  EXPECT_EQ(float{a.running_mean[0]}, 1.5f);
  EXPECT_EQ(float{a.running_mean[1]}, 4.0f);
  EXPECT_EQ(int32_t{a.small}, -5);
  EXPECT_EQ(int64_t{a.batches}, big);
  EXPECT_EQ(float{a.frozen}, 10.0f);
  EXPECT_EQ(float{a.peak}, -3.0f);
  AlignedBuffer<uint8_t> wrong(3);
  EXPECT_EQ(ReduceAuxiliary(TestManifest(), parts, &wrong).code(), absl::StatusCode::kInvalidArgument);
}

class TrajectoriesTest : public ::testing::Test {
 protected:
  TrajectoriesTest() {
    std::vector<std::unique_ptr<Trainer>> trainers;
    for (FakeTrainer*& f : fakes_) {
      trainers.push_back(std::make_unique<FakeTrainer>());
      f = static_cast<FakeTrainer*>(trainers.back().get());
    }
    node_ = std::make_unique<Trajectories>(std::move(trainers), NewCpuNodeReducer(), 100);
  }
  FakeTrainer* fakes_[3];
  std::unique_ptr<Trajectories> node_;
};

TEST_F(TrajectoriesTest, EachTrainsTheSliceOfItsRankAndTheMeanLeaves) {
  ModelState state = ModelState::For(node_->manifest());
  state.bmuf[0] = 1000;
  ASSERT_TRUE(node_->Load(state).ok());
  fakes_[0]->loss = 3;
  BlockPlan plan;
  plan.seed = 5;
  plan.total_samples = 40;
  plan.rank = 2;
  plan.steps = 2;
  plan.batch_size = 4;
  auto result = node_->Train(plan);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->samples, 24u);
  EXPECT_EQ(result->steps, 2u);
  EXPECT_EQ(result->loss, 1);
  SampleStream stream(5, 100);
  float sum = 0;
  for (int k = 0; k < 3; ++k) {
    EXPECT_EQ(fakes_[k]->samples, stream.Slice(40 + (2 + k) * 8, 8));
    for (uint32_t i : fakes_[k]->samples) sum += static_cast<float>(i);
  }
  ASSERT_TRUE(node_->Mean(&state).ok());
  EXPECT_FLOAT_EQ(state.bmuf[0], 1000 + sum / 3);
}

TEST_F(TrajectoriesTest, ResetReachesAllAndAFailureNamesItsTrajectory) {
  ASSERT_TRUE(node_->ResetInnerState().ok());
  for (const FakeTrainer* f : fakes_) EXPECT_EQ(f->resets, 1);
  fakes_[1]->fail = true;
  BlockPlan plan;
  plan.steps = 1;
  const absl::Status status = node_->Train(plan).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_EQ(std::string(status.message()), "trajectory 1: no power");
}

TEST_F(TrajectoriesTest, WarmUpTrainsOneAndTheOthersFollow) {
  BlockPlan plan;
  plan.steps = 1;
  plan.batch_size = 4;
  plan.seed = 5;
  plan.total_samples = 8;
  auto result = node_->TrainAlone(plan);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->samples, 4u);
  EXPECT_EQ(fakes_[0]->samples, SampleStream(5, 100).Slice(8, 4));
  EXPECT_TRUE(fakes_[1]->samples.empty());
  EXPECT_GT(*fakes_[0]->device_parameters(), 0);
  EXPECT_EQ(*fakes_[2]->device_parameters(), *fakes_[0]->device_parameters());
}

}  // namespace
}  // namespace bmuf::worker
