// The daemon's configuration from all its sources, later ones over earlier ones: defaults, file, environment, flags.
#ifndef BMUF_SERVER_DAEMON_CONFIG_H_
#define BMUF_SERVER_DAEMON_CONFIG_H_

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "bmuf/v1/config.pb.h"

namespace bmuf {

// Where settings come from.
struct ConfigSources {
  std::string file_name;  // Empty: no file.
  std::string file_text;
  // Value of an environment variable, or null. BMUF_<FIELD> sets a top-level field: BMUF_LISTEN, BMUF_LOG_LEVEL ...
  std::function<const char*(const std::string& name)> environment;
  std::vector<std::pair<std::string, std::string>> flags;  // Path and value, as for SetField.
};

// The configuration with every default filled in and checked: addresses, names, job rules. `cores` and `memory_bytes`
// are the machine's. Errors: INVALID_ARGUMENT saying which source is wrong, with file and line where it is the file.
absl::StatusOr<v1::DaemonConfig> ResolveDaemonConfig(const ConfigSources& sources, uint32_t cores,
                                                     uint64_t memory_bytes);

// Names of the environment variables that are read.
std::vector<std::string> EnvironmentVariables();

// Memory this process may use: the smaller of the machine's and its cgroup's.
uint64_t UsableMemoryBytes();

}  // namespace bmuf

#endif  // BMUF_SERVER_DAEMON_CONFIG_H_
