"""Check on this machine every backend that runs: python -m grpo_kernels.verify

Each operation, forward and all gradients, against its definition: the plain formulas below, in
fp64, differentiated by autograd. They share no code with the backends.

An error is held against a tolerance in units of rounding: ROUNDINGS units of the precision that
the backend computes in, times the sum of the magnitudes that were added up, plus the rounding to
the result's own dtype. Right kernels come to 0.6 of it in fp32 and, by that last rounding, to just
under 1 in 16 bits; a wrong sign or count is off by 10^4 tolerances and more.
"""

from __future__ import annotations

import argparse
import itertools
import math
import multiprocessing
import os
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from . import backends, linear_log_probs, policy_loss, token_log_probs
from .group_subset import group_subset
from .policy_loss.options import OBJECTIVES, SEMANTICS

ROUNDINGS = 16
# exp may give 0 for what is smaller: subnormals on GPUs, and what the C++ exp does not scale to.
FLUSHED = {torch.float32: 1e-35, torch.float64: 1e-300}
LOSSES = ("loss_objective", "loss_kl_to_ref", "loss_kl_to_inference", "loss_entropy")
METRICS = ("clip_fraction", "kl_approx", "ESS", "entropy", "kl_to_ref", "kl_to_inference")


@dataclass
class Check:
    """One compared tensor; the tolerance is for each element."""

    what: str
    got: Tensor
    want: Tensor
    tolerance: Tensor

    def worst(self) -> float:
        """The largest error over its tolerance; infinite where NaN or infinity differ."""
        got = self.got.detach().to("cpu", torch.float64)
        want = self.want.detach().to("cpu", torch.float64)
        if got.shape != want.shape:
            return math.inf
        same = (got == want) | (got.isnan() & want.isnan())
        excess = (got - want).abs() / self.tolerance.detach().cpu()
        excess = torch.where(same, 0.0, excess.nan_to_num(nan=math.inf, posinf=math.inf))
        return excess.max().item() if excess.numel() else 0.0


@dataclass
class Case:
    """One call of one operation: which, at what dtype, with what."""

    operation: str
    name: str
    dtype: torch.dtype
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass
class Result:
    """What came of a case in a backend on a device."""

    operation: str
    backend: str
    device: str
    dtype: str
    name: str
    worst: float
    problem: str | None


def unit(dtype: torch.dtype) -> float:
    """The largest relative error of rounding to `dtype`."""
    return torch.finfo(dtype).eps / 2


def stored_unit(dtype: torch.dtype) -> float:
    """`unit`, but twice that where triton's interpreter stores bf16: it cuts, GPUs round."""
    cuts = backends.triton_interprets and dtype == torch.bfloat16
    return unit(dtype) * (2 if cuts else 1)


def tolerance(scale: Tensor, want: Tensor, dtype: torch.dtype) -> Tensor:
    """For a result of `dtype` whose terms' magnitudes add up to `scale`."""
    computed = _wide(dtype)
    units = ROUNDINGS * unit(computed)
    if computed == torch.float64:  # as wide as the reference, whose exp(x) - 1 cancels
        units *= 64
    rounding = 0.0
    if dtype != computed:
        subnormal = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        rounding = stored_unit(dtype) * want.abs() + subnormal / 2
    return torch.where(scale > 0, units * scale + FLUSHED[computed] + rounding, 0.0)


# policy_loss


def policy_loss_inputs(
    rows: int, columns: int, dtype: torch.dtype, seed: int, kind: str
) -> dict[str, Tensor | None]:
    """Tensors on the CPU; `kind` says what is unusual about them."""
    generator = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(rows, columns, generator=generator)

    current = -2 + normal(1)
    inputs = {
        "log_probs": current,
        "old_log_probs": current + normal(0.5),
        "advantages": normal(1),
        "mask": torch.rand(rows, columns, generator=generator) > 0.3,
        "ref_log_probs": current + normal(0.5),
        "entropy": normal(1).abs(),
    }
    if kind == "far ratios":  # beyond what exp holds in fp32, on either side of the clip
        inputs["old_log_probs"][:, ::2] = current[:, ::2] - 100
        inputs["advantages"][:, ::2] = inputs["advantages"][:, ::2].abs()
        inputs["advantages"][:, ::4] = 0
        inputs["old_log_probs"][:, 1::8] = current[:, 1::8] + 100
    if kind == "fully masked rows":
        inputs["mask"][::2] = False
    if kind == "all masked":
        inputs["mask"][:] = False
    inputs = {name: value if name == "mask" else value.to(dtype) for name, value in inputs.items()}
    if kind == "no mask":
        inputs["mask"] = None
    elif kind == "poisoned":  # at masked slots; and a token with no old log-prob
        for name, value in inputs.items():
            if name != "mask":
                value[~inputs["mask"]] = math.nan if name != "entropy" else math.inf
        inputs["old_log_probs"][0, 0] = math.nan
        inputs["old_log_probs"][-1, -1] = -math.inf
    return inputs


