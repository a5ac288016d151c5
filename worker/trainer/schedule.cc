#include "worker/trainer/schedule.h"

#include <algorithm>
#include <cmath>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace bmuf::worker {

absl::StatusOr<Schedule> ParseSchedule(const std::string& name) {
  if (name == "constant") return Schedule::kConstant;
  if (name == "linear") return Schedule::kLinear;
  if (name == "cosine") return Schedule::kCosine;
  return absl::InvalidArgumentError(absl::StrCat("schedule \"", name, "\": choose constant, linear or cosine"));
}

double LearningRateFactor(Schedule schedule, double progress) {
  const double p = std::clamp(progress, 0.0, 1.0);
  switch (schedule) {
    case Schedule::kConstant:
      return 1;
    case Schedule::kLinear:
      return 1 - p;
    case Schedule::kCosine:
      return (1 + std::cos(std::acos(-1.0) * p)) / 2;
  }
  return 1;
}

}  // namespace bmuf::worker
