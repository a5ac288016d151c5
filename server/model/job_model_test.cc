#include "server/model/job_model.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <limits>
#include <map>
#include <numeric>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "core/base/error.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "server/model/test_payload.h"

namespace bmuf {
namespace {

using nlohmann::json;

v1::JobConfig Config(v1::Variant variant, double zeta, double eta) {
  v1::JobConfig config;
  v1::OuterOptimizer& outer = *config.mutable_outer();
  outer.set_variant(variant);
  outer.set_block_learning_rate(zeta);
  outer.set_block_momentum(eta);
  outer.set_beta1(0.9);
  outer.set_beta2(0.99);
  outer.set_tau(1e-3);
  config.set_pull_codec(v1::CODEC_FP32);
  config.set_max_inflight_pushes(2);
  for (v1::Codec codec : {v1::CODEC_FP32, v1::CODEC_BF16, v1::CODEC_FP16, v1::CODEC_INT8}) {
    config.add_push_codecs(codec);
  }
  return config;
}

class JobModelTest : public testing::Test {
 protected:
  std::unique_ptr<JobModel> Make(std::shared_ptr<const Layout> layout, const v1::JobConfig& config) {
    auto model = JobModel::Create(std::move(layout), config, budget_, kernels_, pool_);
    EXPECT_TRUE(model.ok()) << model.status();
    return *std::move(model);
  }

  absl::Status Fold(JobModel& model, const std::vector<float>& delta, double weight, uint32_t rank,
                    v1::Codec codec = v1::CODEC_FP32, const std::vector<uint8_t>& auxiliary = {}) {
    auto staging = Received(model.layout(), codec, PayloadOf(codec, delta, auxiliary));
    const auto verified = staging->Verify(kernels_, pool_);
    if (!verified.ok()) return verified.status();
    return model.Fold(*staging, verified->max_abs, weight, 1, rank);
  }

  std::shared_ptr<const Version> Start(JobModel& model, const std::vector<float>& init,
                                       const std::vector<uint8_t>& auxiliary = {}) {
    return model.SetInitialModel(*Received(model.layout(), v1::CODEC_FP32, PayloadOf(v1::CODEC_FP32, init, auxiliary)));
  }

  // One round with equal weights; the new version.
  std::shared_ptr<const Version> Round(JobModel& model, uint64_t round, const v1::OuterOptimizer& outer,
                                       const std::vector<std::vector<float>>& deltas, uint32_t trajectories = 1,
                                       double rescale = 1) {
    model.BeginAttempt();
    for (uint32_t k = 0; k < deltas.size(); ++k) EXPECT_TRUE(Fold(model, deltas[k], 1, k).ok());
    auto commit = model.Prepare(RoundId(round), outer, trajectories, rescale);
    EXPECT_TRUE(commit.ok()) << commit.status();
    model.Publish(*std::move(commit));
    return model.Newest();
  }

  static std::vector<float> Values(const AlignedBuffer<float>& x) { return {x.begin(), x.end()}; }

