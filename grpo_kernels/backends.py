"""Which implementation of an operation runs, and how a caller overrides the choice.

Every public function takes `backend="auto" | "triton" | "cpu" | "eager"`:

* `triton`: GPU kernels, for CUDA, ROCm and XPU tensors (for CPU tensors too under
  `TRITON_INTERPRET=1`, which interprets the same kernels);
* `cpu`: C++ kernels from csrc/, for CPU tensors;
* `eager`: the definition in plain PyTorch, anywhere;
* `auto`: the first of these that can run, or what `use_backend` says.

`auto` never fails for want of a kernel. A named backend that cannot run raises with the reason.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Literal

import torch

Backend = Literal["auto", "triton", "cpu", "eager"]
BACKENDS = ("auto", "triton", "cpu", "eager")
GPU_DEVICE_TYPES = ("cuda", "xpu")  # ROCm devices report "cuda"

_preferred: ContextVar[str] = ContextVar("grpo_kernels_backend", default="auto")


def _load_cpp_extension() -> str | None:
    """Load csrc/'s operators; None, or the reason why not."""
    libraries = sorted(Path(__file__).parent.glob("_C*.so"))
    if not libraries:
        return (
            "the C++ extension is not built; install a C++20 compiler and reinstall grpo-kernels "
            "without GRPO_KERNELS_NO_CPP"
        )
    try:
        torch.ops.load_library(libraries[0])
    except OSError as error:
        return f"the C++ extension {libraries[0].name} does not load: {error}"
    return None


def _triton_problem() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    return None


cpp_problem: str | None = _load_cpp_extension()
triton_problem: str | None = _triton_problem()
triton_interprets: bool = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


def why_not(backend: str, device: torch.device) -> str | None:
    """None if `backend` runs on `device`, else the reason it doesn't."""
    if backend == "eager":
        return None
    if backend == "cpu":
        if device.type != "cpu":
            return f"the C++ kernels need CPU tensors, got {device}"
        return cpp_problem
    if triton_problem is not None:
        return triton_problem
    if device.type in GPU_DEVICE_TYPES or (device.type == "cpu" and triton_interprets):
        return None
    return (
        f"triton needs tensors on a GPU, got {device}; set TRITON_INTERPRET=1 before the first "
        "import to interpret the kernels on CPU tensors"
    )


def check_backend_name(backend: str) -> None:
    """Raise ValueError for a name that is no backend."""
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {BACKENDS}, got {backend!r}")


@torch.compiler.assume_constant_result  # torch.compile cannot trace a ContextVar
def _preferred_backend() -> str:
    return _preferred.get()


def resolve_backend(backend: str, device: torch.device) -> str:
    """The backend that runs for tensors on `device`: "triton", "cpu" or "eager".

    Raises ValueError for an unknown name, RuntimeError for a named backend that cannot run.
    """
    if backend == "auto":
        backend = _preferred_backend()
    if backend == "auto":
        device_type = device.type
        if device_type == "cpu":
            return "cpu" if cpp_problem is None else "eager"
        if device_type in GPU_DEVICE_TYPES and triton_problem is None:
            return "triton"
        return "eager"
    check_backend_name(backend)
    reason = why_not(backend, device)
    if reason is not None:
        raise RuntimeError(f"backend={backend!r} cannot run: {reason}")
    return backend


@contextlib.contextmanager
def use_backend(backend: Backend) -> Iterator[None]:
    """Make `backend` the meaning of "auto" inside the `with` block, in this thread or task."""
    check_backend_name(backend)
    token = _preferred.set(backend)
    try:
        yield
    finally:
        _preferred.reset(token)


def on_device(tensor: torch.Tensor) -> contextlib.AbstractContextManager:
    """Where triton must launch a kernel on `tensor`: it takes the current device and its stream."""
    if tensor.device.type == "cpu":
        return contextlib.nullcontext()
    return torch.get_device_module(tensor.device).device(tensor.device)


def report() -> str:
    """Which backends run on this machine's devices, and why the others do not."""
    devices = [torch.device("cpu")]
    if torch.accelerator.is_available():
        devices.append(torch.accelerator.current_accelerator())
    lines = []
    for device in devices:
        for backend in BACKENDS[1:]:
            reason = why_not(backend, device)
            state = "runs" if reason is None else f"does not run: {reason}"
            lines.append(f"{device.type:4} {backend:6} {state}")
    return "\n".join(lines)
