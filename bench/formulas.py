"""What a user writes without a kernel, eager or under torch.compile. Needs torch alone."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def policy_loss(
    log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, *extra: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """The sum of the loss terms, and TorchRL's metrics; `extra` is ref_log_probs and entropy."""
    log_ratio = torch.where(mask, log_probs - old, 0.0)
    full = bool(extra)
    count = mask.sum()
    trained = mask & (0.5 * log_ratio**2 <= 0.5) if full else mask
    ratio = log_ratio.exp()
    clipped = log_ratio.clamp(math.log(0.8), math.log(1.2))
    gain = torch.minimum(ratio * advantages, clipped.exp() * advantages)
    loss = -torch.where(trained, gain, 0.0).sum() / trained.sum().clamp_min(1)
    with torch.no_grad():
        weights = torch.where(trained, log_ratio, -torch.inf)
        ess = (2 * weights.logsumexp((0, 1)) - (2 * weights).logsumexp((0, 1))).exp() / count
        clip_fraction = (clipped != log_ratio).float().mean()
        kl_approx = -log_ratio.mean()
    metrics = [ess, clip_fraction, kl_approx]
    if full:
        ref, entropy = extra
        to_ref = torch.where(trained, ref - log_probs, 0.0)
        to_ref = (to_ref.expm1() - to_ref).mean()
        to_old = torch.where(trained, -log_ratio, 0.0)
        to_old = (to_old.expm1() - to_old).mean()
        bonus = torch.where(trained, entropy, 0.0).sum() / trained.sum().clamp_min(1)
        loss = loss + 0.1 * to_ref + 0.2 * to_old - 0.01 * bonus
        metrics += [to_ref.detach(), to_old.detach(), entropy.detach().mean()]
    return loss, metrics


def token_log_probs(
    logits: Tensor, tokens: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Log-prob of each token and entropy of each row."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    log_p = torch.log_softmax(logits, -1)
    scores = log_p.gather(-1, tokens.unsqueeze(-1)).squeeze(-1), -(log_p.exp() * log_p).sum(-1)
    if mask is None:
        return scores
    log_probs, entropy = (torch.where(mask, score, 0.0) for score in scores)
    return log_probs, entropy


def linear_log_probs(hidden: Tensor, weight: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The same from hidden states, through the whole [rows, vocab] logits."""
    return token_log_probs(hidden @ weight.t(), tokens)


def compiled(formula: Callable) -> Callable:
    """`formula` under torch.compile, for one shape at a time."""
    torch._dynamo.reset()
    return torch.compile(formula, dynamic=False)
