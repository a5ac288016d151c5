#include "worker/trainer/device.h"

#include <algorithm>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "core/base/limits.h"

namespace bmuf::worker {

std::string Device::ToString() const { return kind == Kind::kCpu ? "cpu" : absl::StrCat("cuda:", index); }

absl::StatusOr<std::vector<Device>> ParseDevices(const std::string& text) {
  std::vector<Device> devices;
  for (absl::string_view part : absl::StrSplit(text, ',')) {
    const std::pair<std::string, std::string> halves = absl::StrSplit(part, absl::MaxSplits(':', 1));
    int number = 1;
    const bool has_number = absl::StrContains(part, ":");
    if (has_number && (!absl::SimpleAtoi(halves.second, &number) || number < 0)) number = -1;
    if (halves.first == "cpu" && number >= 1 && number <= static_cast<int>(limits::kMaxTrajectoriesPerWorker)) {
      devices.insert(devices.end(), number, Device{});
    } else if (halves.first == "cuda" && has_number && number >= 0) {
      const Device gpu{Device::Kind::kCuda, number};
      if (std::find(devices.begin(), devices.end(), gpu) != devices.end()) {
        return absl::InvalidArgumentError(absl::StrCat("devices \"", text, "\": cuda:", number, " is named twice"));
      }
      devices.push_back(gpu);
    } else {
      return absl::InvalidArgumentError(absl::StrCat("devices \"", text, "\": \"", part,
                                                     "\" is neither cpu:K (K trajectories, 1 to ",
                                                     limits::kMaxTrajectoriesPerWorker, ") nor cuda:I (GPU I)"));
    }
  }
  if (devices.size() > limits::kMaxTrajectoriesPerWorker) {
    return absl::InvalidArgumentError(
        absl::StrCat("devices \"", text, "\": more than ", limits::kMaxTrajectoriesPerWorker, " trajectories"));
  }
  return devices;
}

}  // namespace bmuf::worker
