"""Where benchmarks run: on the GPU where there is one, on one CPU thread otherwise."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

GPU = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET", "0") in ("", "0")
DEVICE = "cuda" if GPU else "cpu"


def synchronise() -> None:
    """Wait for the GPU, where there is one."""
    if GPU:
        torch.cuda.synchronize()


def machine_name() -> str:
    """A file name for this machine's results."""
    if GPU:
        return torch.cuda.get_device_name().lower().replace(" ", "-")
    return f"cpu-{platform.machine()}"


def processor() -> str:
    """The GPU's name where there is one, else the processor's, as the system tells it."""
    if GPU:
        return torch.cuda.get_device_name()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
