"""What everything is computed in."""

from __future__ import annotations

import torch
from torch import Tensor


def compute_dtype(given: Tensor) -> torch.dtype:
    """fp64 for fp64, else fp32: what everything is computed and returned in."""
    return torch.float64 if given.dtype == torch.float64 else torch.float32
