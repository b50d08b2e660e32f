"""Kernels for GRPO-family losses: Triton on GPUs, C++ on CPUs, plain PyTorch as the definition."""

from .backends import use_backend
from .group_subset import Subset, Subsets, group_subset, group_subsets
from .linear_log_probs import linear_log_probs
from .policy_loss import PolicyLossOutput, policy_loss
from .token_log_probs import token_log_probs
from .version import __version__

__all__ = [
    "PolicyLossOutput",
    "Subset",
    "Subsets",
    "__version__",
    "group_subset",
    "group_subsets",
    "linear_log_probs",
    "policy_loss",
    "token_log_probs",
    "use_backend",
]