def strided(value: Tensor | None, device: torch.device) -> Tensor | None:
    """The same values, as a slice of something wider that starts off alignment."""
    if value is None or value.ndim < 2:
        return value if value is None else value.to(device)
    wide = value.new_zeros((value.shape[0], value.shape[1] + 3, *value.shape[2:])).to(device)
    view = wide[:, 1:-2]
    view.copy_(value)
    return view


def hold(value: Tensor, low: float, high: float) -> Tensor:
    """`value` within [low, high], with gradient at the bounds, where releases of torch differ."""
    return torch.where(value > high, high, torch.where(value < low, low, value))


def policy_loss_reference(
    inputs: dict[str, Tensor | None],
    *,
    objective: str = "grpo",
    semantics: str = "torchrl",
    aggregation: str = "token_mean",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_mask_threshold: float | None = None,
    log_ratio_cap: float | None = None,
    kl_to_ref_coeff: float | None = None,
    kl_to_inference_coeff: float | None = None,
    entropy_coeff: float | None = None,
    normaliser: float | None = None,
) -> dict[str, tuple[Tensor, Tensor]]:
    """Every term, and the sum of the magnitudes it is made of, from fp64 inputs."""
    old, mask = inputs["old_log_probs"], inputs["mask"]
    corrected = semantics == "corrected"
    asked = torch.ones_like(old, dtype=torch.bool) if mask is None else mask
    valid = asked & old.isfinite()

    def at(where: Tensor, value: Tensor) -> Tensor:
        return torch.where(where, value, 0.0)

    log_prob = at(valid, inputs["log_probs"])
    log_ratio = log_prob - at(valid, old)
    trained = valid
    if kl_mask_threshold is not None:
        trained = valid & (log_ratio**2 / 2 <= kl_mask_threshold)
    cap = math.inf if log_ratio_cap is None else log_ratio_cap
    advantage = at(trained, inputs["advantages"])
    held = hold(at(trained, log_ratio), -cap, cap)
    ratio = held.exp()
    clipped_ratio = hold(ratio, 1 - clip_low, 1 + clip_high)
    if objective == "grpo":
        value = -torch.minimum(ratio * advantage, clipped_ratio * advantage)
    elif corrected:
        value = -clipped_ratio.detach() * advantage * at(trained, log_prob)
    else:
        value = -clipped_ratio * advantage

    def total(value: Tensor, where: Tensor, count: float | None) -> Tensor:
        """By `aggregation` over the tokens of `where`."""
        value = at(where, value)
        if aggregation == "none":
            return value
        if aggregation == "token_mean":
            return value.sum() / (where.sum().clamp_min(1) if count is None else count)
        per_row = where.sum(1)
        if count is None:
            count = (per_row > 0).sum().clamp_min(1) if corrected else max(len(per_row), 1)
        mean = (value.sum(1) / per_row.clamp_min(1)).sum() / count
        return mean if corrected else mean.reshape(1)

    def aggregated(value: Tensor, where: Tensor) -> tuple[Tensor, Tensor]:
        return total(value, where, normaliser), total(value.abs(), where, normaliser)

    def metric(value: Tensor, where: Tensor) -> tuple[Tensor, Tensor]:
        """Mean over valid tokens, or over all positions."""
        count = valid.sum().clamp_min(1) if corrected else max(valid.numel(), 1)
        value = at(where, value)
        return value.sum() / count, value.abs().sum() / count

    terms = {"loss_objective": aggregated(value, trained)}
    kl_over = valid if corrected else trained

    def kl_terms(name: str, target: Tensor, coeff: float | None) -> None:
        distance = hold(at(kl_over, target) - at(kl_over, log_prob), -cap, cap)
        penalty = torch.expm1(distance) - distance
        size = torch.expm1(distance).abs() + distance.abs()
        mean = terms[f"kl_{name}"] = metric(penalty, kl_over)[0], metric(size, kl_over)[0]
        if coeff is not None:
            if corrected:
                mean = aggregated(penalty, valid)[0], aggregated(size, valid)[0]
            terms[f"loss_kl_{name}"] = (coeff * mean[0], abs(coeff) * mean[1])

    kl_terms("to_ref", inputs["ref_log_probs"], kl_to_ref_coeff)
    if kl_to_inference_coeff is not None:
        kl_terms("to_inference", old, kl_to_inference_coeff)
    if entropy_coeff is not None:
        terms["loss_entropy"] = aggregated(-entropy_coeff * inputs["entropy"], trained)
    terms["entropy"] = metric(inputs["entropy"], valid if corrected else asked)
    terms["kl_approx"] = metric(-log_ratio, valid)

    seen = held if corrected else log_ratio
    above, below = seen > math.log1p(clip_high), seen < math.log1p(-clip_low)
    clipped = above | below
    if corrected and objective == "grpo":
        clipped = torch.where(advantage >= 0, above, below)
    terms["clip_fraction"] = metric(clipped.double(), trained if corrected else valid)
    if trained.any():
        base = log_ratio[trained].max()
        weight = at(trained, (log_ratio - base).exp())
        ess = weight.sum() ** 2 / (weight**2).sum() / trained.sum()
    else:
        ess = log_ratio.new_zeros(())
    terms["ESS"] = (ess, ess)
    return terms


