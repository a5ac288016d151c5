#include "server/daemon_config.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <set>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "core/base/limits.h"
#include "core/base/names.h"
#include "core/base/status_macros.h"
#include "core/config/yaml_proto.h"
#include "core/kernels/kernels.h"
#include "google/protobuf/descriptor.h"
#include "server/engine/engine.h"

namespace bmuf {
namespace {

constexpr char kDefaultListen[] = "127.0.0.1:7070";

absl::Status Wrong(const std::string& field, const std::string& what) {
  return absl::InvalidArgumentError(absl::StrCat(field, ": ", what));
}

absl::Status CheckAddress(const std::string& field, const std::string& address) {
  const size_t colon = address.rfind(':');
  uint32_t port = 0;
  if (colon == std::string::npos || colon == 0 || !absl::SimpleAtoi(address.substr(colon + 1), &port) || port > 65535) {
    return Wrong(field, absl::StrCat("\"", EscapeForLog(address), "\" is not host:port"));
  }
  return absl::OkStatus();
}

}  // namespace

std::vector<std::string> EnvironmentVariables() {
  std::vector<std::string> names;
  const auto* type = v1::DaemonConfig::descriptor();
  for (int i = 0; i < type->field_count(); ++i) {
    const auto* field = type->field(i);
    const bool is_scalar =
        !field->is_repeated() && (field->cpp_type() != google::protobuf::FieldDescriptor::CPPTYPE_MESSAGE ||
                                  field->message_type()->full_name() == "google.protobuf.Duration");
    if (is_scalar) names.push_back("BMUF_" + absl::AsciiStrToUpper(field->name()));
  }
  return names;
}

absl::StatusOr<v1::DaemonConfig> ResolveDaemonConfig(const ConfigSources& sources, uint32_t cores,
                                                     uint64_t memory_bytes) {
  v1::DaemonConfig config;
  config.set_listen(kDefaultListen);
  config.set_compute_threads(std::max<uint32_t>(1, cores));
  config.set_memory_limit_bytes(memory_bytes / 4 * 3);
  config.mutable_drain_timeout()->set_seconds(25);
  config.set_log_level("info");
  config.set_kernels("auto");

  if (!sources.file_name.empty()) RETURN_IF_ERROR(MergeYaml(sources.file_text, sources.file_name, config));
  for (const std::string& name : EnvironmentVariables()) {
    const char* value = sources.environment ? sources.environment(name) : nullptr;
    if (value == nullptr) continue;
    const std::string field = absl::AsciiStrToLower(name.substr(sizeof("BMUF_") - 1));
    absl::Status set = SetField(field, value, config);
    if (!set.ok()) return Wrong(absl::StrCat("environment variable ", name), std::string(set.message()));
  }
  for (const auto& [path, value] : sources.flags) {
    absl::Status set = SetField(path, value, config);
    if (!set.ok()) return Wrong("flag", std::string(set.message()));
  }

  RETURN_IF_ERROR(CheckAddress("listen", config.listen()));
  if (!config.metrics_listen().empty()) RETURN_IF_ERROR(CheckAddress("metrics_listen", config.metrics_listen()));
  if (config.compute_threads() == 0 || config.compute_threads() > 1024) {
    return Wrong("compute_threads", "must be 1 to 1024");
  }
  if (config.memory_limit_bytes() < (uint64_t{1} << 20)) return Wrong("memory_limit_bytes", "must be at least 1MiB");
  const std::set<std::string> levels = {"trace", "debug", "info", "warn", "error"};
  if (levels.count(config.log_level()) == 0) return Wrong("log_level", "must be trace, debug, info, warn or error");
  if (absl::Status kernels = KernelsByName(config.kernels()).status(); !kernels.ok()) {
    return Wrong("kernels", std::string(kernels.message()));
  }
  if (absl::Status defaults = engine::ResolveConfig(config.job_defaults()).status(); !defaults.ok()) {
    return Wrong("job_defaults", std::string(defaults.message()));
  }
  if (static_cast<size_t>(config.jobs_size()) > limits::kMaxJobs) {
    return Wrong("jobs", absl::StrCat("at most ", limits::kMaxJobs, " jobs"));
  }
  std::set<std::string> names;
  for (int i = 0; i < config.jobs_size(); ++i) {
    const v1::ConfiguredJob& job = config.jobs(i);
    const std::string field = absl::StrCat("jobs[", i, "]");
    if (absl::Status name = ValidateName("name", job.name()); !name.ok())
      return Wrong(field, std::string(name.message()));
    if (!names.insert(job.name()).second) return Wrong(field, absl::StrCat("job ", job.name(), " appears twice"));
    v1::JobConfig merged = config.job_defaults();
    if (job.config().push_codecs_size() > 0) merged.clear_push_codecs();  // A list replaces, as everywhere.
    merged.MergeFrom(job.config());
    if (absl::Status rules = engine::ResolveConfig(merged).status(); !rules.ok()) {
      return Wrong(absl::StrCat(field, " (", job.name(), ")"), std::string(rules.message()));
    }
  }
  return config;
}

uint64_t UsableMemoryBytes() {
  uint64_t bytes = static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<uint64_t>(sysconf(_SC_PAGE_SIZE));
  // cgroup v2, then v1; "max" and unreadable files mean no limit.
  for (const char* path : {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"}) {
    std::ifstream file(path);
    uint64_t limit = 0;
    if (file >> limit && limit > 0) bytes = std::min(bytes, limit);
  }
  return bytes;
}

}  // namespace bmuf
