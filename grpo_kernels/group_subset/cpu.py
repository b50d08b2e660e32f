"""Calls csrc/group_subset.cpp. torch.ops releases the GIL around the C++."""

from __future__ import annotations

import torch

_RULE_NUMBER = {"balanced": 0, "uniform": 1, "first": 2, "max_variance": 3}


def group_subset(
    values: torch.Tensor,
    k: int,
    rule: str,
    low: float | None,
    high: float | None,
    enumeration_limit: int,
    budget: int,
) -> tuple[list[int] | None, int] | None:
    """(indices, proof 0, 1 or 2 as in csrc/), or None for a value that isn't finite."""
    if values.dtype not in (torch.float64, torch.float32):
        values = values.double()
    if values.device.type != "cpu" or not values.is_contiguous():
        values = values.cpu().contiguous()
    bounded = low is not None
    proof, *indices = torch.ops.grpo_kernels_cpp.group_subset.default(
        values,
        k,
        _RULE_NUMBER[rule],
        bounded,
        low if bounded else 0.0,
        high if bounded else 0.0,
        enumeration_limit,
        budget,
    )
    if proof < 0:
        return None
    return indices or None, proof


def group_subsets(
    values: torch.Tensor,
    lengths: torch.Tensor,
    k: int,
    rule: str,
    low: float | None,
    high: float | None,
    enumeration_limit: int,
    budget: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(indices `[groups, k]`, -1 where none; proof `[groups]`)."""
    bounded = low is not None
    return torch.ops.grpo_kernels_cpp.group_subsets.default(
        values,
        lengths,
        k,
        _RULE_NUMBER[rule],
        bounded,
        low if bounded else 0.0,
        high if bounded else 0.0,
        enumeration_limit,
        budget,
    )
