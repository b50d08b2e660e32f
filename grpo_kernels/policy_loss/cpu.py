"""`policy_loss` by the C++ kernels in csrc/policy_loss.cpp: one pass over memory each way."""

from __future__ import annotations

import torch
from torch import Tensor

from .options import InputGradients, LossGradients, PolicyLossOptions, PolicyLossOutput


def forward(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor | None,
    ref_log_probs: Tensor | None,
    entropy: Tensor | None,
    options: PolicyLossOptions,
) -> tuple[PolicyLossOutput, Tensor]:
    """See eager.forward."""
    *output, saved = torch.ops.grpo_kernels_cpp.policy_loss_forward.default(
        log_probs,
        old_log_probs,
        advantages,
        mask,
        ref_log_probs,
        entropy,
        options.token_objective,
        *options.flatten()[1:],
    )
    return PolicyLossOutput(*output), saved


def backward(
    upstream: LossGradients,
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor | None,
    ref_log_probs: Tensor | None,
    entropy: Tensor | None,
    options: PolicyLossOptions,
    saved: Tensor,
    wanted: tuple[bool, bool, bool],
) -> InputGradients:
    """See eager.backward."""
    gradients = torch.ops.grpo_kernels_cpp.policy_loss_backward.default(
        *upstream,
        log_probs,
        old_log_probs,
        advantages,
        mask,
        ref_log_probs,
        entropy,
        options.token_objective,
        *options.flatten()[1:],
        saved,
        *wanted,
    )
    return InputGradients(*gradients)
