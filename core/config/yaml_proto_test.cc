#include "core/config/yaml_proto.h"

#include <string>

#include "bmuf/v1/config.pb.h"
#include "google/protobuf/util/message_differencer.h"
#include "gtest/gtest.h"

namespace bmuf {
namespace {

using google::protobuf::util::MessageDifferencer;

constexpr char kTypical[] = R"(
listen: 127.0.0.1:0
memory_limit_bytes: 4GiB
drain_timeout: 1m30s
log_format: json
jobs:
  - name: lm
    config:
      outer: {variant: nesterov, block_learning_rate: 0.7, block_momentum: 0}
      barrier:
        min_fraction: 0.5
        soft_timeout: 500ms
      push_codecs: [fp32, CODEC_INT8]
      reset_inner_state: false
      labels: {owner: "ml: team", tier: 1}
)";

TEST(YamlProtoTest, ReadsEveryKindOfValue) {
  v1::DaemonConfig c;
  ASSERT_TRUE(MergeYaml(kTypical, "a.yaml", c).ok()) << MergeYaml(kTypical, "a.yaml", c);
  EXPECT_EQ(c.memory_limit_bytes(), uint64_t{4} << 30);
  EXPECT_EQ(c.drain_timeout().seconds(), 90);
  EXPECT_EQ(c.log_format(), v1::LOG_FORMAT_JSON);
  const v1::JobConfig& job = c.jobs(0).config();
  EXPECT_EQ(job.outer().variant(), v1::VARIANT_NESTEROV);
  EXPECT_TRUE(job.outer().has_block_momentum());
  EXPECT_EQ(job.outer().block_momentum(), 0);
  EXPECT_EQ(job.barrier().soft_timeout().nanos(), 500'000'000);
  EXPECT_EQ(job.push_codecs_size(), 2);
  EXPECT_EQ(job.push_codecs(1), v1::CODEC_INT8);
  EXPECT_TRUE(job.has_reset_inner_state());
  EXPECT_EQ(job.labels().at("owner"), "ml: team");
  EXPECT_EQ(job.labels().at("tier"), "1");
}

TEST(YamlProtoTest, WhatIsPrintedReadsBackTheSame) {
  v1::DaemonConfig c, again;
  ASSERT_TRUE(MergeYaml(kTypical, "a.yaml", c).ok());
  ASSERT_TRUE(MergeYaml(ToYaml(c), "b.yaml", again).ok()) << ToYaml(c);
  EXPECT_TRUE(MessageDifferencer::Equals(c, again)) << ToYaml(c);
}

TEST(YamlProtoTest, ErrorsNameFileLineAndColumn) {
  const auto error = [](const std::string& text) {
    v1::DaemonConfig c;
    return std::string(MergeYaml(text, "a.yaml", c).message());
  };
  EXPECT_NE(error("listen: x\nlisten_adress: y\n").find("a.yaml:2:1: unknown key \"listen_adress\""), std::string::npos)
      << error("listen: x\nlisten_adress: y\n");
  EXPECT_NE(error("jobs:\n  - name: a\n    config:\n      outer: {eta: 1}\n").find("a.yaml:4:15: unknown key"),
            std::string::npos);
  EXPECT_NE(error("listen: x\nlisten: y\n").find("twice"), std::string::npos);
  EXPECT_NE(error("drain_timeout: 30\n").find("duration with its unit"), std::string::npos);
  EXPECT_NE(error("drain_timeout: -3s\n").find("duration"), std::string::npos);
  EXPECT_NE(error("compute_threads: -1\n").find("whole number"), std::string::npos);
  EXPECT_NE(error("compute_threads: 4294967296\n").find("whole number"), std::string::npos);
  EXPECT_NE(error("memory_limit_bytes: 99999999999TiB\n").find("size"), std::string::npos);
  EXPECT_NE(error("reflection: yes\n").find("true or false"), std::string::npos);
  EXPECT_NE(error("log_format: xml\n").find("one of text, json"), std::string::npos);
  EXPECT_NE(error("jobs: {name: a}\n").find("sequence"), std::string::npos);
  EXPECT_NE(error("job_defaults: [1]\n").find("mapping"), std::string::npos);
  EXPECT_NE(error("listen: [a, b]\n").find("single value"), std::string::npos);
  EXPECT_NE(error("listen: {\n").find("a.yaml:"), std::string::npos);
  EXPECT_NE(error("a\n---\nb\n").find("documents"), std::string::npos);
  EXPECT_EQ(error(""), "");
  EXPECT_EQ(error("job_defaults:\n"), "");
}

TEST(YamlProtoTest, SetsOneFieldByItsPath) {
  v1::JobConfig c;
  EXPECT_TRUE(SetField("outer.block_learning_rate", "0.5", c).ok());
  EXPECT_TRUE(SetField("barrier.soft_timeout", "2m", c).ok());
  EXPECT_TRUE(SetField("labels.owner", "a: b", c).ok());
  EXPECT_TRUE(SetField("push_codecs", "[bf16]", c).ok());
  EXPECT_EQ(c.outer().block_learning_rate(), 0.5);
  EXPECT_EQ(c.barrier().soft_timeout().seconds(), 120);
  EXPECT_EQ(c.labels().at("owner"), "a: b");
  EXPECT_EQ(c.push_codecs(0), v1::CODEC_BF16);
  const v1::JobConfig before = c;
  EXPECT_FALSE(SetField("outer.nothing", "1", c).ok());
  EXPECT_FALSE(SetField("block_steps.x", "1", c).ok());
  EXPECT_FALSE(SetField("block_steps", "many", c).ok());
  EXPECT_FALSE(SetField("", "1", c).ok());
  EXPECT_FALSE(SetField("outer.variant", "{", c).ok());
  EXPECT_TRUE(MessageDifferencer::Equals(c, before));
}

}  // namespace
}  // namespace bmuf
