#include "kernel_table.h"

#include <cstdlib>
#include <cstring>

namespace grpo_kernels {

namespace baseline {
extern const KernelTable kernel_table;
}
#if defined(__x86_64__)
namespace avx2 {
extern const KernelTable kernel_table;
}
namespace avx512 {
extern const KernelTable kernel_table;
}
#endif

namespace {

struct Choice {
  const char* name;
  const KernelTable* table;
};

Choice choose() {
#if defined(__x86_64__)
  const char* asked = std::getenv("GRPO_KERNELS_CPU");
  const auto allowed = [&](const char* name) { return !asked || !*asked || !std::strcmp(asked, name); };
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") &&
      __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl");
  if (has_avx512 && allowed("avx512")) return {"avx512", &avx512::kernel_table};
  if (has_avx2 && (allowed("avx2") || allowed("avx512"))) return {"avx2", &avx2::kernel_table};
#endif
  return {"baseline", &baseline::kernel_table};
}

const Choice& choice() {
  static const Choice chosen = choose();
  return chosen;
}

}  // namespace

const KernelTable& kernels() {
  return *choice().table;
}

const char* kernels_name() {
  return choice().name;
}

}  // namespace grpo_kernels
