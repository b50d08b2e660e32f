// The kernels as plain function pointers, one table per instruction set, and the choice among them.
#pragma once

#include "policy_loss.h"
#include "token_log_probs.h"

namespace grpo_kernels {

struct KernelTable {
  PolicyLossKernels policy_loss;
  TokenLogProbsKernels token_log_probs;
};

// The best table that this processor runs. GRPO_KERNELS_CPU=baseline|avx2|avx512 asks for less.
const KernelTable& kernels();

// Its name: "baseline", "avx2" or "avx512".
const char* kernels_name();

}  // namespace grpo_kernels
