// The kernels of every operation, compiled for one instruction set. Included by each isa_*.cpp
// with GRPO_ISA (the namespace) and GRPO_VECTOR_BYTES set and the target pragma in force.

namespace grpo_kernels {
namespace GRPO_ISA {

#include "vec.h"

#include "policy_loss_kernel.h"

extern const KernelTable kernel_table = {
    policy_loss_forward<float>,
    policy_loss_forward<double>,
    policy_loss_backward<float>,
    policy_loss_backward<double>,
};

}  // namespace GRPO_ISA
}  // namespace grpo_kernels
