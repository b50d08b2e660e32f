"""Random inputs with the shapes and masks of real batches, the same at every call."""

from __future__ import annotations

import torch
from torch import Tensor

from bench.device import DEVICE


def generator(seed: int = 0, device: str = DEVICE) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def response_mask(rows: int, columns: int, device: str = DEVICE) -> Tensor:
    """The first quarter is the prompt; responses end anywhere after it, the longest at the end."""
    prompt = columns // 4
    ends = torch.randint(
        prompt + 1, columns + 1, (rows, 1), generator=generator(rows, device), device=device
    )
    ends[0] = columns
    position = torch.arange(columns, device=device)
    return (position >= prompt) & (position < ends)


def policy_inputs(
    rows: int, columns: int, dtype: torch.dtype = torch.float32, device: str = DEVICE
) -> dict[str, Tensor]:
    """Everything that policy_loss can take, log-probs near the current ones."""
    source = generator(rows + columns, device)

    def normal(scale: float) -> Tensor:
        made = torch.randn(rows, columns, generator=source, device=device)
        return (scale * made).to(dtype)

    current = normal(1) - 2
    return {
        "log_probs": current.requires_grad_(),
        "old_log_probs": current.detach() + normal(0.2),
        "advantages": normal(1)[:, :1],
        "mask": response_mask(rows, columns, device),
        "ref_log_probs": current.detach() + normal(0.2),
        "entropy": normal(1).abs().requires_grad_(),
    }


def token_inputs(
    rows: int, vocab: int, dtype: torch.dtype = torch.float32, device: str = DEVICE
) -> tuple[Tensor, Tensor]:
    """Logits [rows, vocab] and tokens [rows]."""
    source = generator(vocab, device)
    logits = torch.empty(rows, vocab, dtype=dtype, device=device)
    logits.normal_(0, 3, generator=source)
    tokens = torch.randint(0, vocab, (rows,), generator=source, device=device)
    return logits.requires_grad_(), tokens


def linear_inputs(
    rows: int, width: int, vocab: int, dtype: torch.dtype = torch.float32, device: str = DEVICE
) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states [rows, width], an output layer [vocab, width] and tokens [rows]."""
    source = generator(vocab, device)
    hidden, weight = (
        torch.empty(size, width, dtype=dtype, device=device).normal_(0, 1, generator=source)
        for size in (rows, vocab)
    )
    weight *= width**-0.5
    tokens = torch.randint(0, vocab, (rows,), generator=source, device=device)
    return hidden.requires_grad_(), weight.requires_grad_(), tokens
