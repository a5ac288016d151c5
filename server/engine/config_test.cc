#include <gtest/gtest.h>

#include <limits>

#include "core/base/error.h"
#include "google/protobuf/text_format.h"
#include "server/engine/engine.h"

namespace bmuf::engine {
namespace {

v1::JobConfig Parse(const std::string& text) {
  v1::JobConfig config;
  EXPECT_TRUE(google::protobuf::TextFormat::ParseFromString(text, &config)) << text;
  return config;
}

v1::JobConfig Resolved(const std::string& text) {
  absl::StatusOr<v1::JobConfig> config = ResolveConfig(Parse(text));
  EXPECT_TRUE(config.ok()) << config.status();
  return config.ok() ? *config : v1::JobConfig();
}

TEST(ResolveConfigTest, FillsTheDocumentedDefaults) {
  const v1::JobConfig expected = Parse(R"(
    outer { variant: VARIANT_NESTEROV block_learning_rate: 1 beta1: 0.9 beta2: 0.99 tau: 1e-3
            momentum_policy: MOMENTUM_POLICY_FROZEN }
    barrier { min_workers: 1 expected_workers: 1 start_timeout { seconds: 60 } collect_timeout { seconds: 600 }
              on_timeout: ON_TIMEOUT_COMMIT_IF_QUORUM }
    block_steps: 40 weighting: WEIGHTING_EQUAL reset_inner_state: true initial_model_timeout { seconds: 600 }
    lease { seconds: 30 } max_workers: 256
    push_codecs: [ CODEC_FP32, CODEC_BF16, CODEC_FP16, CODEC_INT8 ] pull_codec: CODEC_FP32
    norm_guard { action: NORM_GUARD_ACTION_REJECT factor: 10 } max_inflight_pushes: 4
    durability: DURABILITY_EVERY_ROUND snapshot_every: 10)");
  EXPECT_EQ(Resolved("").DebugString(), expected.DebugString());
}

TEST(ResolveConfigTest, ResolvingTwiceIsResolvingOnce) {
  const v1::JobConfig once = Resolved("barrier { min_workers: 3 start_timeout {} } reset_inner_state: false");
  EXPECT_EQ(once.barrier().expected_workers(), 3u);
  EXPECT_EQ(once.barrier().start_timeout().seconds(), 0);
  EXPECT_FALSE(once.reset_inner_state());
  EXPECT_EQ(Resolved(once.DebugString()).DebugString(), once.DebugString());
}

TEST(ResolveConfigTest, RefusesWhatIsOutOfRangeAndNamesIt) {
  const struct {
    const char* config;
    const char* field;
  } rows[] = {
      {"outer { block_learning_rate: 0 }", "outer.block_learning_rate"},
      {"outer { block_learning_rate: nan }", "outer.block_learning_rate"},
      {"outer { block_learning_rate: 101 }", "outer.block_learning_rate"},
      {"outer { block_momentum: 1 }", "outer.block_momentum"},
      {"outer { block_momentum: -0.1 }", "outer.block_momentum"},
      {"outer { block_momentum: 0.9 momentum_policy: MOMENTUM_POLICY_FOLLOW_PRESENT }", "outer.block_momentum"},
      {"outer { beta1: 1 }", "outer.beta1"},
      {"outer { beta2: -1 }", "outer.beta2"},
      {"outer { tau: 0 }", "outer.tau"},
      {"outer { tau: inf }", "outer.tau"},
      {"barrier { min_workers: 300 }", "barrier.min_workers"},
      {"barrier { expected_workers: 300 }", "barrier.expected_workers"},
      {"barrier { min_fraction: 1.5 }", "barrier.min_fraction"},
      {"barrier { min_fraction: nan }", "barrier.min_fraction"},
      {"barrier { soft_timeout { seconds: -1 } }", "barrier.soft_timeout"},
      {"barrier { start_timeout { nanos: -1 } }", "barrier.start_timeout"},
      {"barrier { collect_timeout {} }", "barrier.collect_timeout"},
      {"barrier { collect_timeout { seconds: 1000000000 } }", "barrier.collect_timeout"},
      {"barrier { grace { seconds: -1 } }", "barrier.grace"},
      {"barrier { adaptive_soft_factor: -1 }", "barrier.adaptive_soft_factor"},
      {"weighting: WEIGHTING_SAMPLES", "nominal_block"},
      {"nominal_block: inf", "nominal_block"},
      {"initial_model_timeout {}", "initial_model_timeout"},
      {"lease { nanos: 999999999 }", "lease"},
      {"max_workers: 5000", "max_workers"},
      {"push_codecs: CODEC_TOP_K", "push_codecs"},
      {"pull_codec: CODEC_INT8", "pull_codec"},
      {"norm_guard { factor: -1 }", "norm_guard.factor"},
      {"norm_guard { max_abs: -1 }", "norm_guard.max_abs"},
      {"max_inflight_pushes: 100000", "max_inflight_pushes"},
  };
  for (const auto& [config, field] : rows) {
    const absl::Status status = ResolveConfig(Parse(config)).status();
    EXPECT_EQ(ReasonOf(status), v1::REASON_INVALID_REQUEST) << config;
    EXPECT_EQ(std::string(status.message()).rfind(field, 0), 0u) << config << ": " << status;
  }
}

TEST(ResolveConfigTest, RefusesUnknownEnumValues) {
  v1::JobConfig config;
  config.mutable_outer()->set_variant(static_cast<v1::Variant>(99));
  EXPECT_EQ(ReasonOf(ResolveConfig(config).status()), v1::REASON_INVALID_REQUEST);
  config.Clear();
  config.set_weighting(static_cast<v1::Weighting>(99));
  EXPECT_EQ(ReasonOf(ResolveConfig(config).status()), v1::REASON_INVALID_REQUEST);
}

TEST(ResolveConfigTest, BoundsLabels) {
  v1::JobConfig config;
  (*config.mutable_labels())["k"] = std::string(300, 'x');
  EXPECT_EQ(ReasonOf(ResolveConfig(config).status()), v1::REASON_INVALID_REQUEST);
  config.clear_labels();
  for (int i = 0; i < 65; ++i) (*config.mutable_labels())[std::to_string(i)] = "v";
  EXPECT_EQ(ReasonOf(ResolveConfig(config).status()), v1::REASON_INVALID_REQUEST);
}

TEST(ApplyChangesTest, WhatIsSetReplacesWhatWas) {
  const v1::JobConfig current =
      Resolved("lease { seconds: 30 } barrier { min_workers: 2 } labels { key: 'a' value: '1' }");
  absl::StatusOr<v1::JobConfig> next = ApplyChanges(current, Parse(R"(
      lease { seconds: 1 nanos: 500000000 } push_codecs: CODEC_INT8 outer { block_learning_rate: 0.5 }
      barrier { collect_timeout { nanos: 5000000 } } labels { key: 'b' value: '2' })"),
                                                    /*has_model=*/true);
  ASSERT_TRUE(next.ok()) << next.status();
  EXPECT_EQ(next->lease().ShortDebugString(), "seconds: 1 nanos: 500000000");
  EXPECT_EQ(next->barrier().collect_timeout().ShortDebugString(), "nanos: 5000000");
  ASSERT_EQ(next->push_codecs_size(), 1);
  EXPECT_EQ(next->push_codecs(0), v1::CODEC_INT8);
  EXPECT_EQ(next->outer().block_learning_rate(), 0.5);
  EXPECT_EQ(next->barrier().min_workers(), 2u);
  EXPECT_EQ(next->labels().size(), 1u);
}

TEST(ApplyChangesTest, FixedFieldsMayChangeOnlyBeforeThereIsAModel) {
  const v1::JobConfig current = Resolved("");
  for (const char* change :
       {"outer { variant: VARIANT_CLASSICAL }", "outer { momentum_policy: MOMENTUM_POLICY_FOLLOW_PRESENT }",
        "outer { warmup_rounds: 1 }", "pull_codec: CODEC_BF16", "warmup_steps: 5", "durability: DURABILITY_SNAPSHOT",
        "expected_trajectories: 4", "seed: 7"}) {
    EXPECT_TRUE(ApplyChanges(current, Parse(change), /*has_model=*/false).ok()) << change;
    EXPECT_EQ(ReasonOf(ApplyChanges(current, Parse(change), /*has_model=*/true).status()), v1::REASON_WRONG_STATE)
        << change;
  }
  EXPECT_TRUE(ApplyChanges(current, Parse("outer { variant: VARIANT_NESTEROV }"), /*has_model=*/true).ok());
  EXPECT_EQ(ReasonOf(ApplyChanges(current, Parse("lease { nanos: 1 }"), true).status()), v1::REASON_INVALID_REQUEST);
}

}  // namespace
}  // namespace bmuf::engine