def check_policy_loss(case: Case, backend: str, device: torch.device) -> Iterator[Check]:
    options = dict(case.arguments)
    rows, columns = options.pop("shape", (5, 33))
    kind, lay_out = options.pop("kind", "usual"), options.pop("strided", False)
    as_tensors = options.pop("tensors", ())
    row_advantages = options.pop("row_advantages", False)
    seed = rows * 1000 + columns
    inputs = policy_loss_inputs(rows, columns, case.dtype, seed, kind)
    if row_advantages:
        inputs["advantages"] = inputs["advantages"][:, :1].nan_to_num(1.0)
    exact = {
        name: value if value is None or name == "mask" else value.double()
        for name, value in inputs.items()
    }
    if row_advantages:
        exact["advantages"] = exact["advantages"].expand(rows, columns)
        inputs["advantages"] = inputs["advantages"][:, 0]
    differentiable = ("log_probs", "ref_log_probs", "entropy")
    place = (
        strided if lay_out else lambda value, device: value if value is None else value.to(device)
    )
    given = {name: place(value, device) for name, value in inputs.items()}
    for name in differentiable:
        given[name] = given[name].detach().requires_grad_()
        exact[name] = exact[name].detach().requires_grad_()
    numbers = {
        name: torch.tensor(value, dtype=torch.float64, device=device)
        if name in as_tensors
        else value
        for name, value in options.items()
    }
    out = policy_loss(**given, **numbers, backend=backend)
    terms = policy_loss_reference(exact, **options)

    for name in (*LOSSES, *METRICS):
        got = getattr(out, name)
        if (got is None) != (name not in terms):
            raise AssertionError(f"{name} is {'absent' if got is None else 'there'}")
        if got is not None:
            want, scale = terms[name]
            yield Check(name, got, want, tolerance(scale, want, got.dtype))

    generator = torch.Generator().manual_seed(seed + 1)
    losses = [name for name in LOSSES if name in terms]
    upstream = {
        name: torch.randn(terms[name][0].shape, generator=generator, dtype=torch.float64).to(
            out.loss_objective.dtype
        )
        for name in losses
    }
    got = torch.autograd.grad(
        [getattr(out, name) for name in losses],
        [given[name] for name in differentiable],
        [upstream[name].to(device) for name in losses],
        allow_unused=True,
    )
    want = {name: torch.zeros_like(exact[name]) for name in differentiable}
    scale = {name: torch.zeros_like(exact[name]) for name in differentiable}
    for loss in losses:  # one by one: the magnitudes of what cancels in their sum
        gradients = torch.autograd.grad(
            terms[loss][0],
            [exact[name] for name in differentiable],
            upstream[loss].double(),
            retain_graph=True,
            allow_unused=True,
        )
        for name, gradient in zip(differentiable, gradients):
            if gradient is not None:
                want[name] += gradient
                scale[name] += gradient.abs()
    for name, gradient in zip(differentiable, got):
        if gradient is None:
            gradient = torch.zeros_like(given[name])
        check = tolerance(scale[name], want[name], gradient.dtype)
        yield Check(f"gradient of {name}", gradient, want[name], check)


