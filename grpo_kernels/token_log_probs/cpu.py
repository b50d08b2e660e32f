"""The C++ kernels of csrc/token_log_probs.cpp."""

from __future__ import annotations

import torch
from torch import Tensor

_cpp = torch.ops.grpo_kernels_cpp


def forward(
    logits: Tensor,
    tokens: Tensor,
    mask: Tensor | None,
    temperature: float | Tensor,
    entropy: bool,
    logit_softcap: float | None,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """As eager.forward."""
    per_row = isinstance(temperature, Tensor)
    log_probs, entropies, row_max, log_sum = _cpp.token_log_probs_forward.default(
        logits,
        tokens,
        mask,
        temperature if per_row else None,
        1.0 if per_row else temperature,
        entropy,
        logit_softcap or 0.0,
    )
    return log_probs, entropies if entropy else None, row_max, log_sum


def backward(
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
    logits: Tensor,
    tokens: Tensor,
    mask: Tensor | None,
    temperature: float | Tensor,
    logit_softcap: float | None,
    entropy: Tensor | None,
    row_max: Tensor,
    log_sum: Tensor,
    grad_logits: Tensor,
) -> None:
    """As eager.backward."""
    per_row = isinstance(temperature, Tensor)
    _cpp.token_log_probs_backward.default(
        grad_log_probs,
        grad_entropy,
        logits,
        tokens,
        mask,
        temperature if per_row else None,
        1.0 if per_row else temperature,
        logit_softcap or 0.0,
        entropy,
        row_max,
        log_sum,
        grad_logits,
    )
