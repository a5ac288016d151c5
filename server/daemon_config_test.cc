#include "server/daemon_config.h"

#include <map>
#include <string>

#include "gtest/gtest.h"

namespace bmuf {
namespace {

constexpr uint64_t kMemory = uint64_t{8} << 30;

absl::StatusOr<v1::DaemonConfig> Resolve(const std::string& yaml, std::map<std::string, std::string> environment = {},
                                         std::vector<std::pair<std::string, std::string>> flags = {}) {
  ConfigSources sources;
  sources.file_name = "server.yaml";
  sources.file_text = yaml;
  sources.environment = [&](const std::string& name) -> const char* {
    const auto it = environment.find(name);
    return it == environment.end() ? nullptr : it->second.c_str();
  };
  sources.flags = std::move(flags);
  return ResolveDaemonConfig(sources, 4, kMemory);
}

TEST(DaemonConfigTest, LaterSourcesWin) {
  auto config = Resolve("");
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->listen(), "127.0.0.1:7070");
  EXPECT_EQ(config->compute_threads(), 4u);
  EXPECT_EQ(config->memory_limit_bytes(), kMemory / 4 * 3);
  EXPECT_EQ(config->drain_timeout().seconds(), 25);
  const std::string file = "listen: 127.0.0.1:1\nlog_level: debug\n";
  EXPECT_EQ(Resolve(file)->listen(), "127.0.0.1:1");
  EXPECT_EQ(Resolve(file, {{"BMUF_LISTEN", "127.0.0.1:2"}})->listen(), "127.0.0.1:2");
  EXPECT_EQ(Resolve(file, {{"BMUF_LISTEN", "127.0.0.1:2"}}, {{"listen", "127.0.0.1:3"}})->listen(), "127.0.0.1:3");
  EXPECT_EQ(Resolve(file, {{"BMUF_LISTEN", "127.0.0.1:2"}})->log_level(), "debug");
  EXPECT_EQ(Resolve("", {{"BMUF_DRAIN_TIMEOUT", "5s"}})->drain_timeout().seconds(), 5);
}

TEST(DaemonConfigTest, ErrorsNameTheirSource) {
  const auto error = [](const auto& config) { return std::string(config.status().message()); };
  EXPECT_NE(error(Resolve("listem: x\n")).find("server.yaml:1:1"), std::string::npos);
  EXPECT_NE(error(Resolve("", {{"BMUF_COMPUTE_THREADS", "many"}})).find("BMUF_COMPUTE_THREADS"), std::string::npos);
  EXPECT_NE(error(Resolve("", {}, {{"listen", "nowhere"}})).find("host:port"), std::string::npos);
  EXPECT_NE(error(Resolve("log_level: loud\n")).find("log_level"), std::string::npos);
  EXPECT_NE(error(Resolve("kernels: mmx\n")).find("kernels"), std::string::npos);
  EXPECT_NE(error(Resolve("jobs: [{name: a}, {name: a}]\n")).find("twice"), std::string::npos);
  EXPECT_NE(error(Resolve("jobs: [{name: ../a}]\n")).find("jobs[0]"), std::string::npos);
  EXPECT_NE(error(Resolve("jobs: [{name: a, config: {outer: {block_momentum: 1.5}}}]\n")).find("jobs[0] (a)"),
            std::string::npos);
  EXPECT_NE(error(Resolve("memory_limit_bytes: 1KiB\n")).find("memory_limit_bytes"), std::string::npos);
}

TEST(DaemonConfigTest, TheMachineHasMemory) { EXPECT_GT(UsableMemoryBytes(), uint64_t{64} << 20); }

}  // namespace
}  // namespace bmuf
