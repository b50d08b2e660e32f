r"""The definition of `policy_loss` in plain PyTorch, forward and closed-form backward.

With l the log-prob, o the old (sampling) one, d = l - o and r = exp(d), every objective is per
token a value and its coefficient c = d value / d l:

    grpo                value = -min(r A, clip(r) A)       c = -r A, 0 where the clip binds
    cispo, torchrl      value = -clip(r) A                 c = -r A, 0 where r is clipped
    cispo, corrected    value = -sg(clip(r)) A l           c = -clip(r) A

    clip(r) = min(max(r, 1 - clip_low), 1 + clip_high)
    KL penalty to p (k3) = exp(p - l) - 1 - (p - l)

GRPO: arXiv:2402.03300. Two clip bounds: DAPO, arXiv:2503.14476. CISPO: arXiv:2506.13585.

An aggregation is a weight per row: loss = sum_b weights[b] sum_t where(mask, value, 0). A mask
selects before anything is computed and again at the end; nothing is multiplied by one.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..precision import compute_dtype
from .options import (
    Aggregation,
    InputGradients,
    LossGradients,
    PolicyLossOptions,
    PolicyLossOutput,
    Semantics,
    objective_shape,
)


class ClipBounds(NamedTuple):
    """The ratio's range and its logarithm."""

    low: Tensor
    high: Tensor
    log_low: Tensor
    log_high: Tensor


class MaskedInputs(NamedTuple):
    """The inputs in compute precision, selected by the mask, and the masks that follow."""

    valid: Tensor  # the caller's mask, less tokens with no finite old log-prob
    trained: Tensor  # valid, less tokens beyond kl_mask_threshold
    log_probs: Tensor
    log_ratio: Tensor


class Tokens(NamedTuple):
    """What an objective sees of each token; 0 where the mask is off."""

    log_probs: Tensor
    log_ratio: Tensor
    ratio: Tensor
    advantages: Tensor
    capped: Tensor  # log_ratio_cap holds the log-ratio: it does not move with the log-prob


class TokenObjective(NamedTuple):
    """Value of the objective, its derivative by the log-prob, and where the clip binds."""

    value: Tensor
    coefficient: Tensor
    clipped: Tensor


def times(weight: Tensor, by: Tensor) -> Tensor:
    """weight * by, and 0 where `by` is 0 though the weight is infinite."""
    return torch.where((by == 0) & weight.isinf(), 0.0, weight * by)


def out_of_range(log_ratio: Tensor, bounds: ClipBounds) -> Tensor:
    """Where the ratio lies outside its range."""
    return (log_ratio > bounds.log_high) | (log_ratio < bounds.log_low)


def clip_ratio(tokens: Tokens, bounds: ClipBounds) -> Tensor:
    """The ratio held within its range; NaN stays NaN."""
    below_high = torch.where(tokens.log_ratio > bounds.log_high, bounds.high, tokens.ratio)
    return torch.where(tokens.log_ratio < bounds.log_low, bounds.low, below_high)


def grpo(tokens: Tokens, bounds: ClipBounds) -> TokenObjective:
    """-min(r A, clip(r) A), written by the sign of A so that an infinite r does no harm."""
    clipped = torch.where(
        tokens.advantages >= 0,
        tokens.log_ratio > bounds.log_high,
        (tokens.advantages < 0) & (tokens.log_ratio < bounds.log_low),
    )
    ratio = torch.where(clipped, clip_ratio(tokens, bounds), tokens.ratio)
    gain = times(ratio, tokens.advantages)
    return TokenObjective(-gain, torch.where(clipped | tokens.capped, 0.0, -gain), clipped)


def clipped_ratio(tokens: Tokens, bounds: ClipBounds) -> TokenObjective:
    """-clip(r) A, differentiated through the clip: CISPO as TorchRL has it."""
    clipped = out_of_range(tokens.log_ratio, bounds)
    gain = times(clip_ratio(tokens, bounds), tokens.advantages)
    return TokenObjective(-gain, torch.where(clipped | tokens.capped, 0.0, -gain), clipped)


def cispo(tokens: Tokens, bounds: ClipBounds) -> TokenObjective:
    """-sg(clip(r)) A l: the weight is bounded and no token loses its gradient."""
    gain = times(clip_ratio(tokens, bounds), tokens.advantages)
    clipped = out_of_range(tokens.log_ratio, bounds)
    return TokenObjective(-times(tokens.log_probs, gain), -gain, clipped)


TOKEN_OBJECTIVES = {function.__name__: function for function in (grpo, clipped_ratio, cispo)}


