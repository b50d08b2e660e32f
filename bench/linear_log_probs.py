"""linear_log_probs beside its bare matmuls, F.linear_cross_entropy, and Liger's chunked GRPO loss.

python -m bench.linear_log_probs [--quick]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from bench.figures import Figure, at_most, ratio, show
from bench.timing import medians_ms, peak_extra_mib
from grpo_kernels import linear_log_probs, policy_loss


def inputs(rows: int, width: int, vocab: int, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, width, generator=generator).to(dtype).requires_grad_()
    weight = (torch.randn(vocab, width, generator=generator) * width**-0.5).to(dtype)
    return hidden, weight.requires_grad_(), torch.randint(0, vocab, (rows,), generator=generator)


def backward_of(total, hidden, weight):
    return torch.autograd.grad(total, (hidden, weight))


def ours(hidden, weight, tokens):
    log_probs, entropies = linear_log_probs(hidden, weight, tokens)
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


def liger_loss():
    """Liger's chunked GRPO loss without a reference model, compiled; None where not installed."""
    try:
        from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss
    except ImportError:
        return None
    return LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False, loss_type="bnpo")


def grpo_loss(hidden, weight, tokens, old_log_probs, advantages):
    log_probs, entropy = linear_log_probs(hidden, weight, tokens)
    out = policy_loss(log_probs, old_log_probs, advantages, entropy=entropy, entropy_coeff=0.01)
    return backward_of(out.loss_objective + out.loss_entropy, hidden, weight)


def measure(shape: tuple, rounds: int) -> dict[str, float]:
    rows, _, vocab, dtype = shape
    hidden, weight, tokens = inputs(*shape)
    logits = torch.empty(rows, vocab, dtype=dtype)
    calls = {
        "ours": lambda: ours(hidden, weight, tokens),
        "four matmuls": lambda: bare_matmuls(hidden, weight, logits),
    }
    if hasattr(F, "linear_cross_entropy"):
        calls["F.linear_cross_entropy"] = lambda: cross_entropy(hidden, weight, tokens)
    return medians_ms(calls, rounds)


def measure_losses(shape: tuple, rounds: int) -> dict[str, float]:
    """Ours with policy_loss on top, entropy and metrics, beside Liger's, which has neither."""
    hidden, weight, tokens = inputs(*shape)
    sequences = 4
    batch = (hidden.detach().view(sequences, -1, shape[1]).requires_grad_(), weight)
    tokens = tokens.view(sequences, -1)
    old = torch.full(tokens.shape, -10.0)
    advantages = torch.linspace(-1, 1, sequences)
    calls = {"ours": lambda: grpo_loss(*batch, tokens, old, advantages)}
    liger = liger_loss()
    if liger is not None:
        mask = torch.ones_like(tokens)
        calls["Liger"] = lambda: backward_of(
            liger(*batch, tokens, mask, advantages, old_per_token_logps=old)[0], *batch
        )
    return medians_ms(calls, rounds)


def figures(quick: bool = False) -> Iterator[Figure]:
    """Time and memory against the bare matmuls and against other fused losses."""
    torch.set_num_threads(1)
    fp32 = torch.float32
    shapes = [
        # rows, width, vocab, dtype; asked: in matmuls, memory, against Liger
        ((1024, 128, 32000, fp32), None, None, 1.5),
        ((1024, 896, 151936, fp32), 1.35, 0.25, 1.0),
    ]
    if quick:
        shapes = [((64, 32, 1000, fp32), None, None, None)]
    for shape, in_matmuls, memory, over_liger in shapes:
        rows, width, vocab, dtype = shape
        case = f"linear_log_probs fp32, N={rows} H={width} V={vocab}"
        times = measure(shape, rounds=2 if quick else 1 if vocab > 100_000 else 3)
        matmuls = times["ours"] / times["four matmuls"]
        yield at_most(case, "time, of the four bare matmuls", matmuls, in_matmuls, times)
        if "F.linear_cross_entropy" in times:
            claim = "faster than F.linear_cross_entropy"
            yield ratio(case, claim, times, "F.linear_cross_entropy", "ours", None)
        gradient = vocab * width * torch.finfo(dtype).bits / 8 / 2**20
        peaks = {
            "ours": peak_extra_mib(prepare_ours, *shape),
            "F.linear_cross_entropy": peak_extra_mib(prepare_cross_entropy, *shape),
            "weight gradient": gradient,
        }
        share = (peaks["ours"] - gradient) / (rows * vocab * 4 / 2**20)
        claim = "memory less the weight gradient, of fp32 logits"
        yield at_most(case, claim, share, memory, peaks)
        if dtype == fp32:
            times = measure_losses(shape, rounds=2 if quick else 1 if vocab > 100_000 else 3)
            if "Liger" in times:
                case = f"linear_log_probs + policy_loss, H={width} V={vocab}"
                yield ratio(
                    case, "faster than Liger's GRPO loss", times, "Liger", "ours", over_liger
                )


if __name__ == "__main__":
    QUICK = "--quick" in sys.argv
    show(figures(QUICK), QUICK)
