// The kernels for x86-64 with avx512.
#if defined(__x86_64__)
#if defined(__GNUC__) && !defined(__clang__)
// gcc 12 warns about its own _mm512_scalef_ps.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include "kernel_headers.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), apply_to = function)
#else
// To the end of the file: templates are instantiated there.
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#endif

#define GRPO_ISA avx512
#define GRPO_VECTOR_BYTES 64
#include "isa_kernels.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif  // __x86_64__
