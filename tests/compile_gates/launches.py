"""Compiles, for sm_90 and without a GPU, every launch of the cases that verify runs.

The gates choose the kernels' configurations by hand. Here the launchers do, with triton's own
specialisation of their arguments, which the interpreter doesn't have: an integer that is 1 becomes
a constant, for one. Up to triton's IR, where such mistakes show. The numbers are garbage: nothing
runs. Without TRITON_INTERPRET, so in a process of its own: `python -m tests.compile_gates.launches`
"""

from __future__ import annotations

import sys
from collections import Counter

import torch
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from grpo_kernels import backends, verify

TARGET = GPUTarget("cuda", 90, 32)


class NoDriver:
    """What JITFunction.run asks of a driver before it launches."""

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def main() -> int:
    """Print each launch that does not compile, and how many forms each kernel took."""
    compiled: Counter[str] = Counter()
    problems = []

    def compile_to_ir(self, key, signature, device, constexprs, options, attrs, warmup):
        kernel_cache, _, target, backend, _ = self.device_caches[device]
        context = ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        source = self.ASTSource(self, signature, constexprs, attrs)
        functions = backend.get_codegen_implementation(options)
        try:
            source.make_ir(target, options, functions, backend.get_module_map(), context)
        except Exception as error:
            problems.append(f"{self.__name__}: {error}")
        compiled[self.__name__] += 1
        kernel_cache[key] = self
        return self

    launch = JITFunction.run
    JITFunction._do_compile = compile_to_ir
    JITFunction.run = lambda self, *args, grid, warmup, **kwargs: launch(
        self, *args, grid=grid, warmup=True, **kwargs
    )
    driver.set_active(NoDriver())
    backends.why_not = lambda backend, device: None  # let the launchers have CPU tensors
    torch.set_num_threads(1)
    for case in verify.all_cases():
        before = len(problems)
        if case.operation != "group_subset":
            verify.run_case(case, "triton", "cpu")
        for problem in problems[before:]:
            print(f"{case.operation} {case.name} {case.dtype}: {problem}")
    print(dict(compiled))
    return int(bool(problems) or not compiled)


if __name__ == "__main__":
    sys.exit(main())
