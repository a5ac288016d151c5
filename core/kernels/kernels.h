// Loops over raw arrays: everything that touches each element of a model.
//
// Problem: the same numbers must come out on every machine, whatever instruction set it has, because replicas, replays
// and audits compare bits.
// Idea: the scalar functions are the definition. Vector versions do the same IEEE operations in the same order per
// element (no contraction, correctly rounded division and square root), so they give the same bits, NaN payloads aside.
// Sums over elements (norms) follow one fixed tree, see sum_of_squares.
// Usage: const Kernels& k = **KernelsByName("auto"); k.accumulate(sum, delta, weight, n);
// The functions are declared in table.h.
//
// All functions: arrays aligned for their element type and no further, any n including 0, no overlap unless said; no
// allocation; thread-safe (pure).
#ifndef BMUF_CORE_KERNELS_KERNELS_H_
#define BMUF_CORE_KERNELS_KERNELS_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "core/kernels/table.h"

namespace bmuf {

// The definition.
const Kernels& ScalarKernels();

// What this machine can run, the definition first, the fastest last.
std::vector<const Kernels*> AvailableKernels();

// "auto" (the fastest), "scalar", "avx2" or "avx512". InvalidArgument for another name; FailedPrecondition if this
// machine cannot run it.
absl::StatusOr<const Kernels*> KernelsByName(const std::string& name);

}  // namespace bmuf

#endif  // BMUF_CORE_KERNELS_KERNELS_H_