  MemoryBudget budget_{uint64_t{1} << 32};
  ThreadPool pool_{"test", 2};
  const Kernels& kernels_ = *AvailableKernels().back();
};

// ------------------------------------------------------------------------------------------- golden vectors

struct Rule {
  v1::Variant variant;
  double zeta;
  double eta;
};

std::optional<Rule> RuleOf(const json& params) {
  const std::string rule = params.value("rule", "");
  if (rule == "caffe2_cbm" || rule == "cbm_weighted") {
    return Rule{v1::VARIANT_CLASSICAL, params.at("block_lr"), params.at("block_momentum")};
  }
  if (rule == "cbm_elastic") return Rule{v1::VARIANT_CLASSICAL, params.at("block_lr"), 0};
  if (rule == "torch_sgd_nesterov") return Rule{v1::VARIANT_NESTEROV, params.at("lr"), params.at("momentum")};
  if (rule == "fedadam") return Rule{v1::VARIANT_FED_ADAM, params.at("eta"), 0};
  if (rule == "fedyogi") return Rule{v1::VARIANT_FED_YOGI, params.at("eta"), 0};
  static const std::map<std::string, v1::Variant> variants = {{"nbm", v1::VARIANT_NESTEROV},
                                                              {"caffe2_nesterov", v1::VARIANT_CAFFE2_NESTEROV},
                                                              {"fairseq_nbm", v1::VARIANT_FAIRSEQ_NESTEROV},
                                                              {"cntk_nbm", v1::VARIANT_CNTK_NESTEROV},
                                                              {"pika_nbm", v1::VARIANT_PIKA}};
  const auto it = variants.find(rule);
  if (it == variants.end()) return std::nullopt;
  return Rule{it->second, params.at("block_lr"), params.at("block_momentum")};
}

TEST_F(JobModelTest, GoldenVectors) {
  std::ifstream file("core/filter/testdata/golden_vectors.json");
  ASSERT_TRUE(file.good());
  const json cases = json::parse(file).at("cases");
  std::set<std::string> ran;
  for (const json& c : cases) {
    const json& params = c.at("params");
    // The rest waits for its feature; core/filter/golden_test.cc lists it.
    const std::optional<Rule> rule = RuleOf(params);
    if (!rule.has_value() || !c.contains("deltas") || !c.contains("init_global")) continue;
    const std::string name = c.at("name");
    SCOPED_TRACE(name);
    ran.insert(name);
    const std::vector<float> init = c.at("init_global");
    const v1::JobConfig config = Config(rule->variant, rule->zeta, rule->eta);
    auto model = Make(PlainLayout(init.size()), config);
    Start(*model, init);
    double eta_before = 0;
    for (size_t r = 0; r < c.at("deltas").size(); ++r) {
      const json& expected = c.at("rounds").at(r);
      v1::OuterOptimizer outer = config.outer();
      double rescale = 1;
      if (expected.contains("eta")) {
        const double eta = expected.at("eta");
        outer.set_block_momentum(eta);
        if (r > 0 && params.at("policy") == "eta_follows_present_rescaled") rescale = MomentumRescale(eta_before, eta);
        eta_before = eta;
      }
      std::vector<int> present(c.at("deltas").at(r).size());
      std::iota(present.begin(), present.end(), 0);
      if (expected.contains("present")) present = expected.at("present").get<std::vector<int>>();
      model->BeginAttempt();
      for (int k : present) {
        const double weight = c.contains("weights") ? c.at("weights").at(r).at(k).get<double>() : 1;
        ASSERT_TRUE(Fold(*model, c.at("deltas").at(r).at(k), weight, static_cast<uint32_t>(k)).ok());
      }
      auto commit = model->Prepare(RoundId(r + 1), outer, static_cast<uint32_t>(present.size()), rescale);
      ASSERT_TRUE(commit.ok()) << commit.status();
      model->Publish(*std::move(commit));
      const auto check = [&](const json& want, const AlignedBuffer<float>& got) {
        for (size_t i = 0; i < got.size(); ++i) {
          if (c.value("float32_exact", false)) {
            EXPECT_EQ(got[i], want.at(i).get<double>()) << "round " << r + 1 << " element " << i;
          } else {
            EXPECT_NEAR(got[i], want.at(i).get<double>(), 1e-6 * std::max(1.0, std::abs(want.at(i).get<double>())))
                << "round " << r + 1 << " element " << i;
          }
        }
      };
      check(expected.at("global"), model->Newest()->broadcast());
      if (expected.at("state").contains("W")) check(expected.at("state").at("W"), model->Newest()->model());
    }
  }
  // Every rule with a name of its own, so that a case that is renamed or lost is noticed.
  for (const char* name :
       {"caffe2_cbm_n2_default", "caffe2_nesterov_n4_default", "paper_nbm_n4", "fairseq_nbm_n2",
        "cntk_nesterov_n4_default", "pika_nbm_n2", "diloco_n3", "weighted_cbm_n3", "fedadam_n3", "fedyogi_n3",
        "elastic_fixed_eta_div_present", "elastic_eta_follows_present", "elastic_eta_follows_present_rescaled"}) {
    EXPECT_EQ(ran.count(name), 1u) << name;
  }
}

// ----------------------------------------------------------------------------------------------- versions

TEST_F(JobModelTest, AnyOrderOfArrivalPublishesTheSameModel) {
  constexpr size_t kElements = 2'000;
  const v1::JobConfig config = Config(v1::VARIANT_NESTEROV, 0.7, 0.9);
  const double weights[] = {0.1, 0.7, 0.3, 1.9};
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<std::vector<float>> deltas(4, std::vector<float>(kElements));
  for (auto& delta : deltas) {
    for (float& d : delta) d = normal(random);
  }
  std::vector<uint32_t> order = {0, 1, 2, 3};
  std::set<uint32_t> digests;
  do {
    auto model = Make(PlainLayout(kElements), config);
    Start(*model, std::vector<float>(kElements, 0.5f));
    for (uint64_t round = 1; round <= 2; ++round) {
      model->BeginAttempt();
      for (uint32_t k : order) ASSERT_TRUE(Fold(*model, deltas[k], weights[k], k, v1::CODEC_INT8).ok());
      model->Publish(*model->Prepare(RoundId(round), config.outer(), 4, 1));
    }
    digests.insert(model->Newest()->digest());
  } while (std::next_permutation(order.begin(), order.end()));
  EXPECT_EQ(digests.size(), 1u);
}

TEST_F(JobModelTest, APreparedCommitIsInvisibleUntilItIsPublished) {
  const v1::JobConfig config = Config(v1::VARIANT_CLASSICAL, 1, 0.5);
  auto model = Make(PlainLayout(1), config);
  EXPECT_EQ(model->Newest(), nullptr);
  EXPECT_EQ(ReasonOf(model->Get(std::nullopt).status()), v1::REASON_NO_MODEL);
  Start(*model, {10});
  ASSERT_TRUE(Fold(*model, {2}, 1, 0).ok());
  {
    auto dropped = model->Prepare(RoundId(1), config.outer(), 1, 1);
    ASSERT_TRUE(dropped.ok());
    EXPECT_EQ(dropped->mean_norm, 2);
    EXPECT_EQ(dropped->version->broadcast()[0], 12);
    EXPECT_EQ(model->Newest()->id(), ModelVersion(0));
  }
  auto again = model->Prepare(RoundId(1), config.outer(), 1, 1);
  EXPECT_EQ(again->version->broadcast()[0], 12) << "a dropped commit leaves model, momentum and sum";
  model->Publish(*std::move(again));
  EXPECT_EQ(model->Newest()->id(), ModelVersion(1));
  EXPECT_EQ(Round(*model, 2, config.outer(), {{0}})->broadcast()[0], 13) << "a zero delta still moves by the momentum";
}

TEST_F(JobModelTest, TheNewestTwoAreKeptAndAReaderKeepsItsOwn) {
  const v1::JobConfig config = Config(v1::VARIANT_AVERAGING, 1, 0);
  auto model = Make(PlainLayout(1), config);
  const std::shared_ptr<const Version> zero = Start(*model, {0});
  for (uint64_t round = 1; round <= 3; ++round) Round(*model, round, config.outer(), {{1}});
  EXPECT_EQ((*model->Get(std::nullopt))->id(), ModelVersion(3));
  EXPECT_EQ((*model->Get(ModelVersion(2)))->broadcast()[0], 2);
  for (uint64_t gone : {0, 1, 4}) {
    const absl::Status status = model->Get(ModelVersion(gone)).status();
    EXPECT_EQ(ReasonOf(status), v1::REASON_NOT_KEPT) << gone;
    EXPECT_EQ(MetadataOf(status, "version"), "3");
  }
  EXPECT_EQ(zero->broadcast()[0], 0) << "whoever reads it still has it";
}

TEST_F(JobModelTest, AResultThatIsNotFiniteLeavesTheOldModel) {
  const v1::JobConfig config = Config(v1::VARIANT_CLASSICAL, 1, 0.5);
  auto model = Make(PlainLayout(2), config);
  Start(*model, {1, 3.4e38f});
  Round(*model, 1, config.outer(), {{1, 0}});
  const uint32_t before = model->Newest()->digest();
  model->BeginAttempt();
  ASSERT_TRUE(Fold(*model, {1, 30'000}, 1, 0).ok());
  v1::OuterOptimizer far = config.outer();
  far.set_block_learning_rate(1e35);
  EXPECT_FALSE(model->Prepare(RoundId(2), far, 1, 1).ok());
  EXPECT_EQ(model->Newest()->digest(), before);
  EXPECT_EQ(Round(*model, 2, config.outer(), {{0, 0}})->broadcast()[0], 2.5f) << "the momentum is that of round 1";
}

TEST_F(JobModelTest, NothingFoldedMeansNoCommit) {
  const v1::JobConfig config = Config(v1::VARIANT_CLASSICAL, 1, 0.5);
  auto model = Make(PlainLayout(1), config);
  Start(*model, {1});
  model->BeginAttempt();
  EXPECT_FALSE(model->Prepare(RoundId(1), config.outer(), 1, 1).ok());
  ASSERT_TRUE(Fold(*model, {1}, 0, 0).ok());
  EXPECT_FALSE(model->Prepare(RoundId(1), config.outer(), 1, 1).ok()) << "total weight 0";
}

TEST_F(JobModelTest, WarmUpRoundsAverageAndLeaveTheMomentumAlone) {
  const v1::JobConfig config = Config(v1::VARIANT_NESTEROV, 1, 0.5);
  auto model = Make(PlainLayout(1), config);
  Start(*model, {0});
  v1::OuterOptimizer averaging = config.outer();
  averaging.set_variant(v1::VARIANT_AVERAGING);
  const auto warm = Round(*model, 1, averaging, {{4}, {8}});
  EXPECT_EQ(warm->broadcast()[0], 6);
  EXPECT_EQ(warm->model()[0], 6);
  const auto version = Round(*model, 2, config.outer(), {{2}});
  EXPECT_EQ(version->model()[0], 8) << "v was 0";
  EXPECT_EQ(version->broadcast()[0], 9);
}

TEST_F(JobModelTest, ABf16BroadcastNeverDriftsFromTheModel) {
  v1::JobConfig config = Config(v1::VARIANT_CLASSICAL, 1, 0.5);
  auto exact = Make(PlainLayout(64), config);
  config.set_pull_codec(v1::CODEC_BF16);
  auto rounded = Make(PlainLayout(64), config);
  std::vector<float> init(64);
  for (size_t i = 0; i < init.size(); ++i) init[i] = 1.0f + static_cast<float>(i) / 1000;
  Start(*exact, init);
  Start(*rounded, init);
  for (uint64_t round = 1; round <= 50; ++round) {
    const std::vector<std::vector<float>> deltas = {std::vector<float>(64, 0.0001f * static_cast<float>(round))};
    const auto a = Round(*exact, round, config.outer(), deltas);
    const auto b = Round(*rounded, round, config.outer(), deltas);
    EXPECT_EQ(Values(a->model()), Values(b->model())) << "the exact model goes on without rounding";
    std::vector<float> want = Values(b->model());
    for (float& w : want) {
      uint16_t half;
      kernels_.bf16_encode(&half, &w, 1);
      kernels_.bf16_decode(&w, &half, 1);
    }
    EXPECT_EQ(Values(b->broadcast()), want);
    // What a worker gets in either codec is the same numbers, and the digest is theirs.
    const PayloadView bf16 = *b->Payload(v1::MODEL_KIND_BROADCAST, v1::CODEC_BF16, kernels_);
    std::vector<float> got(64);
    ASSERT_TRUE(Decode(kernels_, v1::CODEC_BF16, bf16.bmuf, absl::MakeSpan(got)).ok());
    EXPECT_EQ(got, want);
    EXPECT_EQ(b->digest(), Crc32c(want.data(), want.size() * sizeof(float)));
  }
}

TEST_F(JobModelTest, ABf16BroadcastThatOverflowsIsNotPublished) {
  v1::JobConfig config = Config(v1::VARIANT_AVERAGING, 1, 0);
  config.set_pull_codec(v1::CODEC_BF16);
  auto model = Make(PlainLayout(1), config);
  Start(*model, {3.38e38f});
  const uint32_t before = model->Newest()->digest();
  model->BeginAttempt();
  // Folded small; the step to what BF16 cannot say comes from the model's own size.
  ASSERT_TRUE(Fold(*model, {1}, 1, 0).ok());
  auto commit = model->Prepare(RoundId(1), config.outer(), 1, 1);
  ASSERT_TRUE(commit.ok()) << "3.38e38 is in BF16's range";
  v1::JobConfig classical = Config(v1::VARIANT_CLASSICAL, 1e34, 0);
  classical.set_pull_codec(v1::CODEC_BF16);
  auto other = Make(PlainLayout(1), classical);
  Start(*other, {3.38e38f});
  other->BeginAttempt();
  ASSERT_TRUE(Fold(*other, {210}, 1, 0).ok());  // 3.38e38 + 2.1e36 is finite in F32 and infinite in BF16.
  EXPECT_FALSE(other->Prepare(RoundId(1), classical.outer(), 1, 1).ok());
  EXPECT_EQ(other->Newest()->digest(), before);
}

TEST_F(JobModelTest, AuxiliaryTensorsOfTheRoundTakeThePlaceOfTheOld) {
  v1::Manifest manifest;
  AddTensor(manifest, "mean", {1}, v1::DTYPE_F32, v1::TENSOR_ROLE_MEAN);
  AddTensor(manifest, "w", {1});
  AddTensor(manifest, "steps", {1}, v1::DTYPE_I64, v1::TENSOR_ROLE_MAX);
  const v1::JobConfig config = Config(v1::VARIANT_NESTEROV, 0.7, 0.9);
  auto model = Make(LayoutOf(manifest), config);
  const auto values = [](float mean, int64_t steps) {
    std::vector<uint8_t> bytes;
    AppendValues<float>(bytes, {mean});
    AppendValues<int64_t>(bytes, {steps});
    return bytes;
  };
  Start(*model, {0}, values(100, 1000));
  for (uint64_t round = 1; round <= 2; ++round) {
    model->BeginAttempt();
    ASSERT_TRUE(Fold(*model, {1}, 1, 0, v1::CODEC_FP32, values(1, 3)).ok());
    ASSERT_TRUE(Fold(*model, {1}, 1, 1, v1::CODEC_FP32, values(2, 4)).ok());
    model->Publish(*model->Prepare(RoundId(round), config.outer(), 2, 1));
    const auto& bytes = model->Newest()->auxiliary();
    EXPECT_EQ(std::vector<uint8_t>(bytes.begin(), bytes.end()), values(1.5f, 4)) << "no momentum on statistics";
  }
}

TEST_F(JobModelTest, PayloadsAreSharedAndFollowTheKind) {
  const v1::JobConfig config = Config(v1::VARIANT_NESTEROV, 1, 0.5);
  auto model = Make(PlainLayout(2), config);
  Start(*model, {0, 0});
  const auto version = Round(*model, 1, config.outer(), {{2, 4}});
  const PayloadView broadcast = *version->Payload(v1::MODEL_KIND_UNSPECIFIED, v1::CODEC_FP32, kernels_);
  EXPECT_EQ(broadcast.bmuf.data(), reinterpret_cast<const uint8_t*>(version->broadcast().data())) << "no copy";
  EXPECT_EQ(broadcast.digest, version->digest());
  const PayloadView exact = *version->Payload(v1::MODEL_KIND_MODEL, v1::CODEC_FP32, kernels_);
  std::vector<float> w(2);
  std::memcpy(w.data(), exact.bmuf.data(), 8);
  EXPECT_EQ(w, (std::vector<float>{2, 4}));
  EXPECT_EQ(exact.digest, Crc32c(w.data(), 8));
  const PayloadView first = *version->Payload(v1::MODEL_KIND_BROADCAST, v1::CODEC_BF16, kernels_);
  const PayloadView second = *version->Payload(v1::MODEL_KIND_BROADCAST, v1::CODEC_BF16, kernels_);
  EXPECT_EQ(first.bmuf.data(), second.bmuf.data()) << "encoded once";
  EXPECT_EQ(first.digest, Crc32c(first.bmuf.data(), first.bmuf.size()));
  EXPECT_EQ(ReasonOf(version->Payload(v1::MODEL_KIND_BROADCAST, v1::CODEC_INT8, kernels_).status()),
            v1::REASON_BAD_CODEC);
}

TEST_F(JobModelTest, ReadersEncodeConcurrentlyAndSeeOnePayload) {
  const v1::JobConfig config = Config(v1::VARIANT_AVERAGING, 1, 0);
  auto model = Make(PlainLayout(100'000), config);
  const auto version = Start(*model, std::vector<float>(100'000, 1.5f));
  std::vector<const uint8_t*> seen(8);
  std::vector<std::thread> readers;
  for (size_t i = 0; i < seen.size(); ++i) {
    readers.emplace_back(
        [&, i] { seen[i] = version->Payload(v1::MODEL_KIND_BROADCAST, v1::CODEC_BF16, kernels_)->bmuf.data(); });
  }
  for (std::thread& reader : readers) reader.join();
  for (const uint8_t* data : seen) EXPECT_EQ(data, seen[0]);
}

// ------------------------------------------------------------------------------------------------- memory

TEST_F(JobModelTest, TheWholePlanIsTakenAtCreationAndGivenBackAtTheEnd) {
  const v1::JobConfig config = Config(v1::VARIANT_NESTEROV, 1, 0.5);
  const auto layout = PlainLayout(1000);
  const MemoryPlan plan = PlanMemory(*layout, config);
  EXPECT_GE(plan.staging_bytes, 2u * 4000) << "two slots in FP32";
  EXPECT_GE(plan.accumulator_bytes, 8u * 1000) << "doubles";
  EXPECT_GE(plan.versions_bytes, 3u * 2 * 4000) << "W and B of three versions";
  {
    auto model = Make(layout, config);
    EXPECT_EQ(budget_.used_bytes(), plan.total_bytes());
  }
  EXPECT_EQ(budget_.used_bytes(), 0u);
  MemoryBudget small(plan.total_bytes() - 1);
  EXPECT_EQ(ReasonOf(JobModel::Create(layout, config, small, kernels_, pool_).status()), v1::REASON_MODEL_TOO_LARGE);
  EXPECT_EQ(small.used_bytes(), 0u);
  v1::JobConfig limited = config;
  limited.set_max_model_bytes(3999);
  const absl::Status status = JobModel::Create(layout, limited, budget_, kernels_, pool_).status();
  EXPECT_EQ(ReasonOf(status), v1::REASON_MODEL_TOO_LARGE);
  EXPECT_EQ(MetadataOf(status, "required_bytes"), "4000");
  EXPECT_EQ(MetadataOf(status, "limit_bytes"), "3999");
}

}  // namespace
}  // namespace bmuf
