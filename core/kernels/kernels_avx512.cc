#define BMUF_KERNELS_NAME "avx512"
#define BMUF_KERNELS_TABLE kKernels_avx512
#include "core/kernels/loops.inc"
