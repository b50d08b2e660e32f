"""What `policy_loss` can be told, checked once, and the typed result it gives back."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Objective = Literal["grpo", "cispo"]
Aggregation = Literal["token_mean", "prompt_mean", "none"]
Semantics = Literal["torchrl", "corrected"]

# Each objective's function of a token, under torchrl and under corrected semantics.
TOKEN_OBJECTIVES = {"grpo": ("grpo", "grpo"), "cispo": ("clipped_ratio", "cispo")}
OBJECTIVES = tuple(TOKEN_OBJECTIVES)
AGGREGATIONS = ("token_mean", "prompt_mean", "none")
SEMANTICS = ("torchrl", "corrected")


class PolicyLossOptions(NamedTuple):
    """The hyper-parameters of one call, in the order in which every backend takes them."""

    objective: Objective
    clip_low: float | Tensor
    clip_high: float | Tensor
    kl_mask_threshold: float | None
    aggregation: Aggregation
    kl_to_ref_coeff: float | None
    kl_to_inference_coeff: float | None
    entropy_coeff: float | None
    semantics: Semantics
    log_ratio_cap: float | None
    normaliser: float | Tensor | None
    # Whether the entropy metric of torchrl semantics counts what is finite at masked tokens, as
    # TorchRL does with a distribution that gives them an entropy. Set by the losses.
    entropy_of_pads: bool = False

    @property
    def token_objective(self) -> str:
        """The name of the function of a token that the objective is under these semantics."""
        return TOKEN_OBJECTIVES[self.objective][SEMANTICS.index(self.semantics)]

    def flatten(self) -> tuple:
        """For an operator's schema: what may be a number or a tensor becomes one of each."""
        low, low_tensor = _number_and_tensor(self.clip_low)
        high, high_tensor = _number_and_tensor(self.clip_high)
        normaliser, normaliser_tensor = _number_and_tensor(self.normaliser)
        return (
            self.objective,
            low,
            low_tensor,
            high,
            high_tensor,
            *self[3:10],
            normaliser,
            normaliser_tensor,
            self.entropy_of_pads,
        )

    @classmethod
    def unflatten(cls, flat: tuple) -> PolicyLossOptions:
        """The inverse of `flatten`."""
        objective, low, low_tensor, high, high_tensor, *others, number, tensor, of_pads = flat
        return cls(
            objective,
            low if low_tensor is None else low_tensor,
            high if high_tensor is None else high_tensor,
            *others,
            number if tensor is None else tensor,
            of_pads,
        )


# The types of what `flatten` gives. csrc/policy_loss.cpp has the same list.
OPTIONS_SCHEMA = (
    "str objective, float? clip_low, Tensor? clip_low_tensor, float? clip_high, "
    "Tensor? clip_high_tensor, float? kl_mask_threshold, str aggregation, "
    "float? kl_to_ref_coeff, float? kl_to_inference_coeff, float? entropy_coeff, str semantics, "
    "float? log_ratio_cap, float? normaliser, Tensor? normaliser_tensor, bool entropy_of_pads"
)


def _number_and_tensor(value: float | Tensor | None) -> tuple[float | None, Tensor | None]:
    return (None, value) if isinstance(value, Tensor) else (value, None)


class PolicyLossOutput(NamedTuple):
    """Loss terms (differentiable) and metrics (not); a term that was not asked for is None.

    All are 0-d in fp32 (fp64 for fp64 log-probs), but for `aggregation="none"`, where the terms
    that follow the aggregation are [B, T], and for `prompt_mean` under torchrl semantics, where
    they are [1] as TorchRL's are.
    """

    loss_objective: Tensor
    loss_kl_to_ref: Tensor | None
    loss_kl_to_inference: Tensor | None
    loss_entropy: Tensor | None
    clip_fraction: Tensor
    kl_approx: Tensor
    ESS: Tensor
    entropy: Tensor | None
    kl_to_ref: Tensor | None
    kl_to_inference: Tensor | None


def present_terms(
    options: PolicyLossOptions, ref_log_probs: Tensor | None, entropy: Tensor | None
) -> tuple[bool, ...]:
    """For each field of PolicyLossOutput, whether it is a tensor rather than None."""
    has_ref, has_entropy = ref_log_probs is not None, entropy is not None
    to_inference = options.kl_to_inference_coeff is not None
    return (
        True,
        has_ref and options.kl_to_ref_coeff is not None,
        to_inference,
        has_entropy and options.entropy_coeff is not None,
        *(True, True, True),
        has_entropy,
        has_ref,
        to_inference,
    )


