#define BMUF_KERNELS_NAME "avx2"
#define BMUF_KERNELS_TABLE kKernels_avx2
#include "core/kernels/loops.inc"