def objective_of(tokens: Tokens, bounds: ClipBounds, options: PolicyLossOptions) -> TokenObjective:
    """The objective that `options` ask for; NaN where a bound is, since it clips nothing."""
    value, coefficient, clipped = TOKEN_OBJECTIVES[options.token_objective](tokens, bounds)
    poison = torch.where((bounds.log_low + bounds.log_high).isnan(), math.nan, 0.0)
    return TokenObjective(value + poison, coefficient + poison, clipped)


def bounds_of_logs(log_low: Tensor, log_high: Tensor) -> ClipBounds:
    """The range from its logarithms."""
    return ClipBounds(log_low.exp(), log_high.exp(), log_low, log_high)


def clip_bounds(clip_low: float | Tensor, clip_high: float | Tensor, like: Tensor) -> ClipBounds:
    """The range [1 - clip_low, 1 + clip_high] in the dtype and on the device of `like`."""

    def log1p(bound: float | Tensor) -> Tensor:
        if isinstance(bound, Tensor):  # in its own precision, as a scheduled buffer is compared
            return bound.reshape(()).log1p().to(like)
        return like.new_tensor(math.log1p(bound))

    return bounds_of_logs(log1p(-clip_low), log1p(clip_high))


def row_weights(
    mask: Tensor, aggregation: Aggregation, semantics: Semantics, normaliser: float | Tensor | None
) -> Tensor:
    """[B] fp64 weights w with loss = sum_b w[b] sum_t where(mask, value, 0); ones for "none".

    `normaliser` replaces the number of tokens (token_mean) or of sequences (prompt_mean).
    """
    tokens_per_row = mask.sum(-1)
    ones = torch.ones_like(tokens_per_row, dtype=torch.float64)
    if aggregation == "none":
        return ones
    if aggregation == "token_mean":
        return ones / (tokens_per_row.sum().clamp_min(1) if normaliser is None else normaliser)
    if normaliser is None:
        rows = tokens_per_row > 0 if semantics == "corrected" else tokens_per_row >= 0
        normaliser = rows.sum().clamp_min(1)
    return ones / tokens_per_row.clamp_min(1) / normaliser


def objective_and_kl_weights(
    inputs: MaskedInputs, options: PolicyLossOptions
) -> tuple[Tensor, Tensor]:
    """[B] row weights of the objective and entropy terms, and those of the KL penalties."""
    aggregation = options.aggregation, options.semantics, options.normaliser
    objective = row_weights(inputs.trained, *aggregation)
    if options.semantics == "corrected":
        return objective, row_weights(inputs.valid, *aggregation)
    return objective, torch.ones_like(objective) / max(inputs.valid.numel(), 1)


def k3(log_ratio: Tensor) -> Tensor:
    """exp(x) - 1 - x, the estimator of KL from x = log p - log pi under samples of pi."""
    return torch.expm1(log_ratio) - log_ratio