class LossGradients(NamedTuple):
    """Upstream gradients of the loss terms, shaped as they are; None where nothing came."""

    objective: Tensor | None
    kl_to_ref: Tensor | None
    kl_to_inference: Tensor | None
    entropy: Tensor | None


class InputGradients(NamedTuple):
    """Gradients by the differentiable inputs; None where no upstream gradient leads there."""

    log_probs: Tensor
    ref_log_probs: Tensor | None
    entropy: Tensor | None


def check_choice(name: str, value: object, accepted: tuple[str, ...]) -> None:
    """Raise ValueError, with what is accepted, unless `value` is one of `accepted`."""
    if value not in accepted:
        raise ValueError(f"{name} must be one of {accepted}, got {value!r}")


FLOATING = frozenset((torch.float32, torch.float64, torch.bfloat16, torch.float16))
COUNTS = FLOATING | {torch.int64, torch.int32}


def _check_tensor(name: str, tensor: Tensor, dtypes: frozenset[torch.dtype]) -> None:
    """Raise ValueError unless the tensor can stand for a number. Its value is not read: that would
    synchronise."""
    if tensor.numel() != 1 or tensor.dtype not in dtypes or tensor.requires_grad:
        accepted = "floating point" if dtypes is FLOATING else "floating point, int64 or int32"
        raise ValueError(
            f"{name} must be a number, or a {accepted} tensor with one element that does not "
            f"require grad, got shape {tuple(tensor.shape)}, {tensor.dtype}"
            f"{', requires grad' if tensor.requires_grad else ''}"
        )


def _is_finite(value: float) -> bool:
    return -math.inf < value < math.inf  # math.isfinite would not trace


def check_clip(clip_low: float | Tensor, clip_high: float | Tensor) -> None:
    """Raise ValueError for bounds that are NaN, negative, or that let the ratio reach 0."""
    for name, bound in (("clip_low", clip_low), ("clip_high", clip_high)):
        if isinstance(bound, Tensor):
            _check_tensor(name, bound, FLOATING)
        elif bound is None or isinstance(bound, str) or not bound >= 0:
            raise ValueError(f"{name} must be a number >= 0, got {bound!r}")
    if not isinstance(clip_low, Tensor) and not clip_low < 1:
        raise ValueError(f"clip_low must be < 1, so that 1 - clip_low > 0, got {clip_low!r}")


def check_options(options: PolicyLossOptions) -> None:
    """Raise ValueError naming the first option that cannot be honoured."""
    check_choice("objective", options.objective, OBJECTIVES)
    check_choice("aggregation", options.aggregation, AGGREGATIONS)
    check_choice("semantics", options.semantics, SEMANTICS)
    check_clip(options.clip_low, options.clip_high)
    for name in ("kl_mask_threshold", "log_ratio_cap"):
        value = getattr(options, name)
        if value is not None and not value > 0:
            raise ValueError(f"{name} must be a number > 0 or None, got {value!r}")
    for name in ("kl_to_ref_coeff", "kl_to_inference_coeff", "entropy_coeff"):
        value = getattr(options, name)
        if value is not None and not _is_finite(value):
            raise ValueError(f"{name} must be a finite number or None, got {value!r}")
    normaliser = options.normaliser
    if isinstance(normaliser, Tensor):
        _check_tensor("normaliser", normaliser, COUNTS)
    elif normaliser is not None and not 0 < normaliser < math.inf:
        raise ValueError(f"normaliser must be a finite number > 0, got {normaliser!r}")


def objective_shape(log_probs: Tensor, options: PolicyLossOptions) -> tuple[int, ...]:
    """Shape of loss_objective and loss_entropy (and of the KL losses under corrected semantics)."""
    if options.aggregation == "none":
        return tuple(log_probs.shape)
    if options.aggregation == "prompt_mean" and options.semantics == "torchrl":
        return (1,)
    return ()


def output_shapes(
    log_probs: Tensor,
    ref_log_probs: Tensor | None,
    entropy: Tensor | None,
    options: PolicyLossOptions,
) -> list[tuple[int, ...] | None]:
    """Shape of each field of PolicyLossOutput; None for a term that is not there."""
    objective = objective_shape(log_probs, options)
    kl = () if options.semantics == "torchrl" else objective
    shapes = (objective, kl, kl, objective, *[()] * 6)
    present = present_terms(options, ref_log_probs, entropy)
    return [shape if there else None for shape, there in zip(shapes, present, strict=True)]
