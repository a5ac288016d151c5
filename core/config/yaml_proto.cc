#include "core/config/yaml_proto.h"

#include <cctype>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <set>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "absl/time/time.h"
#include "core/base/status_macros.h"
#include "google/protobuf/descriptor.h"
#include "google/protobuf/duration.pb.h"
#include "yaml-cpp/yaml.h"

namespace bmuf {
namespace {

// The shorter form if it reads back to the same number: 0.7, not 0.69999999999999996.
std::string ShortestDouble(double value) {
  std::string text = absl::StrFormat("%.15g", value);
  return std::strtod(text.c_str(), nullptr) == value ? text : absl::StrFormat("%.17g", value);
}

using google::protobuf::Descriptor;
using google::protobuf::EnumValueDescriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;

// A configuration is a page of text; anything longer is a mistake.
constexpr size_t kMaxTextBytes = size_t{1} << 20;

bool IsDuration(const FieldDescriptor* field) {
  return field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE &&
         field->message_type()->full_name() == "google.protobuf.Duration";
}

std::string EnumPrefix(const google::protobuf::EnumDescriptor* type) {
  // The zero value is PREFIX_UNSPECIFIED by rule.
  return std::string(absl::StripSuffix(type->value(0)->name(), "UNSPECIFIED"));
}

std::string ShortName(const EnumValueDescriptor* value) {
  return absl::AsciiStrToLower(absl::StripPrefix(value->name(), EnumPrefix(value->type())));
}

// Reads one document into one message; errors carry positions.
class Reader {
 public:
  explicit Reader(const std::string& origin) : origin_(origin) {}

  absl::Status Fill(const YAML::Node& node, Message& message) const {
    if (node.IsNull()) return absl::OkStatus();
    if (!node.IsMap()) return At(node, "expected a mapping of keys to values");
    const Descriptor* type = message.GetDescriptor();
    std::set<std::string> seen;
    for (const auto& entry : node) {
      if (!entry.first.IsScalar()) return At(entry.first, "a key must be a plain name");
      const std::string& key = entry.first.Scalar();
      const FieldDescriptor* field = type->FindFieldByName(key);
      if (field == nullptr) return At(entry.first, absl::StrCat("unknown key \"", key, "\"; known: ", Known(type)));
      if (!seen.insert(key).second) return At(entry.first, absl::StrCat("key \"", key, "\" appears twice"));
      RETURN_IF_ERROR(SetValue(entry.second, field, message));
    }
    return absl::OkStatus();
  }

  absl::Status SetValue(const YAML::Node& node, const FieldDescriptor* field, Message& message) const {
    const Reflection* reflection = message.GetReflection();
    if (field->is_map()) return FillMap(node, field, message);
    if (!field->is_repeated()) return SetScalar(node, field, message, /*add=*/false);
    if (!node.IsSequence()) return At(node, absl::StrCat(field->name(), " takes a sequence"));
    reflection->ClearField(&message, field);
    for (const auto& element : node) RETURN_IF_ERROR(SetScalar(element, field, message, /*add=*/true));
    return absl::OkStatus();
  }

 private:
  absl::Status At(const YAML::Node& node, const std::string& what) const {
    return absl::InvalidArgumentError(
        absl::StrCat(origin_, ":", node.Mark().line + 1, ":", node.Mark().column + 1, ": ", what));
  }

  static std::string Known(const Descriptor* type) {
    std::string names;
    for (int i = 0; i < type->field_count(); ++i) absl::StrAppend(&names, i == 0 ? "" : ", ", type->field(i)->name());
    return names;
  }

