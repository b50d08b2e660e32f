"""token_log_probs beside the same maths in eager PyTorch and under torch.compile.

python -m bench.token_log_probs [--quick]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from torch import Tensor

from bench.figures import Figure, at_most, ratio, show
from bench.timing import medians_ms
from grpo_kernels import token_log_probs


def formula(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """What a user writes without a kernel."""
    log_p = torch.log_softmax(logits.float(), -1)
    return log_p.gather(-1, tokens.unsqueeze(-1)).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


compiled_formula = torch.compile(formula)


def forward_backward(function, logits: Tensor, tokens: Tensor) -> None:
    log_probs, entropy = function(logits, tokens)
    (log_probs.sum() + entropy.sum()).backward()
    logits.grad = None


def measure(rows: int, vocab: int, dtype: torch.dtype, rounds: int) -> dict[str, float]:
    logits = (torch.randn(rows, vocab) * 3).to(dtype).requires_grad_()
    data = logits.detach()
    tokens = torch.randint(0, vocab, (rows,))
    scores = token_log_probs(logits, tokens)
    total = scores[0].sum() + scores[1].sum()
    return medians_ms(
        {
            "ours": lambda: forward_backward(token_log_probs, logits, tokens),
            "torch.compile": lambda: forward_backward(compiled_formula, logits, tokens),
            "eager": lambda: forward_backward(formula, logits, tokens),
            "forward": lambda: token_log_probs(data, tokens),
            "logits.sum()": lambda: data.sum(),
            "backward": lambda: torch.autograd.grad(total, logits, retain_graph=True),
            "fresh copy": lambda: torch.empty_like(data).copy_(data),
        },
        rounds,
    )


def figures(quick: bool = False) -> Iterator[Figure]:
    """Forward and backward; the asked figures are for fp32."""
    torch.set_num_threads(1)
    shapes = [(16, 1000)] if quick else [(1024, 32000), (256, 151936), (256, 151937)]
    for rows, vocab in shapes:
        for dtype in (torch.float32, torch.bfloat16):
            fp32 = dtype == torch.float32
            times = measure(rows, vocab, dtype, rounds=2 if quick else 7)
            case = f"token_log_probs {'fp32' if fp32 else 'bf16'}, {rows} x {vocab}"
            asked = (1.8, 0.35, 1.4) if fp32 else (None,) * 3
            yield ratio(case, "faster than torch.compile", times, "torch.compile", "ours", asked[0])
            yield ratio(
                case,
                "forward: bandwidth of logits.sum()",
                times,
                "logits.sum()",
                "forward",
                asked[1],
            )
            copies = times["backward"] / times["fresh copy"]
            yield at_most(case, "backward, in fresh copies", copies, asked[2], times)


if __name__ == "__main__":
    QUICK = "--quick" in sys.argv
    show(figures(QUICK), QUICK)
