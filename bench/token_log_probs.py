"""token_log_probs beside the same maths in eager PyTorch and under torch.compile.

python -m bench.token_log_probs [--quick]
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from bench.timing import medians_ms
from grpo_kernels.token_log_probs import token_log_probs


def formula(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """What a user writes without a kernel."""
    log_p = torch.log_softmax(logits.float(), -1)
    return log_p.gather(-1, tokens.unsqueeze(-1)).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


compiled_formula = torch.compile(formula)


def forward_backward(function, logits: Tensor, tokens: Tensor) -> None:
    log_probs, entropy = function(logits, tokens)
    (log_probs.sum() + entropy.sum()).backward()
    logits.grad = None


def case(rows: int, vocab: int, dtype: torch.dtype, rounds: int) -> None:
    logits = (torch.randn(rows, vocab) * 3).to(dtype).requires_grad_()
    data = logits.detach()
    tokens = torch.randint(0, vocab, (rows,))
    scores = token_log_probs(logits, tokens)
    total = scores[0].sum() + scores[1].sum()
    ms = medians_ms(
        {
            "ours": lambda: forward_backward(token_log_probs, logits, tokens),
            "torch.compile": lambda: forward_backward(compiled_formula, logits, tokens),
            "eager": lambda: forward_backward(formula, logits, tokens),
            "forward": lambda: token_log_probs(data, tokens),
            "logits.sum()": lambda: data.sum(),
            "backward": lambda: torch.autograd.grad(total, logits, retain_graph=True),
            "copy": lambda: torch.empty_like(data).copy_(data),
        },
        rounds,
    )
    print(f"\n{rows} x {vocab} {dtype}, {torch.get_num_threads()} thread(s), median ms")
    for name, taken in ms.items():
        print(f"  {name:14} {taken:8.1f}")
    print(f"  {ms['torch.compile'] / ms['ours']:.2f}x faster than torch.compile (asked 1.8)")
    print(f"  {ms['eager'] / ms['ours']:.2f}x faster than eager")
    print(f"  {ms['logits.sum()'] / ms['forward']:.2f} of the bandwidth of sum (asked 0.35)")
    print(f"  {ms['backward'] / ms['copy']:.2f}x the time of a fresh copy (asked 1.4)")


def main() -> None:
    torch.set_num_threads(1)
    quick = "--quick" in sys.argv
    cases = [(16, 1000)] if quick else [(1024, 32000), (256, 151936), (256, 151937)]
    for rows, vocab in cases:
        for dtype in (torch.float32, torch.bfloat16):
            case(rows, vocab, dtype, rounds=2 if quick else 7)


if __name__ == "__main__":
    main()
