"""GRPOLoss beside TorchRL's: on ready log-probs, on a ready distribution, and its host overhead.

python -m bench.losses [--quick]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
import torchrl.objectives.llm as torchrl_losses
from tensordict import TensorDict
from torch import Tensor, nn
from torchrl.modules.distributions import LLMMaskedCategorical

import grpo
from bench.figures import Figure, at_most, ratio, show
from bench.timing import medians_ms, peak_extra_mib

EVERYTHING = {"kl_mask_threshold": 0.5, "kl_to_ref_coeff": 0.1, "kl_to_inference_coeff": 0.1}
LOSSES = ("loss_objective", "loss_entropy", "loss_kl_to_ref", "loss_kl_to_inference")


class ReadyDistribution:
    """Log-probs and entropy that are known already."""

    def __init__(self, log_probs: Tensor, entropies: Tensor, mask: Tensor) -> None:
        self.log_probs, self.entropies, self.mask = log_probs, entropies, mask

    def log_prob(self, value: Tensor) -> Tensor:
        return self.log_probs

    def entropy(self) -> Tensor:
        return self.entropies


class ReadyActor(nn.Module):
    """An actor whose distribution costs nothing."""

    in_keys = ()

    def __init__(self, log_probs: Tensor, mask: Tensor) -> None:
        super().__init__()
        self.log_probs = nn.Parameter(log_probs)
        self.entropies = nn.Parameter(torch.rand_like(log_probs))
        self.mask = mask

    def get_dist(self, tensordict: TensorDict, logits_key: str) -> ReadyDistribution:
        return ReadyDistribution(self.log_probs, self.entropies, self.mask)


class LogitsActor(nn.Module):
    """An actor whose logits are ready."""

    in_keys = ()

    def __init__(self, logits: Tensor, mask: Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(logits)
        self.mask = mask

    def get_dist(self, tensordict: TensorDict, logits_key: str) -> LLMMaskedCategorical:
        return LLMMaskedCategorical(self.logits, self.mask)


def batch(rows: int, columns: int, vocab: int, near: Tensor) -> TensorDict:
    """Tokens, sampling and reference log-probs near the current ones, and advantages."""
    generator = torch.Generator().manual_seed(1)

    def noisy() -> Tensor:
        return near + 0.1 * torch.randn(rows, columns, generator=generator)

    return TensorDict(
        {
            "tokens": {"full": torch.randint(0, vocab, (rows, columns), generator=generator)},
            "log_probs": {"full": noisy()},
            "next": {"ref_log_probs": {"full": noisy()}},
            "advantage": torch.randn(rows, 1, 1, generator=generator).expand(rows, columns, 1),
        },
        [rows],
    )


def total(output) -> Tensor:
    terms = [getattr(output, name, None) for name in LOSSES]
    present = [term for term in terms if term is not None]
    return present[0] if len(present) == 1 else torch.stack(present).sum()


def step(library, actor: nn.Module, tensordict: TensorDict, **options):
    """Forward and backward of one GRPOLoss call, as a function of nothing."""
    loss = library.GRPOLoss(actor, **options)

    parameters = list(actor.parameters())

    def run() -> None:
        total(loss(tensordict)).backward()
        for parameter in parameters:
            parameter.grad = None

    return run


def both(actor: nn.Module, tensordict: TensorDict, rounds: int, **options) -> dict[str, float]:
    return medians_ms(
        {
            "torchrl": step(torchrl_losses, actor, tensordict, **options),
            "ours": step(grpo, actor, tensordict, **options),
        },
        rounds,
    )


def ready_log_probs(rows: int, columns: int) -> tuple[ReadyActor, TensorDict]:
    generator = torch.Generator().manual_seed(0)
    log_probs = torch.randn(rows, columns, generator=generator) - 2
    mask = torch.rand(rows, columns, generator=generator) > 0.1
    return ReadyActor(log_probs, mask), batch(rows, columns, 1000, log_probs)


def ready_logits(rows: int, columns: int, vocab: int) -> tuple[LogitsActor, TensorDict]:
    logits = torch.randn(rows, columns, vocab, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(rows, columns, dtype=torch.bool)
    near = torch.full((rows, columns), -torch.tensor(float(vocab)).log().item() - 0.5)
    return LogitsActor(logits, mask), batch(rows, columns, vocab, near)


def prepare_step(name: str, shape: tuple[int, int, int], entropy_bonus: bool):
    torch.set_num_threads(1)
    actor, tensordict = ready_logits(*shape)
    library = {"ours": grpo, "torchrl": torchrl_losses}[name]
    small, small_batch = ready_logits(1, 2, 8)  # what the first call loads is not the step's
    step(library, small, small_batch, entropy_bonus=entropy_bonus)()
    loss = library.GRPOLoss(actor, entropy_bonus=entropy_bonus)
    return lambda: total(loss(tensordict)).backward()


def figures(quick: bool = False) -> Iterator[Figure]:
    """GRPOLoss on log-probs, then its host overhead, then on logits."""
    torch.set_num_threads(1)
    plain = {"entropy_bonus": False}
    shapes = [(4, 32, 4, 6), (2, 64, 6, 10)] if quick else [(64, 1024, 4, 6), (16, 8192, 6, 10)]
    for rows, columns, asked_plain, asked_everything in shapes:
        actor, tensordict = ready_log_probs(rows, columns)
        for name, options, asked in (
            ("plain", plain, asked_plain),
            ("with everything", EVERYTHING, asked_everything),
        ):
            times = both(actor, tensordict, 3 if quick else 21, **options)
            case = f"GRPOLoss {name}, log-probs, B={rows} T={columns}"
            yield ratio(case, "faster than TorchRL", times, "torchrl", "ours", asked)
    actor, tensordict = ready_log_probs(1, 8)
    for name, options in (("plain", plain), ("with everything", EVERYTHING)):
        times = both(actor, tensordict, 3 if quick else 201, **options)
        share = times["ours"] / times["torchrl"]
        case = f"GRPOLoss {name}, host overhead, B=1 T=8"
        yield at_most(case, "of TorchRL's time", share, 0.5, times)

    shape = (2, 16, 100) if quick else (4, 256, 32000)
    actor, tensordict = ready_logits(*shape)
    logits_mib = actor.logits.numel() * 4 / 2**20
    for name, options, asked in (("entropy", {}, 15), ("no entropy", plain, 2.5)):
        times = both(actor, tensordict, 2 if quick else 7, **options)
        case = f"GRPOLoss {name}, logits, B={shape[0]} T={shape[1]} V={shape[2]}"
        yield ratio(case, "faster than TorchRL", times, "torchrl", "ours", asked)
    peaks = {name: peak_extra_mib(prepare_step, name, shape, True) for name in ("ours", "torchrl")}
    shares = {name: peak / logits_mib for name, peak in peaks.items()}
    case = f"GRPOLoss entropy, logits, B={shape[0]} T={shape[1]} V={shape[2]}"
    yield at_most(case, "peak extra memory over the logits'", shares["ours"], 1.1, shares)


if __name__ == "__main__":
    QUICK = "--quick" in sys.argv
    show(figures(QUICK), QUICK)
