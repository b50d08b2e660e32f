// Namespace grpo_kernels_cpp: the C++ side's operators, each defined next to its implementation.
// The Python side (grpo_kernels/<operation>/cpu.py) calls them as torch.ops.grpo_kernels_cpp.<name>.
#include <torch/csrc/stable/library.h>

#include <string>

#include "kernel_table.h"

namespace grpo_kernels {

std::string instruction_set() {
  return kernels_name();
}

}  // namespace grpo_kernels

STABLE_TORCH_LIBRARY(grpo_kernels_cpp, m) {
  m.def("instruction_set() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(grpo_kernels_cpp, CompositeExplicitAutograd, m) {
  m.impl("instruction_set", TORCH_BOX(&grpo_kernels::instruction_set));
}
