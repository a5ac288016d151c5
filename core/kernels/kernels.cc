#include "core/kernels/kernels.h"

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace bmuf {

// One per kernels_*.cc.
extern const Kernels kKernels_scalar;
extern const Kernels kKernels_avx2;
extern const Kernels kKernels_avx512;

const Kernels& ScalarKernels() { return kKernels_scalar; }

std::vector<const Kernels*> AvailableKernels() {
  // These ask the processor and whether the operating system keeps the wide registers.
  std::vector<const Kernels*> available = {&kKernels_scalar};
  if (__builtin_cpu_supports("avx2")) available.push_back(&kKernels_avx2);
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq")) {
    available.push_back(&kKernels_avx512);
  }
  return available;
}

absl::StatusOr<const Kernels*> KernelsByName(const std::string& name) {
  const std::vector<const Kernels*> available = AvailableKernels();
  if (name == "auto" || name.empty()) return available.back();
  std::string names;
  for (const Kernels* kernels : available) {
    if (name == kernels->name) return kernels;
    absl::StrAppend(&names, names.empty() ? "" : ", ", kernels->name);
  }
  if (name == "avx2" || name == "avx512") {
    return absl::FailedPreconditionError(
        absl::StrCat("this machine cannot run kernels ", name, "; it can run ", names));
  }
  return absl::InvalidArgumentError(absl::StrCat("no kernels named \"", name, "\"; there are auto, ", names));
}

}  // namespace bmuf