EVERYTHING = {
    "kl_mask_threshold": 0.4,
    "log_ratio_cap": 0.75,
    "kl_to_ref_coeff": 0.1,
    "kl_to_inference_coeff": 0.2,
    "entropy_coeff": 0.01,
}


def policy_loss_cases() -> Iterator[Case]:
    """Every objective, semantics and aggregation with everything on; then one thing at a time."""

    def case(name: str, dtype: torch.dtype = torch.float32, **arguments: Any) -> Case:
        return Case("policy_loss", name, dtype, arguments)

    kinds = [(o, s) for o in OBJECTIVES for s in SEMANTICS]
    aggregations = ("token_mean", "prompt_mean", "none")
    for objective, semantics in kinds:
        chosen = {"objective": objective, "semantics": semantics}
        for aggregation in aggregations:
            name = f"{objective}, {semantics}, {aggregation}, everything, masked NaN, strided"
            yield case(
                name,
                **chosen,
                aggregation=aggregation,
                **EVERYTHING,
                kind="poisoned",
                strided=True,
            )
        yield case(f"{objective}, {semantics}, plain", **chosen)
        yield case(f"{objective}, {semantics}, far ratios", **chosen, kind="far ratios")
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        for (objective, semantics), aggregation in zip(kinds, (*aggregations, "token_mean")):
            chosen = {"objective": objective, "semantics": semantics, "aggregation": aggregation}
            name = f"{objective}, {semantics}, {aggregation}, everything, masked NaN"
            yield case(name, dtype, **chosen, **EVERYTHING, kind="poisoned")
    for semantics in ("torchrl", "corrected"):
        chosen = {"semantics": semantics, "aggregation": "prompt_mean", **EVERYTHING}
        for kind in ("fully masked rows", "all masked", "no mask"):
            yield case(f"grpo, {semantics}, prompt_mean, {kind}", **chosen, kind=kind)
    for shape in ((1, 1), (7, 1), (1, 129), (3, 1025), (2, 2048), (130, 5)):
        yield case(
            f"grpo, corrected, shape {shape}", shape=shape, semantics="corrected", **EVERYTHING
        )
    for shape in ((0, 4), (4, 0)):
        yield case(f"grpo, torchrl, empty {shape}", shape=shape, **EVERYTHING)
    for dtype in (torch.float32, torch.float64):
        yield case(
            "grpo, corrected, bounds and normaliser in tensors, advantages [B]",
            dtype,
            semantics="corrected",
            clip_high=0.28,
            normaliser=100.0,
            tensors=("clip_low", "clip_high", "normaliser"),
            row_advantages=True,
        )
    yield case("grpo, torchrl, prompt_mean, normaliser", aggregation="prompt_mean", normaliser=64)


# token_log_probs and linear_log_probs


@dataclass
class TokenReference:
    """Scores and gradient of the logits in fp64, with the tolerances of what a backend gives."""

    log_probs: Tensor
    entropy: Tensor
    grad_logits: Tensor
    log_probs_tolerance: Tensor
    entropy_tolerance: Tensor
    grad_logits_tolerance: Tensor


