// The kernels for x86-64 with avx2.
#if defined(__x86_64__)
#include "kernel_headers.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
// To the end of the file: templates are instantiated there.
#pragma GCC target("avx2,fma,f16c")
#endif

#define GRPO_ISA avx2
#define GRPO_VECTOR_BYTES 32
#include "isa_kernels.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif  // __x86_64__
