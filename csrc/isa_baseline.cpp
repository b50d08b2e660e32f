// The kernels for every processor: 128-bit vectors (SSE2 on x86-64, NEON on arm64).
#include "kernel_headers.h"

#define GRPO_ISA baseline
#define GRPO_VECTOR_BYTES 16
#include "isa_kernels.h"
