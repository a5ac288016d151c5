// Configuration: YAML text <-> a protobuf message, strictly.
//
// Problem: a misspelt key that is silently ignored costs a week of training.
// Idea: the message's descriptor is the schema. Unknown, repeated and badly typed entries are errors with their line
// and column; durations and sizes carry units. Usage:  v1::DaemonConfig config;  RETURN_IF_ERROR(MergeYaml(text,
// "server.yaml", config));
//
// Values: message = mapping; repeated = sequence; map<string, string> = mapping; enum = its name without the enum's
// prefix, any case ("nesterov"); google.protobuf.Duration = "500ms", "30s", "1h30m"; integer fields whose name ends in
// _bytes also take "4GiB", "512MiB", "64KiB"; bool = true or false.
#ifndef BMUF_CORE_CONFIG_YAML_PROTO_H_
#define BMUF_CORE_CONFIG_YAML_PROTO_H_

#include <string>

#include "absl/status/status.h"
#include "google/protobuf/message.h"

namespace bmuf {

// Sets the fields that `text` names and leaves the others. A sequence replaces what a repeated field held. `origin` (a
// file name) opens each error text. Errors: INVALID_ARGUMENT "origin:line:column: what"; `message` is then unspecified.
absl::Status MergeYaml(const std::string& text, const std::string& origin, google::protobuf::Message& message);

// Sets one field by its path, for instance ("outer.block_learning_rate", "0.7") or ("labels.owner", "ml"). `value` is
// read as a YAML value. Errors: INVALID_ARGUMENT naming the path; `message` is then unchanged.
absl::Status SetField(const std::string& path, const std::string& value, google::protobuf::Message& message);

// The set fields of `message` as YAML that MergeYaml reads back to the same message.
std::string ToYaml(const google::protobuf::Message& message);

}  // namespace bmuf

#endif  // BMUF_CORE_CONFIG_YAML_PROTO_H_
