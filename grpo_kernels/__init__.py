"""Kernels for GRPO-family losses: Triton on GPUs, C++ on CPUs, plain PyTorch as the definition."""

from .backends import use_backend
from .policy_loss import PolicyLossOutput, policy_loss
from .version import __version__

__all__ = ["PolicyLossOutput", "__version__", "policy_loss", "use_backend"]
