"""policy_loss beside the same maths under torch.compile, and beside one pass over the same bytes.

python -m bench.policy_loss [--quick]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from torch import Tensor

from bench.figures import Figure, at_most, ratio, show
from bench.timing import medians_ms
from grpo_kernels import policy_loss


def formula(log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, *extra: Tensor):
    """What a user writes without a kernel: the loss terms and TorchRL's metrics."""
    log_ratio = torch.where(mask, log_probs - old, 0.0)
    full = bool(extra)
    count = mask.sum()
    trained = mask & (0.5 * log_ratio**2 <= 0.5) if full else mask
    ratio = log_ratio.exp()
    clipped = log_ratio.clamp(-0.2231, 0.1823)
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


compiled_formula = torch.compile(formula)


def inputs(rows: int, columns: int) -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    log_probs = torch.randn(rows, columns, generator=generator) - 2
    noise = [0.2 * torch.randn(rows, columns, generator=generator) for _ in range(2)]
    plain = [
        log_probs.requires_grad_(),
        log_probs.detach() + noise[0],
        torch.randn(rows, 1, generator=generator),
        torch.rand(rows, columns, generator=generator) > 0.1,
    ]
    entropy = torch.rand(rows, columns, generator=generator).requires_grad_()
    return plain, [log_probs.detach() + noise[1], entropy]


def ours(plain: list[Tensor], extra: list[Tensor]):
    if not extra:
        return policy_loss(*plain).loss_objective
    ref, entropy = extra
    out = policy_loss(
        *plain,
        ref_log_probs=ref,
        entropy=entropy,
        kl_mask_threshold=0.5,
        kl_to_ref_coeff=0.1,
        kl_to_inference_coeff=0.2,
        entropy_coeff=0.01,
    )
    return out.loss_objective + out.loss_kl_to_ref + out.loss_kl_to_inference + out.loss_entropy


def backward(loss: Tensor, tensors: list[Tensor]) -> None:
    loss.backward()
    for tensor in tensors:
        tensor.grad = None


def one_pass(tensors: list[Tensor]) -> None:
    """torch reads every input once."""
    for tensor in tensors:
        tensor.detach().sum()


def measure(plain: list[Tensor], others: list[Tensor], rounds: int) -> dict[str, float]:
    tensors = plain + others
    return medians_ms(
        {
            "ours": lambda: backward(ours(plain, others), tensors),
            "torch.compile": lambda: backward(compiled_formula(*plain, *others)[0], tensors),
            "eager": lambda: backward(formula(*plain, *others)[0], tensors),
            "ours, forward": lambda: ours(plain, others),
            "one pass": lambda: one_pass(tensors),
        },
        rounds,
    )


def figures(quick: bool = False) -> Iterator[Figure]:
    """At B=16 T=8192, forward and backward."""
    torch.set_num_threads(1)
    shape = (4, 64) if quick else (16, 8192)
    plain, extra = inputs(*shape)
    for name, others in (("plain", []), ("with everything", extra)):
        times = measure(plain, others, rounds=3 if quick else 41)
        case = f"policy_loss {name}, B={shape[0]} T={shape[1]}"
        yield ratio(case, "faster than torch.compile", times, "torch.compile", "ours", 1.5)
        passes = times["ours, forward"] / times["one pass"]
        yield at_most(case, "forward in passes over the inputs", passes, 3, times)


if __name__ == "__main__":
    QUICK = "--quick" in sys.argv
    show(figures(QUICK), QUICK)
