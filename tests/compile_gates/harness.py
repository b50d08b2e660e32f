"""Compiles Triton kernels to machine code for GPUs that need not be present, and reads it.

Runs without TRITON_INTERPRET, so in a process of its own: `python -m tests.compile_gates.update`.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import triton
import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
NVIDIA_TOOLS = Path(os.path.dirname(triton.backends.nvidia.__file__)) / "bin"


@dataclass
class Configuration:
    """One compiled form of a kernel, as a launcher asks for it.

    `arguments` has a type ("*bf16", "i64", "fp32") for each run-time argument, or a tuple of such
    types and of constants; every other argument of the kernel is a compile-time constant, from
    `constants` or None. Pointers are taken to be 16-byte aligned, as launchers see to, but for
    those in `unaligned`; a number divisible by 16 is marked so: "i32:16".
    """

    name: str
    kernel: JITFunction
    arguments: dict[str, str | tuple]
    constants: dict[str, object] = field(default_factory=dict)
    num_warps: int = 4
    hip_num_warps: int | None = None  # where it differs: a warp there has 64 lanes
    options: dict[str, object] = field(default_factory=dict)
    unaligned: tuple[str, ...] = ()
    # Bytes of the widest load and store of global memory that there must be.
    load_bytes: int = 0
    store_bytes: int = 0
    fp64: bool = False

    def source(self) -> ASTSource:
        names = self.kernel.arg_names
        unknown = (self.arguments.keys() | self.constants.keys()) - set(names)
        assert not unknown, f"{self.name}: the kernel has no arguments {unknown}"
        signature, constants, attributes = {}, {}, {}
        for index, name in enumerate(names):
            if name in self.arguments:
                signature[name] = _signature(
                    self.arguments[name],
                    (index,),
                    constants,
                    {} if name in self.unaligned else attributes,
                )
            else:
                signature[name] = "constexpr"
                constants[(index,)] = self.constants.get(name)
        return ASTSource(self.kernel, signature, constants, attributes)


def _signature(argument, path: tuple[int, ...], constants: dict, attributes: dict):
    """The argument's type; constants and divisibility go where triton keeps them, by path."""
    if isinstance(argument, tuple):
        return tuple(
            _signature(element, (*path, index), constants, attributes)
            for index, element in enumerate(argument)
        )
    if not isinstance(argument, str):
        constants[path] = argument
        return "constexpr"
    if argument.startswith("*") or argument.endswith(":16"):
        attributes[path] = [["tt.divisibility", 16]]
    return argument.removesuffix(":16")


def _tool(name: str, *arguments: str) -> str:
    return subprocess.run(
        [NVIDIA_TOOLS / name, *arguments], check=True, capture_output=True, text=True
    ).stdout


def _nvidia_facts(asm: dict) -> dict:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        usage = _tool("cuobjdump", "-res-usage", file.name)
        sass = _tool("nvdisasm", "-c", file.name)
    number = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}

    def widest(instruction: str) -> int:
        found = re.findall(rf"\b{instruction}\.E([.\w]*)", sass)
        bits = [int(b) for suffixes in found for b in re.findall(r"\.(64|128|256)\b", suffixes)]
        return max(bits, default=32) // 8 if found else 0

    return {
        "registers": number["REG"],
        "spills": len(re.findall(r"\b(?:LDL|STL)\b", sass)) + number["LOCAL"],
        "fp64": len(re.findall(r"\b(?:DADD|DMUL|DFMA|DSETP|DMNMX|MUFU\.\w+64H|\w+\.F64)\b", sass)),
        "load_bytes": widest("LDG"),
        "store_bytes": widest("STG"),
    }


def _amd_facts(asm: dict) -> dict:
    text = asm["amdgcn"]

    def number(key: str) -> int:
        return int(re.search(rf"\.{key}:\s*(\d+)", text)[1])

    def widest(kind: str) -> int:
        words = re.findall(rf"\b(?:global|buffer|flat)_{kind}_dword(?:x(\d))?\b", text)
        return max((4 * int(count or 1) for count in words), default=0)

    return {
        "registers": number("vgpr_count"),
        # Scalar registers spill to lanes of vector registers, not to memory.
        "spills": number("vgpr_spill_count"),
        "fp64": len(re.findall(r"\bv_\w+_f64", text)),
        "load_bytes": widest("load"),
        "store_bytes": widest("store"),
    }


def facts(configuration: Configuration, target: str) -> dict:
    """Registers, spills, shared memory, fp64 instructions, widest global load and store."""
    num_warps = configuration.num_warps
    if target == "gfx942" and configuration.hip_num_warps is not None:
        num_warps = configuration.hip_num_warps
    compiled = triton.compile(
        configuration.source(),
        target=TARGETS[target],
        options={"num_warps": num_warps, **configuration.options},
    )
    read = _amd_facts if target == "gfx942" else _nvidia_facts
    return {**read(compiled.asm), "shared_bytes": compiled.metadata.shared}


def requirements(configuration: Configuration) -> dict:
    """What the test asserts, beside the table, for every target."""
    return {
        "load_bytes": configuration.load_bytes,
        "store_bytes": configuration.store_bytes,
        "fp64": configuration.fp64,
    }


def table(configurations: list[Configuration]) -> dict:
    """{configuration: {"requires": ..., target: facts}}."""
    return {
        configuration.name: {
            "requires": requirements(configuration),
            **{target: facts(configuration, target) for target in TARGETS},
        }
        for configuration in configurations
    }