  absl::Status FillMap(const YAML::Node& node, const FieldDescriptor* field, Message& message) const {
    if (!node.IsMap()) return At(node, absl::StrCat(field->name(), " takes a mapping"));
    const Reflection* reflection = message.GetReflection();
    reflection->ClearField(&message, field);
    std::set<std::string> seen;
    for (const auto& pair : node) {
      if (!pair.first.IsScalar()) return At(pair.first, "a key must be a plain text");
      if (!seen.insert(pair.first.Scalar()).second) return At(pair.first, "a key appears twice");
      Message* entry = reflection->AddMessage(&message, field);
      RETURN_IF_ERROR(SetScalar(pair.first, field->message_type()->map_key(), *entry, false));
      RETURN_IF_ERROR(SetScalar(pair.second, field->message_type()->map_value(), *entry, false));
    }
    return absl::OkStatus();
  }

  absl::Status SetScalar(const YAML::Node& node, const FieldDescriptor* field, Message& message, bool add) const {
    const Reflection* reflection = message.GetReflection();
    if (field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE && !IsDuration(field)) {
      return Fill(node, *(add ? reflection->AddMessage(&message, field) : reflection->MutableMessage(&message, field)));
    }
    if (!node.IsScalar()) return At(node, absl::StrCat(field->name(), " takes a single value"));
    const std::string& text = node.Scalar();
    const auto wrong = [&](const std::string& want) {
      return At(node, absl::StrCat(field->name(), ": \"", text, "\" is not ", want));
    };
    switch (field->cpp_type()) {
      case FieldDescriptor::CPPTYPE_MESSAGE: {
        absl::Duration duration;
        if (!absl::ParseDuration(text, &duration) || duration < absl::ZeroDuration() ||
            duration > absl::Hours(24 * 365)) {
          return wrong("a duration with its unit, such as \"500ms\", \"30s\" or \"1h30m\"");
        }
        auto* to = google::protobuf::DynamicCastToGenerated<google::protobuf::Duration>(
            add ? reflection->AddMessage(&message, field) : reflection->MutableMessage(&message, field));
        if (to == nullptr) return At(node, "durations need a generated message");
        const int64_t nanos = absl::ToInt64Nanoseconds(duration);
        to->set_seconds(nanos / 1'000'000'000);
        to->set_nanos(static_cast<int32_t>(nanos % 1'000'000'000));
        return absl::OkStatus();
      }
      case FieldDescriptor::CPPTYPE_STRING:
        add ? reflection->AddString(&message, field, text) : reflection->SetString(&message, field, text);
        return absl::OkStatus();
      case FieldDescriptor::CPPTYPE_BOOL: {
        if (text != "true" && text != "false") return wrong("true or false");
        add ? reflection->AddBool(&message, field, text == "true")
            : reflection->SetBool(&message, field, text == "true");
        return absl::OkStatus();
      }
      case FieldDescriptor::CPPTYPE_ENUM: {
        const auto* type = field->enum_type();
        std::string choices;
        for (int i = 0; i < type->value_count(); ++i) {
          const EnumValueDescriptor* value = type->value(i);
          if (absl::EqualsIgnoreCase(text, ShortName(value)) || text == value->name()) {
            add ? reflection->AddEnum(&message, field, value) : reflection->SetEnum(&message, field, value);
            return absl::OkStatus();
          }
          if (value->number() != 0) absl::StrAppend(&choices, choices.empty() ? "" : ", ", ShortName(value));
        }
        return wrong(absl::StrCat("one of ", choices));
      }
      case FieldDescriptor::CPPTYPE_UINT32: {
        uint32_t value;
        if (!absl::SimpleAtoi(text, &value)) return wrong("a whole number of 0 to 4294967295");
        add ? reflection->AddUInt32(&message, field, value) : reflection->SetUInt32(&message, field, value);
        return absl::OkStatus();
      }
      case FieldDescriptor::CPPTYPE_UINT64: {
        uint64_t value;
        if (!ParseUnsigned(text, absl::EndsWith(field->name(), "_bytes"), &value)) {
          return wrong(absl::EndsWith(field->name(), "_bytes") ? "a size such as 1048576 or \"4GiB\""
                                                               : "a whole number that is not negative");
        }
        add ? reflection->AddUInt64(&message, field, value) : reflection->SetUInt64(&message, field, value);
        return absl::OkStatus();
      }
      case FieldDescriptor::CPPTYPE_DOUBLE: {
        double value;
        if (!absl::SimpleAtod(text, &value) || !std::isfinite(value)) return wrong("a number");
        add ? reflection->AddDouble(&message, field, value) : reflection->SetDouble(&message, field, value);
        return absl::OkStatus();
      }
      default:
        return At(node, absl::StrCat(field->name(), " has a type that cannot be configured"));
    }
  }

  static bool ParseUnsigned(const std::string& text, bool is_size, uint64_t* value) {
    absl::string_view digits = text;
    int shift = 0;
    if (is_size) {
      constexpr struct {
        const char* suffix;
        int shift;
      } kUnits[] = {{"KiB", 10}, {"MiB", 20}, {"GiB", 30}, {"TiB", 40}};
      for (const auto& unit : kUnits) {
        if (absl::ConsumeSuffix(&digits, unit.suffix)) {
          shift = unit.shift;
          break;
        }
      }
    }
    if (digits.empty() || !std::isdigit(static_cast<unsigned char>(digits[0]))) return false;
    return absl::SimpleAtoi(absl::StripAsciiWhitespace(digits), value) &&
           !__builtin_mul_overflow(*value, uint64_t{1} << shift, value);
  }

  const std::string& origin_;
};

void Emit(const Message& message, YAML::Emitter& out);

void EmitValue(const Message& message, const FieldDescriptor* field, int index, YAML::Emitter& out) {
  const Reflection* r = message.GetReflection();
  const bool repeated = field->is_repeated();
  switch (field->cpp_type()) {
    case FieldDescriptor::CPPTYPE_MESSAGE: {
      const Message& value = repeated ? r->GetRepeatedMessage(message, field, index) : r->GetMessage(message, field);
      if (IsDuration(field)) {
        const auto& d = *google::protobuf::DynamicCastToGenerated<google::protobuf::Duration>(&value);
        out << absl::FormatDuration(absl::Seconds(d.seconds()) + absl::Nanoseconds(d.nanos()));
      } else {
        Emit(value, out);
      }
      break;
    }
    case FieldDescriptor::CPPTYPE_STRING:
      out << YAML::DoubleQuoted
          << (repeated ? r->GetRepeatedString(message, field, index) : r->GetString(message, field));
      break;
    case FieldDescriptor::CPPTYPE_BOOL:
      out << (repeated ? r->GetRepeatedBool(message, field, index) : r->GetBool(message, field));
      break;
    case FieldDescriptor::CPPTYPE_ENUM:
      out << ShortName(repeated ? r->GetRepeatedEnum(message, field, index) : r->GetEnum(message, field));
      break;
    case FieldDescriptor::CPPTYPE_UINT32:
      out << (repeated ? r->GetRepeatedUInt32(message, field, index) : r->GetUInt32(message, field));
      break;
    case FieldDescriptor::CPPTYPE_UINT64:
      out << (repeated ? r->GetRepeatedUInt64(message, field, index) : r->GetUInt64(message, field));
      break;
    case FieldDescriptor::CPPTYPE_DOUBLE:
      out << ShortestDouble(repeated ? r->GetRepeatedDouble(message, field, index) : r->GetDouble(message, field));
      break;
    default:
      out << YAML::Null;
  }
}

void Emit(const Message& message, YAML::Emitter& out) {
  const Reflection* reflection = message.GetReflection();
  std::vector<const FieldDescriptor*> fields;
  reflection->ListFields(message, &fields);
  out << YAML::BeginMap;
  for (const FieldDescriptor* field : fields) {
    out << YAML::Key << field->name() << YAML::Value;
    if (field->is_map()) {
      out << YAML::BeginMap;
      for (int i = 0; i < reflection->FieldSize(message, field); ++i) {
        const Message& entry = reflection->GetRepeatedMessage(message, field, i);
        out << YAML::Key;
        EmitValue(entry, field->message_type()->map_key(), 0, out);
        out << YAML::Value;
        EmitValue(entry, field->message_type()->map_value(), 0, out);
      }
      out << YAML::EndMap;
    } else if (field->is_repeated()) {
      out << YAML::BeginSeq;
      for (int i = 0; i < reflection->FieldSize(message, field); ++i) EmitValue(message, field, i, out);
      out << YAML::EndSeq;
    } else {
      EmitValue(message, field, 0, out);
    }
  }
  out << YAML::EndMap;
}

}  // namespace

absl::Status MergeYaml(const std::string& text, const std::string& origin, Message& message) {
  if (text.size() > kMaxTextBytes) {
    return absl::InvalidArgumentError(absl::StrCat(origin, ": longer than ", kMaxTextBytes, " bytes"));
  }
  try {
    const std::vector<YAML::Node> documents = YAML::LoadAll(text);
    if (documents.empty()) return absl::OkStatus();
    if (documents.size() > 1) {
      return absl::InvalidArgumentError(absl::StrCat(origin, ": holds ", documents.size(), " documents, not one"));
    }
    return Reader(origin).Fill(documents[0], message);
  } catch (const YAML::Exception& e) {
    return absl::InvalidArgumentError(absl::StrCat(origin, ":", e.mark.line + 1, ":", e.mark.column + 1, ": ", e.msg));
  }
}

absl::Status SetField(const std::string& path, const std::string& value, Message& message) {
  // On a copy: an error leaves the message as it was.
  std::unique_ptr<Message> changed(message.New());
  changed->CopyFrom(message);
  const std::vector<std::string> steps = absl::StrSplit(path, '.');
  Message* at = changed.get();
  const auto unknown = [&](const std::string& step, const Descriptor* type) {
    std::string names;
    for (int i = 0; i < type->field_count(); ++i) absl::StrAppend(&names, i == 0 ? "" : ", ", type->field(i)->name());
    return absl::InvalidArgumentError(absl::StrCat(path, ": unknown name \"", step, "\"; known: ", names));
  };
  for (size_t i = 0; i < steps.size(); ++i) {
    const FieldDescriptor* field = at->GetDescriptor()->FindFieldByName(steps[i]);
    if (field == nullptr) return unknown(steps[i], at->GetDescriptor());
    if (i + 1 < steps.size()) {
      if (field->is_map() && i + 2 == steps.size()) {
        Message* entry = at->GetReflection()->AddMessage(at, field);
        entry->GetReflection()->SetString(entry, field->message_type()->map_key(), steps[i + 1]);
        at = entry;
        field = entry->GetDescriptor()->map_value();
      } else if (field->is_repeated() || field->cpp_type() != FieldDescriptor::CPPTYPE_MESSAGE || IsDuration(field)) {
        return absl::InvalidArgumentError(absl::StrCat(path, ": \"", steps[i], "\" has nothing inside"));
      } else {
        at = at->GetReflection()->MutableMessage(at, field);
        continue;
      }
    }
    try {
      // A text field takes the value as it stands; "yes: no" is no mapping there.
      YAML::Node node = field->cpp_type() == FieldDescriptor::CPPTYPE_STRING && !field->is_repeated()
                            ? YAML::Node(value)
                            : YAML::Load(value);
      RETURN_IF_ERROR(Reader(path).SetValue(node, field, *at));
    } catch (const YAML::Exception& e) {
      return absl::InvalidArgumentError(absl::StrCat(path, ": ", e.msg));
    }
    break;
  }
  message.GetReflection()->Swap(&message, changed.get());
  return absl::OkStatus();
}

std::string ToYaml(const Message& message) {
  YAML::Emitter out;
  Emit(message, out);
  return absl::StrCat(out.c_str(), "\n");
}

}  // namespace bmuf