def effective_sample_size(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """(sum r)^2 / sum r^2 over the masked-in tokens, as a fraction of their number; 0 of none."""
    if log_ratio.numel() == 0:
        return log_ratio.new_zeros(())
    log_ratio = torch.where(mask, log_ratio, -math.inf)
    largest = log_ratio.max()
    largest = torch.where(largest == -math.inf, 0.0, largest)
    weights = (log_ratio - largest).to(torch.float64).exp()
    total, squares, count = weights.sum(), weights.square().sum(), mask.sum()
    # NaN <= 0 is false: a NaN log-ratio stays visible.
    size = torch.where(squares <= 0, 0.0, (total / squares) * (total / count))
    return size.to(log_ratio.dtype)


def select_tokens(
    log_probs: Tensor, old_log_probs: Tensor, mask: Tensor | None, options: PolicyLossOptions
) -> MaskedInputs:
    """Select before anything is computed: whatever a masked slot holds goes no further."""
    dtype = compute_dtype(log_probs)
    old_log_probs = old_log_probs.to(dtype)
    valid = old_log_probs.isfinite()
    if mask is not None:
        valid = valid & mask
    log_probs = torch.where(valid, log_probs.to(dtype), 0.0)
    log_ratio = log_probs - torch.where(valid, old_log_probs, 0.0)
    trained = valid
    if options.kl_mask_threshold is not None:
        divergence = 0.5 * log_ratio.square()
        if options.semantics == "torchrl":  # drops a NaN too
            trained = valid & (divergence <= options.kl_mask_threshold)
        else:
            trained = valid & ~(divergence > options.kl_mask_threshold)
    return MaskedInputs(valid, trained, log_probs, log_ratio)


def cap(log_ratio: Tensor, log_ratio_cap: float | None) -> tuple[Tensor, Tensor]:
    """The log-ratio held within +-log_ratio_cap, and where it was held."""
    if log_ratio_cap is None:
        return log_ratio, torch.zeros_like(log_ratio, dtype=torch.bool)
    return log_ratio.clamp(-log_ratio_cap, log_ratio_cap), log_ratio.abs() > log_ratio_cap


def trained_tokens(inputs: MaskedInputs, advantages: Tensor, log_ratio_cap: float | None) -> Tokens:
    """What the objective sees: the tokens that pass the KL-mask, with the ratio capped."""
    log_ratio, capped = cap(torch.where(inputs.trained, inputs.log_ratio, 0.0), log_ratio_cap)
    return Tokens(
        log_probs=torch.where(inputs.trained, inputs.log_probs, 0.0),
        log_ratio=log_ratio,
        ratio=log_ratio.exp(),
        advantages=torch.where(inputs.trained, advantages.to(log_ratio.dtype), 0.0),
        capped=capped,
    )


def kl_mask(inputs: MaskedInputs, semantics: Semantics) -> Tensor:
    """The tokens that the KL penalties are taken over."""
    return inputs.trained if semantics == "torchrl" else inputs.valid


def kl_log_ratio(inputs: MaskedInputs, target_log_probs: Tensor, semantics: Semantics) -> Tensor:
    """log p - log pi to the target policy p, 0 where masked."""
    mask = kl_mask(inputs, semantics)
    target = torch.where(mask, target_log_probs.to(inputs.log_probs.dtype), 0.0)
    return target - torch.where(mask, inputs.log_probs, 0.0)


def kl_penalty(
    inputs: MaskedInputs, target_log_probs: Tensor, options: PolicyLossOptions
) -> Tensor:
    """k3 to the target policy per token, 0 where masked."""
    log_ratio = kl_log_ratio(inputs, target_log_probs, options.semantics)
    return k3(cap(log_ratio, options.log_ratio_cap)[0])


def position_mean(value: Tensor) -> Tensor:
    """Mean over all positions, 0 of none."""
    return value.sum() / max(value.numel(), 1)


def semantic_mean(value: Tensor, valid: Tensor, semantics: Semantics) -> Tensor:
    """Mean of a metric: over all positions, invalid ones as 0, or over the valid ones."""
    value = torch.where(valid, value, 0.0)
    if semantics == "torchrl":
        return position_mean(value)
    return value.sum() / valid.sum().clamp_min(1)


def clip_fraction(
    inputs: MaskedInputs, objective: TokenObjective, bounds: ClipBounds, semantics: Semantics
) -> Tensor:
    """Share of tokens outside the range (a NaN ratio is), or of those that the clip binds."""
    if semantics == "torchrl":
        clipped = out_of_range(inputs.log_ratio, bounds) | inputs.log_ratio.isnan()
    else:
        clipped = objective.clipped & inputs.trained
    return semantic_mean(clipped.to(inputs.log_ratio.dtype), inputs.valid, semantics)


def mean_entropy(
    entropy: Tensor, mask: Tensor | None, valid: Tensor, options: PolicyLossOptions
) -> Tensor:
    """Mean of the entropy; for TorchRL a token without an old log-prob still counts."""
    if options.semantics == "torchrl":
        valid = torch.ones_like(valid) if mask is None else mask
        if options.entropy_of_pads:
            valid = valid | entropy.isfinite()
    return semantic_mean(entropy, valid, options.semantics)


def forward(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor | None,
    ref_log_probs: Tensor | None,
    entropy: Tensor | None,
    options: PolicyLossOptions,
) -> tuple[PolicyLossOutput, Tensor]:
    """All loss terms and metrics, and the [B + 1, 2] numbers that the backward needs.

    These are each row's weights and, last, the clip bounds' logarithms as they were: a scheduled
    bound may move before the backward.
    """
    inputs = select_tokens(log_probs, old_log_probs, mask, options)
    weights = objective_weights, kl_weights = objective_and_kl_weights(inputs, options)

    def aggregate(value: Tensor, mask: Tensor, weights: Tensor) -> Tensor:
        value = torch.where(mask, value, 0.0)
        if options.aggregation == "none":
            return value
        total = (value.sum(-1, dtype=torch.float64) * weights).sum().to(value.dtype)
        # A copy: a view may not be changed in place once autograd.Function returns it.
        return total.reshape(objective_shape(log_probs, options)).clone()

    tokens = trained_tokens(inputs, advantages, options.log_ratio_cap)
    bounds = clip_bounds(options.clip_low, options.clip_high, inputs.log_ratio)
    objective = objective_of(tokens, bounds, options)
    semantics = options.semantics
    mean_of_entropy = loss_entropy = None
    if entropy is not None:
        entropy = entropy.to(inputs.log_ratio.dtype)
        mean_of_entropy = mean_entropy(entropy, mask, inputs.valid, options)
        if options.entropy_coeff is not None:
            loss_entropy = aggregate(
                -options.entropy_coeff * entropy, inputs.trained, objective_weights
            )

    def kl_terms(target: Tensor | None, coeff: float | None) -> tuple[Tensor | None, ...]:
        if target is None:
            return None, None
        penalty = kl_penalty(inputs, target, options)
        metric = semantic_mean(penalty, inputs.valid, semantics)
        if coeff is None:
            return None, metric
        if semantics == "torchrl":
            return coeff * metric, metric
        return coeff * aggregate(penalty, inputs.valid, kl_weights), metric

    loss_kl_to_ref, kl_to_ref = kl_terms(ref_log_probs, options.kl_to_ref_coeff)
    to_inference = None if options.kl_to_inference_coeff is None else old_log_probs
    loss_kl_to_inference, kl_to_inference = kl_terms(to_inference, options.kl_to_inference_coeff)
    output = PolicyLossOutput(
        loss_objective=aggregate(objective.value, inputs.trained, objective_weights),
        loss_kl_to_ref=loss_kl_to_ref,
        loss_kl_to_inference=loss_kl_to_inference,
        loss_entropy=loss_entropy,
        clip_fraction=clip_fraction(inputs, objective, bounds, semantics),
        kl_approx=semantic_mean(-inputs.log_ratio, inputs.valid, semantics),
        ESS=effective_sample_size(inputs.log_ratio, inputs.trained),
        entropy=mean_of_entropy,
        kl_to_ref=kl_to_ref,
        kl_to_inference=kl_to_inference,
    )
    bounds = torch.stack([bounds.log_low, bounds.log_high])
    weights = torch.stack(weights, -1).to(inputs.log_ratio.dtype)
    return output, torch.cat([weights, bounds.unsqueeze(0)])


def backward(
    upstream: LossGradients,
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor | None,
    ref_log_probs: Tensor | None,
    entropy: Tensor | None,
    options: PolicyLossOptions,
    saved: Tensor,
    wanted: tuple[bool, bool, bool],
) -> InputGradients:
    """Gradients by log_probs, ref_log_probs and entropy, each in its input's dtype.

    `wanted` says for each of the three whether it is asked for; the others may come as None.
    """
    inputs = select_tokens(log_probs, old_log_probs, mask, options)
    objective_weights, kl_weights = saved[:-1, :1], saved[:-1, 1:]

    def scale(gradient: Tensor, weights: Tensor) -> Tensor:
        if gradient.ndim < 2:
            gradient = gradient.reshape(())
        return gradient.to(weights.dtype) * weights

    grad_log_probs = torch.zeros_like(inputs.log_probs)
    grad_ref = grad_entropy = None
    if upstream.objective is not None:
        tokens = trained_tokens(inputs, advantages, options.log_ratio_cap)
        coefficient = objective_of(tokens, bounds_of_logs(*saved[-1]), options).coefficient
        gradient = scale(upstream.objective, objective_weights) * coefficient
        grad_log_probs += torch.where(inputs.trained, gradient, 0.0)
    if upstream.entropy is not None:
        gradient = -options.entropy_coeff * scale(upstream.entropy, objective_weights)
        grad_entropy = torch.where(inputs.trained, gradient, 0.0).to(entropy.dtype)

    def kl_gradient(gradient: Tensor, target: Tensor, coeff: float) -> Tensor:
        """By the target's log-prob; the negative is by the policy's."""
        log_ratio, capped = cap(
            kl_log_ratio(inputs, target, options.semantics), options.log_ratio_cap
        )
        gradient = coeff * scale(gradient, kl_weights) * torch.expm1(log_ratio)
        return torch.where(kl_mask(inputs, options.semantics) & ~capped, gradient, 0.0)

    if upstream.kl_to_ref is not None:
        gradient = kl_gradient(upstream.kl_to_ref, ref_log_probs, options.kl_to_ref_coeff)
        grad_ref = gradient.to(ref_log_probs.dtype)
        grad_log_probs -= gradient
    if upstream.kl_to_inference is not None:
        grad_log_probs -= kl_gradient(
            upstream.kl_to_inference, old_log_probs, options.kl_to_inference_coeff
        )
    return InputGradients(grad_log_probs.to(log_probs.dtype), grad_ref, grad_entropy)
