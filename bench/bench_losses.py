"""The losses beside TorchRL's: of ready log-probs, of a ready distribution, and host overhead."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torchrl.objectives.llm as torchrl_losses
from tensordict import TensorDict
from torch import Tensor, nn
from torchrl.modules.distributions import LLMMaskedCategorical

import grpo
from bench import formulas
from bench.conftest import Bench
from bench.device import DEVICE
from bench.inputs import generator, policy_inputs, response_mask

LIBRARIES = {"ours": grpo, "TorchRL": torchrl_losses}
PLAIN = {"entropy_bonus": False}
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


def batch(vocab: int, near: Tensor) -> TensorDict:
    """Tokens, sampling and reference log-probs near the current ones, and advantages."""
    source = generator(1)
    rows, columns = near.shape

    def noisy() -> Tensor:
        return near + 0.1 * torch.randn(rows, columns, generator=source, device=DEVICE)

    tokens = torch.randint(0, vocab, (rows, columns), generator=source, device=DEVICE)
    advantage = torch.randn(rows, 1, 1, generator=source, device=DEVICE)
    return TensorDict(
        {
            "tokens": {"full": tokens},
            "log_probs": {"full": noisy()},
            "next": {"ref_log_probs": {"full": noisy()}},
            "advantage": advantage.expand(rows, columns, 1),
        },
        [rows],
    )


def total(output) -> Tensor:
    terms = [getattr(output, name, None) for name in LOSSES]
    present = [term for term in terms if term is not None]
    return present[0] if len(present) == 1 else torch.stack(present).sum()


def step(make: Callable, actor: nn.Module, tensordict: TensorDict, **options) -> Callable[[], None]:
    """Forward and backward of one loss, as a function of nothing."""
    loss = make(actor, **options)
    parameters = list(actor.parameters())

    def run() -> None:
        total(loss(tensordict)).backward()
        for parameter in parameters:
            parameter.grad = None

    return run


def steps(name: str, *given, **options) -> dict[str, Callable[[], None]]:
    """A step of the loss of that name from each library."""
    return {
        library: step(getattr(losses, name), *given, **options)
        for library, losses in LIBRARIES.items()
    }


def compiled_grpo_loss(*given, **options) -> Callable:
    """TorchRL's under torch.compile."""
    return formulas.compiled(torchrl_losses.GRPOLoss(*given, **options))


def ready_log_probs(rows: int, columns: int) -> tuple[ReadyActor, TensorDict]:
    inputs = policy_inputs(rows, columns)
    log_probs = inputs["log_probs"].detach()
    return ReadyActor(log_probs, inputs["mask"]), batch(1000, log_probs)


def ready_logits(rows: int, columns: int, vocab: int) -> tuple[LogitsActor, TensorDict]:
    """Every position is valid."""
    logits = torch.randn(rows, columns, vocab, generator=generator(), device=DEVICE)
    mask = torch.ones(rows, columns, dtype=torch.bool, device=DEVICE)
    near = torch.full((rows, columns), -math.log(vocab) - 0.5, device=DEVICE)
    return LogitsActor(logits, mask), batch(vocab, near)


def prepare(name: str, rows: int, columns: int, vocab: int) -> Callable[[], object]:
    """A step of one library, after one on another actor that loads what it needs."""
    library = LIBRARIES[name]
    step(library.GRPOLoss, *ready_logits(1, 2, 8))()
    actor, tensordict = ready_logits(rows, columns, vocab)
    loss = library.GRPOLoss(actor)
    return lambda: total(loss(tensordict)).backward()


def gradients(make: Callable, actor: nn.Module, tensordict: TensorDict, **options) -> list[Tensor]:
    """The sum of the losses, and its gradients."""
    value = total(make(actor, **options)(tensordict))
    found = torch.autograd.grad(value, list(actor.parameters()), allow_unused=True)
    return [value.detach(), *[grad for grad in found if grad is not None]]


def errors(bench: Bench, actor: nn.Module, tensordict: TensorDict, options: dict) -> None:
    """Keep the errors of both libraries against TorchRL's loss in fp64."""
    exact = tensordict.apply(lambda t: t.double() if t.is_floating_point() else t)
    want = gradients(torchrl_losses.GRPOLoss, actor.double(), exact, **options)
    actor.float()
    got = {
        name: gradients(losses.GRPOLoss, actor, tensordict, **options)
        for name, losses in LIBRARIES.items()
    }
    bench.error(got, want)


# Those of TorchRL 0.14.1, and what is asked of ours: plain, with everything.
SHAPES = {(8, 64): None, (64, 1024): (4, 6), (16, 8192): (6, 10), (4, 32768): None}


