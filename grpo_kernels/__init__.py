"""Kernels for GRPO-family losses: Triton on GPUs, C++ on CPUs, plain PyTorch as the definition."""

from .backends import use_backend
from .version import __version__

__all__ = ["__version__", "use_backend"]