def token_reference(
    logits: Tensor,
    tokens: Tensor,
    mask: Tensor | None,
    upstream: tuple[Tensor, Tensor],
    dtype: torch.dtype,
    temperature: float | Tensor = 1.0,
    logit_softcap: float | None = None,
    entropy: bool = True,
) -> TokenReference:
    """log softmax, entropy and their gradients of fp64 logits [..., V] that were of `dtype`."""
    keep = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
    row = keep.unsqueeze(-1)
    safe = torch.where(row, logits, 0.0).detach().requires_grad_()
    if isinstance(temperature, Tensor):
        temperature = temperature.double().expand(tokens.shape).unsqueeze(-1)
    capped = safe if logit_softcap is None else logit_softcap * torch.tanh(safe / logit_softcap)
    scaled = capped / temperature
    log_p = scaled - scaled.logsumexp(-1, keepdim=True)
    p = log_p.exp()
    finite_log_p = torch.where(p == 0, 0.0, log_p)  # 0 log 0 = 0
    index = torch.where(keep, tokens.long(), 0).unsqueeze(-1)
    log_probs = torch.where(keep, log_p.gather(-1, index).squeeze(-1), 0.0)
    entropies = torch.where(keep, -(p * finite_log_p).sum(-1), 0.0)
    by_log_prob, by_entropy = upstream
    loss = (log_probs.where(by_log_prob != 0, 0.0) * by_log_prob).sum()
    if entropy:
        loss = loss + (entropies * by_entropy).sum()
    (grad,) = torch.autograd.grad(loss, safe)

    with torch.no_grad():
        # A capped logit is off by a rounding of the cap, however near the maximum it is.
        capping = 0.0 if logit_softcap is None else logit_softcap / temperature
        slack = 1 + (-finite_log_p) + capping
        at_row = slack.new_zeros(tokens.shape) + (
            capping.squeeze(-1) if isinstance(capping, Tensor) else capping
        )
        at_token = torch.zeros_like(p).scatter_(-1, index, 1.0)
        size = by_log_prob.abs().unsqueeze(-1) * (at_token + p * slack)
        if entropy:
            spread = -finite_log_p + entropies.unsqueeze(-1) + capping
            size = size + by_entropy.abs().unsqueeze(-1) * p * spread * slack
        # Where p underflows in the reference it may not in the backend.
        size = torch.where(row, size / temperature + FLUSHED[torch.float64], 0.0)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        finite = log_probs.isfinite()
        return TokenReference(
            log_probs,
            entropies,
            grad,
            tolerance(
                torch.where(keep & finite, 1 + log_probs.abs() + at_row, 0.0), log_probs, wide
            ),
            tolerance(torch.where(keep, 1 + entropies + at_row, 0.0), entropies, wide),
            tolerance(size, grad, dtype),
        )


