#define BMUF_KERNELS_NAME "scalar"
#define BMUF_KERNELS_TABLE kKernels_scalar
#include "core/kernels/loops.inc"
