"""linear_log_probs beside its bare matmuls, F.linear_cross_entropy, and logits made whole.

python -m bench.linear_log_probs [--quick]
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F

from bench.timing import medians_ms, peak_extra_mib
from grpo_kernels.linear_log_probs import linear_log_probs
from grpo_kernels.token_log_probs import token_log_probs


def inputs(rows: int, width: int, vocab: int, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, width, generator=generator).to(dtype).requires_grad_()
    weight = (torch.randn(vocab, width, generator=generator) * width**-0.5).to(dtype)
    return hidden, weight.requires_grad_(), torch.randint(0, vocab, (rows,), generator=generator)


def backward_of(total, hidden, weight):
    return torch.autograd.grad(total, (hidden, weight))


def ours(hidden, weight, tokens, entropy=True):
    log_probs, entropies = linear_log_probs(hidden, weight, tokens, entropy=entropy)
    total = log_probs.sum() + entropies.sum() if entropy else log_probs.sum()
    return backward_of(total, hidden, weight)


def whole_logits(hidden, weight, tokens):
    log_probs, entropies = token_log_probs(F.linear(hidden, weight), tokens, overwrite_logits=True)
    return backward_of(log_probs.sum() + entropies.sum(), hidden, weight)


def cross_entropy(hidden, weight, tokens):
    return backward_of(
        F.linear_cross_entropy(hidden, weight, tokens, reduction="sum"), hidden, weight
    )


def bare_matmuls(hidden, weight, logits):
    """Forward, once again for the recompute, and the two gradients."""
    hidden, weight = hidden.detach(), weight.detach()
    torch.mm(hidden, weight.t(), out=logits)
    torch.mm(hidden, weight.t(), out=logits)
    torch.mm(logits, weight)
    torch.mm(logits.t(), hidden)


def prepare_ours(*shape):
    torch.set_num_threads(1)
    tensors = inputs(*shape)
    ours(tensors[0][:1], tensors[1][:64], tensors[2][:1] % 64)
    return lambda: ours(*tensors)


def prepare_cross_entropy(*shape):
    torch.set_num_threads(1)
    tensors = inputs(*shape)
    cross_entropy(tensors[0][:1], tensors[1][:64], tensors[2][:1] % 64)
    return lambda: cross_entropy(*tensors)


def case(rows: int, width: int, vocab: int, dtype: torch.dtype, rounds: int) -> None:
    hidden, weight, tokens = inputs(rows, width, vocab, dtype)
    logits = torch.empty(rows, vocab, dtype=dtype)
    calls = {
        "ours": lambda: ours(hidden, weight, tokens),
        "ours, no entropy": lambda: ours(hidden, weight, tokens, entropy=False),
        "four matmuls": lambda: bare_matmuls(hidden, weight, logits),
        "whole logits": lambda: whole_logits(hidden, weight, tokens),
    }
    if hasattr(F, "linear_cross_entropy"):
        calls["F.linear_cross_entropy"] = lambda: cross_entropy(hidden, weight, tokens)
    ms = medians_ms(calls, rounds)
    print(f"\nH={width} V={vocab} N={rows} {dtype}, {torch.get_num_threads()} thread(s)")
    for name, taken in ms.items():
        print(f"  {name:22} {taken:9.1f} ms  {taken / ms['four matmuls']:5.2f}x four matmuls")
    shape = (rows, width, vocab, dtype)
    gradient = vocab * width * weight.element_size() / 2**20
    fp32_logits = rows * vocab * 4 / 2**20
    peak = peak_extra_mib(prepare_ours, *shape)
    print(
        f"  peak extra {peak:.0f} MiB; less the weight gradient ({gradient:.0f} MiB) "
        f"{(peak - gradient) / fp32_logits:.3f} of the fp32 logits (asked 0.25)"
    )
    if "F.linear_cross_entropy" in calls:
        peak = peak_extra_mib(prepare_cross_entropy, *shape)
        print(f"  F.linear_cross_entropy: peak extra {peak:.0f} MiB")


def main() -> None:
    torch.set_num_threads(1)
    if "--quick" in sys.argv:
        case(64, 32, 1000, torch.float32, rounds=2)
        return
    case(1024, 128, 32000, torch.float32, rounds=5)
    case(1024, 896, 151936, torch.float32, rounds=3)
    case(1024, 896, 151936, torch.bfloat16, rounds=3)


if __name__ == "__main__":
    main()
