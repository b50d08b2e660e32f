"""The definition in plain PyTorch, in chunks of rows.

With c the logits, soft-capped if asked, and T the temperature:

    z = (c - max(c)) / T        log p = z - log sum e^z
    log_prob = log p[token]     entropy = H = -sum p log p
    d log_prob / d z_j = 1[j = token] - p_j
    d entropy / d z_j = -p_j (log p_j + H)
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

CHUNK_ELEMENTS = 2**20  # logits in one chunk: 4 MiB in fp32, in a CPU's cache


def _row_chunks(logits: Tensor) -> Iterator[tuple[slice, slice]]:
    """Slices of the two leading dimensions that cut `logits` into chunks."""
    batch, columns, vocab = logits.shape
    rows = max(1, CHUNK_ELEMENTS // vocab)
    batch_step = max(1, rows // max(1, columns))
    for b in range(0, batch, batch_step):
        for t in range(0, columns, rows):
            yield slice(b, b + batch_step), slice(t, t + rows)


def _cap(logits: Tensor, logit_softcap: float | None) -> Tensor:
    if logit_softcap is None:
        return logits
    return logit_softcap * torch.tanh(logits / logit_softcap)


def _checked_tokens(tokens: Tensor, mask: Tensor | None, vocab: int) -> tuple[Tensor, Tensor]:
    """Tokens safe to gather with, and which of them were in range."""
    if mask is not None:
        tokens = tokens.where(mask, 0)
    in_range = (tokens >= 0) & (tokens < vocab)
    if tokens.device.type == "cpu" and not in_range.all():
        row = int((~in_range).flatten().nonzero()[0])
        raise RuntimeError(
            f"tokens must be in [0, {vocab}) wherever the mask is true, got "
            f"{int(tokens.flatten()[row])} at row {row} of the flattened tokens"
        )
    return tokens.where(in_range, 0), in_range


def forward(
    logits: Tensor,
    tokens: Tensor,
    mask: Tensor | None,
    temperature: float | Tensor,
    entropy: bool,
    logit_softcap: float | None,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """log_probs, entropy, max(c) and log sum e^z, each [B, T], of logits [B, T, V]."""
    batch, columns, vocab = logits.shape
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    log_probs, entropies, row_max, log_sum = (
        logits.new_empty((batch, columns), dtype=dtype) for _ in range(4)
    )
    tokens, in_range = _checked_tokens(tokens, mask, vocab)
    for rows in _row_chunks(logits):
        c = logits[rows].to(dtype)
        if mask is not None:
            c = c.where(mask[rows].unsqueeze(-1), 0)
        c = _cap(c, logit_softcap)
        row_max[rows] = c.amax(-1)
        z = c - row_max[rows].unsqueeze(-1)
        z /= temperature[rows].unsqueeze(-1) if isinstance(temperature, Tensor) else temperature
        log_sum[rows] = z.exp().sum(-1).log()
        log_p = z.sub_(log_sum[rows].unsqueeze(-1))
        log_probs[rows] = log_p.gather(-1, tokens[rows].unsqueeze(-1)).squeeze(-1)
        if entropy:
            p = log_p.exp()
            # Where p is 0, log p may be -inf and their product NaN.
            entropies[rows] = -(p * log_p).masked_fill_(p == 0, 0).sum(-1)
    # A GPU does not raise for a token out of range: its row and its gradient become NaN.
    log_probs, log_sum = log_probs.where(in_range, torch.nan), log_sum.where(in_range, torch.nan)
    if mask is not None:
        log_probs, entropies, row_max, log_sum = (
            row.where(mask, 0) for row in (log_probs, entropies, row_max, log_sum)
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
    """Write the gradient of logits into `grad_logits`, which may be `logits` itself.

    `logits` may be a slice of the vocabulary, its tokens counted from the slice's first.
    """
    inside = (tokens >= 0) & (tokens < logits.shape[-1])
    tokens = tokens.where(inside, 0)
    for rows in _row_chunks(logits):
        c = logits[rows].to(row_max.dtype)
        if mask is not None:
            c = c.where(mask[rows].unsqueeze(-1), 0)
        c = _cap(c, logit_softcap)
        inverse = 1 / temperature
        if isinstance(inverse, Tensor):
            inverse = inverse[rows].unsqueeze(-1)
        log_p = (c - row_max[rows].unsqueeze(-1)) * inverse - log_sum[rows].unsqueeze(-1)
        p = log_p.exp()
        grad_z = torch.zeros_like(p)
        if grad_entropy is not None:
            grad_z -= grad_entropy[rows].unsqueeze(-1) * (log_p + entropy[rows].unsqueeze(-1))
        if grad_log_probs is not None:
            grad_z -= grad_log_probs[rows].unsqueeze(-1)
        # Where p is 0, log p may be -inf and their product NaN.
        grad_z = (grad_z * p).masked_fill_(p == 0, 0)
        if grad_log_probs is not None:
            on_token = grad_log_probs[rows].where(inside[rows], 0)
            grad_z.scatter_add_(-1, tokens[rows].unsqueeze(-1), on_token.unsqueeze(-1))
        grad = grad_z * inverse
        if logit_softcap is not None:
            grad *= 1 - (c / logit_softcap) ** 2
        if mask is not None:
            grad = grad.where(mask[rows].unsqueeze(-1), 0)
        grad_logits[rows] = grad.to(logits.dtype)