def adversarial(logits: Tensor, kind: str) -> Tensor:
    """Logits [..., V] of a kind that breaks careless kernels."""
    vocab = logits.shape[-1]
    if kind == "first half -inf":
        logits[..., : vocab // 2] = -math.inf
    elif kind == "one finite":
        logits[..., : vocab - 1] = -math.inf
    elif kind == "all -110":
        logits[:] = -110.0
    elif kind == "large":
        logits *= 300
    elif kind == "rising":
        logits[:] = torch.linspace(-60, 60, vocab)
    return logits


def _selection(
    shape: tuple[int, ...], vocab: int, masked: bool, kind: str, generator: torch.Generator
) -> tuple[Tensor, Tensor | None]:
    low = vocab // 2 if "-inf" in kind else vocab - 1 if kind == "one finite" else 0
    tokens = torch.randint(low, vocab, shape, generator=generator)
    if not masked:
        return tokens, None
    mask = torch.rand(shape, generator=generator) > 0.4
    mask.view(-1)[0] = False
    return tokens.where(mask, -100), mask


def _upstream(shape: tuple[int, ...], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return tuple(torch.randn(shape, generator=generator) for _ in range(2))


def check_token_log_probs(case: Case, backend: str, device: torch.device) -> Iterator[Check]:
    options = dict(case.arguments)
    shape, vocab = options.pop("shape", (2, 3)), options.pop("vocab", 1025)
    kind, masked = options.pop("kind", "usual"), options.pop("masked", False)
    lay_out, overwrite = options.pop("strided", False), options.pop("overwrite_logits", False)
    generator = torch.Generator().manual_seed(vocab)
    logits = adversarial(3 * torch.randn(*shape, vocab, generator=generator), kind).to(case.dtype)
    tokens, mask = _selection(shape, vocab, masked, kind, generator)
    if masked:
        logits[~mask] = math.nan
    if options.pop("row_temperatures", False):
        options["temperature"] = 0.5 + torch.rand(shape, generator=generator)
    upstream = _upstream(shape, generator)
    if case.dtype == torch.float64:
        upstream = tuple(value.double() for value in upstream)
    reference = token_reference(
        logits.double(), tokens, mask, tuple(u.double() for u in upstream), case.dtype, **options
    )
    leaf = strided(logits, device) if lay_out else logits.to(device)
    leaf = leaf.detach().requires_grad_()
    on_device = {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in options.items()
    }
    log_probs, entropies = token_log_probs(
        leaf.clone() if overwrite else leaf,
        tokens.to(device),
        None if mask is None else mask.to(device),
        **on_device,
        overwrite_logits=overwrite,
        backend=backend,
    )
    yield Check("log_probs", log_probs, reference.log_probs, reference.log_probs_tolerance)
    outputs = [log_probs]
    if options.get("entropy", True):
        yield Check("entropy", entropies, reference.entropy, reference.entropy_tolerance)
        outputs.append(entropies)
    (grad,) = torch.autograd.grad(
        outputs, leaf, [value.to(device) for value in upstream[: len(outputs)]]
    )
    yield Check("gradient of logits", grad, reference.grad_logits, reference.grad_logits_tolerance)


def token_log_probs_cases() -> Iterator[Case]:
    """Dtypes by vocabularies, then one thing at a time."""

    def case(name: str, dtype: torch.dtype = torch.float32, **arguments: Any) -> Case:
        return Case("token_log_probs", name, dtype, arguments)

    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        for vocab in (1, 7, 1025, 4096):
            yield case(f"V={vocab}, masked NaN", dtype, vocab=vocab, masked=True)
        for kind in ("first half -inf", "one finite", "all -110", "large", "rising"):
            yield case(f"V=4099, {kind}", dtype, vocab=4099, kind=kind)
        yield case(
            "softcap, temperature a row, masked NaN, strided",
            dtype,
            masked=True,
            strided=True,
            logit_softcap=5.0,
            row_temperatures=True,
        )
    yield case("temperature 0.7", temperature=0.7)
    yield case("temperature 0.7", torch.float64, temperature=0.7)
    yield case("without entropy", torch.bfloat16, entropy=False)
    yield case("overwrite_logits", torch.bfloat16, overwrite_logits=True, masked=True)
    yield case("one row, V=50257", torch.bfloat16, shape=(1, 1), vocab=50257)
    yield case("one row, V=151937", torch.bfloat16, shape=(1, 1), vocab=151937)
    yield case("600 rows, not split", torch.bfloat16, shape=(600, 1), vocab=33)
    yield case("no rows", shape=(0, 3), vocab=33)


def check_linear_log_probs(case: Case, backend: str, device: torch.device) -> Iterator[Check]:
    options = dict(case.arguments)
    shape, vocab = options.pop("shape", (2, 5)), options.pop("vocab", 131)
    masked, with_bias = options.pop("masked", False), options.pop("bias", False)
    width, dtype = 16, case.dtype
    generator = torch.Generator().manual_seed(vocab)

    def small_numbers(*size: int) -> Tensor:
        return torch.randint(-1, 2, size, generator=generator).to(dtype)

    # Halves and ones: every logit is exact in every dtype, so the tolerance need not cover the
    # rounding of the logits, which the dtype of the weight decides and not the backend.
    hidden, weight = small_numbers(*shape, width), small_numbers(vocab, width) / 2
    bias = small_numbers(vocab) if with_bias else None
    tokens, mask = _selection(shape, vocab, masked, "usual", generator)
    if options.pop("row_temperatures", False):
        options["temperature"] = 0.5 + torch.rand(shape, generator=generator)
    upstream = _upstream(shape, generator)
    if dtype == torch.float64:
        upstream = tuple(value.double() for value in upstream)
    logits = hidden.double() @ weight.double().T + (0 if bias is None else bias.double())
    scoring = {name: value for name, value in options.items() if name != "workspace_mib"}
    reference = token_reference(
        logits, tokens, mask, tuple(u.double() for u in upstream), dtype, **scoring
    )
    clean = hidden.clone()
    if masked:
        hidden[~mask] = math.nan
    leaves = [
        None if value is None else value.to(device).requires_grad_()
        for value in (hidden, weight, bias)
    ]
    on_device = {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in options.items()
    }
    log_probs, entropies = linear_log_probs(
        leaves[0],
        leaves[1],
        tokens.to(device),
        None if mask is None else mask.to(device),
        bias=leaves[2],
        **on_device,
        backend=backend,
    )
    yield Check("log_probs", log_probs, reference.log_probs, reference.log_probs_tolerance)
    yield Check("entropy", entropies, reference.entropy, reference.entropy_tolerance)
    got = torch.autograd.grad(
        (log_probs, entropies),
        [leaf for leaf in leaves if leaf is not None],
        [value.to(device) for value in upstream],
    )
    # The logits' gradient is rounded to the weight's dtype, and so may be each partial product.
    by_logits = reference.grad_logits.reshape(-1, vocab)
    off = reference.grad_logits_tolerance.reshape(-1, vocab)
    off = off + (unit(dtype) + ROUNDINGS * unit(_wide(dtype))) * by_logits.abs()
    rows = clean.double().reshape(-1, width)
    wants = [
        ("hidden", by_logits @ weight.double(), off @ weight.double().abs()),
        ("weight", by_logits.T @ rows, off.T @ rows.abs()),
    ]
    if bias is not None:
        wants.append(("bias", by_logits.sum(0), off.sum(0)))
    for gradient, (name, want, slack) in zip(got, wants):
        want, slack = want.reshape(gradient.shape), slack.reshape(gradient.shape)
        slack = slack + unit(dtype) * want.abs()
        yield Check(f"gradient of {name}", gradient, want, slack)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def linear_log_probs_cases() -> Iterator[Case]:
    """Dtypes, plain and with everything, in one chunk of rows and in several."""

    def case(name: str, dtype: torch.dtype, **arguments: Any) -> Case:
        return Case("linear_log_probs", name, dtype, arguments)

    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        yield case("one chunk", dtype)
        yield case(
            "several chunks, bias, masked NaN, softcap, temperature a row",
            dtype,
            shape=(3, 30),
            masked=True,
            bias=True,
            logit_softcap=5.0,
            row_temperatures=True,
        )
    yield case("temperature 0.7, 200 rows", torch.bfloat16, shape=(200,), temperature=0.7)


# group_subset


def check_group_subset(case: Case, backend: str, device: torch.device) -> Iterator[Check]:
    """Against all subsets, one by one."""
    values, k, bounds = (case.arguments[name] for name in ("values", "k", "bounds"))
    rule = case.arguments.get("rule", "balanced")
    subsets = [list(subset) for subset in itertools.combinations(range(len(values)), k)]
    chosen = group_subset(values, k, bounds=bounds, rule=rule, backend=backend)
    indices = chosen.indices

    def spread(subset: list[int]) -> float:
        return statistics.pvariance(values[i] for i in subset)

    if rule == "max_variance":
        got, want = spread(indices), max(map(spread, subsets))
        got, want = torch.tensor(got).double(), torch.tensor(want).double()
        yield Check("variance", got, want, 1e-12 * want)
        return
    low, high = bounds

    def preference(subset: list[int]) -> tuple:
        picked = [values[i] for i in subset]
        return abs(sum(picked) / k - (low + high) / 2), min(picked) - max(picked), subset

    allowed = [s for s in subsets if low < sum(values[i] for i in s) / k < high]
    best = min(allowed, key=preference, default=[])
    yield Check("indices", torch.tensor(indices or []), torch.tensor(best), torch.zeros(()))


def group_subset_cases() -> Iterator[Case]:
    """Groups with ties, without an answer, and of every size."""

    def case(name: str, **arguments: Any) -> Case:
        return Case("group_subset", name, torch.float64, arguments)

    generator = torch.Generator().manual_seed(0)
    for n, k in ((1, 1), (5, 5), (6, 2), (9, 4), (13, 6)):
        real = torch.randn(n, generator=generator, dtype=torch.float64).tolist()
        coarse = torch.randint(0, 3, (n,), generator=generator).double().tolist()
        for kind, values, bounds in (("real", real, (-0.7, 0.9)), ("0, 1, 2", coarse, (0.3, 1.7))):
            yield case(f"balanced, {k} of {n}, {kind}", values=values, k=k, bounds=bounds)
        name = f"max_variance, {k} of {n}"
        yield case(name, values=real, k=k, bounds=None, rule="max_variance")
    yield case("balanced, none within the bounds", values=[0.0, 1.0], k=1, bounds=(0.2, 0.8))


CHECKS = {
    "group_subset": check_group_subset,
    "policy_loss": check_policy_loss,
    "token_log_probs": check_token_log_probs,
    "linear_log_probs": check_linear_log_probs,
}


def all_cases() -> list[Case]:
    return [
        *policy_loss_cases(),
        *token_log_probs_cases(),
        *linear_log_probs_cases(),
        *group_subset_cases(),
    ]


def small_cases() -> list[Case]:
    """Those that triton's interpreter, at milliseconds a row of a grid, gets through."""

    def small(case: Case) -> bool:
        shape = case.arguments.get("shape", ())
        return (
            math.prod(shape[:1]) <= 8 and math.prod(shape) * case.arguments.get("vocab", 1) < 5000
        )

    return [case for case in all_cases() if small(case)]


def run_case(case: Case, backend: str, device: str) -> Result:
    """Run one case; an exception is a failure like a wrong number."""
    worst, problem = 0.0, None
    try:
        for check in CHECKS[case.operation](case, backend, torch.device(device)):
            excess = check.worst()
            if excess > 1 and problem is None:
                problem = f"{check.what} is off by {excess:.3g} tolerances"
            worst = max(worst, excess)
    except Exception as error:
        worst, problem = math.inf, f"{type(error).__name__}: {error}"
    dtype = str(case.dtype).removeprefix("torch.")
    return Result(case.operation, backend, device, dtype, case.name, worst, problem)


def machine_devices() -> list[torch.device]:
    """The CPU, and the GPU if there is one."""
    devices = [torch.device("cpu")]
    if torch.accelerator.is_available():
        devices.append(torch.device(torch.accelerator.current_accelerator().type))
    return devices


def runs() -> list[tuple[str, str]]:
    """Every (backend, device type) that runs on this machine."""
    return [
        (backend, device.type)
        for device in machine_devices()
        for backend in backends.BACKENDS[1:]
        if backends.why_not(backend, device) is None
    ]


def table(results: list[Result]) -> str:
    """A line for each operation, backend, device and dtype."""
    groups: dict[tuple[str, ...], list[Result]] = {}
    for result in results:
        key = (result.operation, result.backend, result.device, result.dtype)
        groups.setdefault(key, []).append(result)
    header = ("operation", "backend", "device", "dtype", "cases", "error/tolerance", "verdict")
    lines = [header]
    for key, group in groups.items():
        failed = sum(result.problem is not None for result in group)
        verdict = "ok" if failed == 0 else f"FAILED {failed}"
        worst = max(result.worst for result in group)
        lines.append((*key, str(len(group)), f"{worst:.3g}", verdict))
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines
    )


def verify(chosen: list[tuple[str, str]], jobs: int = 1) -> list[Result]:
    """Run all cases for each (backend, device); `jobs` processes share the compiling of kernels."""
    work = [
        (case, backend, device)
        for backend, device in chosen
        for case in (small_cases() if (backend, device) == ("triton", "cpu") else all_cases())
        if case.operation != "group_subset" or (backend != "triton" and device == "cpu")
    ]
    if jobs <= 1:
        return [run_case(*item) for item in work]
    with multiprocessing.get_context("spawn").Pool(jobs, torch.set_num_threads, (1,)) as pool:
        return pool.starmap(run_case, work, chunksize=4)


def main(arguments: list[str] | None = None) -> int:
    """The number of failed cases, at most 1: the exit status."""
    parser = argparse.ArgumentParser(prog="python -m grpo_kernels.verify", description=__doc__)
    parser.add_argument("--backend", choices=backends.BACKENDS[1:], help="check this one only")
    parser.add_argument("--device", help="on this type of device only: cpu, cuda, xpu")
    parser.add_argument("--jobs", type=int, help="processes; by default several on a GPU only")
    asked = parser.parse_args(arguments)
    print(f"torch {torch.__version__}, Python {sys.version.split()[0]}")
    print(backends.report(), flush=True)
    chosen = [
        (backend, device)
        for backend, device in runs()
        if asked.backend in (None, backend) and asked.device in (None, device)
    ]
    if not chosen:
        print("nothing to check: no such backend runs here")
        return 1
    jobs = asked.jobs
    if jobs is None:
        compiles = any(backend == "triton" and device != "cpu" for backend, device in chosen)
        jobs = min(8, os.cpu_count() or 1) if compiles else 1
    results = verify(chosen, jobs)
    print(table(results))
    failures = [result for result in results if result.problem is not None]
    for result in failures:
        print(
            f"FAILED {result.operation} ({result.backend}, {result.device}, {result.dtype}) "
            f"{result.name}: {result.problem}"
        )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