@pytest.mark.parametrize("kind", ["plain", "with everything"])
@pytest.mark.parametrize("shape", SHAPES, ids="{0[0]}x{0[1]}".format)
def test_grpo_loss_of_log_probs(bench: Bench, shape: tuple[int, int], kind: str) -> None:
    rows, columns = bench.size(*shape)
    options = PLAIN if kind == "plain" else EVERYTHING
    actor, tensordict = ready_log_probs(rows, columns)
    calls = steps("GRPOLoss", actor, tensordict, **options)
    calls["torch.compile"] = step(compiled_grpo_loss, actor, tensordict, **options)
    calls["our eager backend"] = step(grpo.GRPOLoss, actor, tensordict, backend="eager", **options)
    bench.times(f"GRPOLoss {kind}, log-probs, B={rows} T={columns}", calls, rounds=21)
    errors(bench, actor, tensordict, options)
    # log-probs, old and reference ones, entropy and the mask, read twice; gradients written.
    per_token = 2 * (2 * 4 + 1) + 4 if kind == "plain" else 2 * (3 * 4 + 1) + 4 + 2 * 4
    bench.bandwidth(per_token * rows * columns, *LIBRARIES, "torch.compile")
    if SHAPES[shape]:
        bench.faster_than("TorchRL", SHAPES[shape][kind != "plain"])


@pytest.mark.parametrize("kind", ["plain", "with everything"])
def test_host_overhead(bench: Bench, kind: str) -> None:
    """At a size that costs nothing."""
    options = PLAIN if kind == "plain" else EVERYTHING
    actor, tensordict = ready_log_probs(1, 8)
    calls = steps("GRPOLoss", actor, tensordict, **options)
    times = bench.times(f"GRPOLoss {kind}, host overhead, B=1 T=8", calls, rounds=201)
    bench.at_most("of TorchRL's time", times["ours"] / times["TorchRL"], 0.5, times)


@pytest.mark.parametrize("name", ["DAPO", "CISPOLoss"])
def test_other_losses_of_log_probs(bench: Bench, name: str) -> None:
    rows, columns = bench.size(64, 1024)
    actor, tensordict = ready_log_probs(rows, columns)
    calls = steps(name, actor, tensordict, **PLAIN)
    bench.times(f"{name} plain, log-probs, B={rows} T={columns}", calls, rounds=21)
    bench.faster_than("TorchRL", None)


@pytest.mark.parametrize("kind", ["entropy", "no entropy"])
@pytest.mark.parametrize("shape", [(4, 256, 32000), (2, 128, 128_256)], ids="{0[2]}".format)
def test_grpo_loss_of_logits(bench: Bench, shape: tuple[int, int, int], kind: str) -> None:
    rows, columns, vocab = bench.size(*shape)
    options = {} if kind == "entropy" else PLAIN
    actor, tensordict = ready_logits(rows, columns, vocab)
    calls = steps("GRPOLoss", actor, tensordict, **options)
    asked = shape[-1] == 32000
    if asked:
        calls["torch.compile"] = step(compiled_grpo_loss, actor, tensordict, **options)
    bench.times(f"GRPOLoss {kind}, logits, B={rows} T={columns} V={vocab}", calls)
    bench.faster_than("TorchRL", (15 if kind == "entropy" else 2.5) if asked else None)
    errors(bench, actor, tensordict, options)
    bench.bandwidth(3 * actor.logits.numel() * 4, *calls)
    if asked and kind == "entropy":
        logits_mib = actor.logits.numel() * 4 / 2**20
        peaks = bench.peak(prepare, {name: (name, rows, columns, vocab) for name in LIBRARIES})
        bench.at_most("peak extra memory over the logits'", peaks["ours"] / logits_mib, 1.1, peaks)


def test_grpo_loss_of_a_real_batch_of_logits(bench: Bench) -> None:
    """Prompts and padding are masked."""
    rows, columns, vocab = bench.size(4, 256, 32000)
    actor, tensordict = ready_logits(rows, columns, vocab)
    actor.mask = response_mask(rows, columns)
    calls = steps("GRPOLoss", actor, tensordict)
    valid = f"{actor.mask.float().mean():.0%} valid"
    bench.times(f"GRPOLoss entropy, logits, B={rows} T={columns} V={vocab}, {valid}", calls)
    bench.faster_than("TorchRL", None)
    read = int(actor.mask.sum()) * vocab * 4
    bench.bandwidth(2 * read + actor.logits.numel() * 4, *LIBRARIES)
