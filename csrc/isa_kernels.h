// The kernels of every operation, compiled for one instruction set. Included by each isa_*.cpp
// with GRPO_ISA (the namespace) and GRPO_VECTOR_BYTES set and the target pragma in force.

namespace grpo_kernels {
namespace GRPO_ISA {

#include "vec.h"

#include "policy_loss_kernel.h"
#include "token_log_probs_kernel.h"

extern const KernelTable kernel_table = {
    .policy_loss = policy_loss_kernels,
    .token_log_probs = token_log_probs_kernels,
};

}  // namespace GRPO_ISA
}  // namespace grpo_kernels
