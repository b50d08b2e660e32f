"""`policy_loss`: every loss term and metric of GRPO, DAPO and CISPO from log-probs, in one pass."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from ..backends import Backend, resolve_backend
from .op import policy_loss_function
from .options import (
    Aggregation,
    Objective,
    PolicyLossOptions,
    PolicyLossOutput,
    Semantics,
    check_options,
)

__all__ = ["PolicyLossOutput", "policy_loss"]

_FLOATING = frozenset((torch.float32, torch.float64, torch.bfloat16, torch.float16))


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor | None = None,
    *,
    ref_log_probs: Tensor | None = None,
    entropy: Tensor | None = None,
    objective: Objective = "grpo",
    clip_low: float | Tensor = 0.2,
    clip_high: float | Tensor = 0.2,
    kl_mask_threshold: float | None = None,
    aggregation: Aggregation = "token_mean",
    kl_to_ref_coeff: float | None = None,
    kl_to_inference_coeff: float | None = None,
    entropy_coeff: float | None = None,
    semantics: Semantics = "torchrl",
    log_ratio_cap: float | None = None,
    normaliser: float | Tensor | None = None,
    backend: Backend = "auto",
) -> PolicyLossOutput:
    r"""Clipped policy-gradient loss over sampled tokens, with its penalties and metrics.

    With d = log_probs - old_log_probs and r = exp(d), a token's objective is

    * `"grpo"`: -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) (GRPO, arXiv:2402.03300; with two
      bounds DAPO, arXiv:2503.14476);
    * `"cispo"`: -sg(clip(r)) A log_probs (arXiv:2506.13585); under torchrl semantics -clip(r) A,
      as TorchRL has it.

    A KL penalty to a policy p is k3 = exp(x) - 1 - x with x = log p - log_probs, in nats.

    Everything is computed in fp32 (fp64 for fp64 log-probs). A masked token, and one whose old
    log-prob is not finite, touches no value, metric or gradient, whatever it holds; NaN at a valid
    token shows in the loss. No call synchronises with the device.

    Args:
        log_probs: [B, T] log-probs of the sampled tokens under the policy, in nats; fp32, fp64,
            bf16 or fp16, any strides. Differentiable.
        old_log_probs: [B, T] log-probs under the policy that sampled. Not differentiable.
        advantages: [B, T], [B, 1] or [B]. Not differentiable.
        mask: [B, T] bool, true where a token counts; None if all do.
        ref_log_probs: [B, T] log-probs under a reference policy. Differentiable.
        entropy: [B, T] entropy of the policy at each token, in nats. Differentiable.
        objective: see above.
        clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high]; numbers, or
            tensors with one element (scheduled bounds: read on the device). 0 <= clip_low < 1.
        kl_mask_threshold: drop tokens with d^2 / 2 above it (d as above: against the sampling
            policy) from the objective, the entropy term and the ESS.
        aggregation: `"token_mean"`: mean over the batch's valid tokens; `"prompt_mean"`: mean per
            row, then over rows; `"none"`: per token, [B, T].
        kl_to_ref_coeff, kl_to_inference_coeff, entropy_coeff: with a number the output has
            loss_kl_to_ref = coeff * KL to ref_log_probs, loss_kl_to_inference = coeff * KL to
            old_log_probs, loss_entropy = -coeff * entropy; with None it has not.
        semantics: `"torchrl"`: numbers equal TorchRL 0.14.1's; `"corrected"`: metrics and KL
            penalties over valid tokens with the objective's aggregation, CISPO as in its paper
            (the README has the table).
        log_ratio_cap: hold d, in the objective and the penalties, within +-cap; a held token has
            no gradient by d.
        normaliser: divide by this instead of the batch's number of valid tokens (token_mean) or of
            sequences (prompt_mean), so that micro-batches and ranks add up to the whole batch's
            mean; a number or a tensor with one element. Under torchrl semantics the KL penalties,
            which are means over positions, do not follow it.
        backend: see `grpo_kernels.backends`.

    Returns:
        PolicyLossOutput. The four losses are differentiable, each with its own upstream gradient;
        the metrics are not. clip_fraction: share of clipped tokens. kl_approx: mean of
        old - current log-prob. ESS: effective sample size (sum r)^2 / sum r^2 as a share of the
        tokens. entropy, kl_to_ref, kl_to_inference: means, in nats.

    Raises:
        ValueError, TypeError: an option, shape or dtype that is not as above.
        RuntimeError: a named backend cannot run; old_log_probs or advantages require a gradient;
            a second derivative is asked for.
    """
    options = PolicyLossOptions(
        objective,
        clip_low,
        clip_high,
        kl_mask_threshold,
        aggregation,
        kl_to_ref_coeff,
        kl_to_inference_coeff,
        entropy_coeff,
        semantics,
        log_ratio_cap,
        normaliser,
    )
    return policy_loss_with(
        options, log_probs, old_log_probs, advantages, mask, ref_log_probs, entropy, backend
    )


def policy_loss_with(
    options: PolicyLossOptions,
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor | None,
    ref_log_probs: Tensor | None,
    entropy: Tensor | None,
    backend: Backend,
) -> PolicyLossOutput:
    """`policy_loss` with its options in one tuple."""
    check_options(options)
    shape, device = log_probs.shape, log_probs.device
    for name in ("clip_low", "clip_high", "normaliser"):
        value = getattr(options, name)
        if isinstance(value, Tensor):
            if value.device != device:
                raise ValueError(
                    f"{name} must be on log_probs' device, {device}, got {value.device}"
                )
            if value.ndim:
                options = options._replace(**{name: value.reshape(())})
    if advantages.ndim == 1:
        advantages = advantages.unsqueeze(-1)
    if advantages.shape != shape and advantages.shape == (*shape[:1], 1):
        advantages = advantages.expand(shape)
    floating = [log_probs, old_log_probs, advantages]
    floating += [tensor for tensor in (ref_log_probs, entropy) if tensor is not None]
    if (
        len(shape) != 2
        or any(
            tensor.shape != shape or tensor.device != device or tensor.dtype not in _FLOATING
            for tensor in floating
        )
        or old_log_probs.requires_grad
        or advantages.requires_grad
        or not (
            mask is None
            or (mask.dtype is torch.bool and mask.shape == shape and mask.device == device)
        )
    ):
        _raise_for_inputs(log_probs, old_log_probs, advantages, mask, ref_log_probs, entropy)
    if options.kl_to_ref_coeff is not None and ref_log_probs is None:
        raise ValueError("kl_to_ref_coeff needs ref_log_probs, which is None")
    if options.entropy_coeff is not None and entropy is None:
        raise ValueError("entropy_coeff needs entropy, which is None")
    return policy_loss_function(
        log_probs,
        old_log_probs,
        advantages,
        mask,
        ref_log_probs,
        entropy,
        options,
        resolve_backend(backend, device),
    )


def _raise_for_inputs(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor | None,
    ref_log_probs: Tensor | None,
    entropy: Tensor | None,
) -> NoReturn:
    """Name the first input that does not fit."""
    shape, device = log_probs.shape, log_probs.device
    if len(shape) != 2:
        raise ValueError(f"log_probs must be [B, T], got shape {tuple(shape)}")
    for name, tensor in (
        ("log_probs", log_probs),
        ("old_log_probs", old_log_probs),
        ("advantages", advantages),
        ("mask", mask),
        ("ref_log_probs", ref_log_probs),
        ("entropy", entropy),
    ):
        if tensor is None:
            continue
        if tensor.shape != shape:
            also = " (or [B, 1] or [B])" if name == "advantages" else ""
            raise ValueError(
                f"{name} must have the shape of log_probs, {tuple(shape)}{also}, got "
                f"{tuple(tensor.shape)}"
            )
        if tensor.device != device:
            raise ValueError(f"{name} must be on log_probs' device, {device}, got {tensor.device}")
        if name == "mask" and tensor.dtype != torch.bool:
            raise TypeError(f"mask must be bool, got {tensor.dtype}; pass mask.bool()")
        if name != "mask" and tensor.dtype not in _FLOATING:
            raise TypeError(f"{name} must be fp32, fp64, bf16 or fp16, got {tensor.dtype}")
    name = "old_log_probs" if old_log_probs.requires_grad else "advantages"
    raise RuntimeError(
        f"{name} requires grad, and policy_loss is not differentiable by it; pass {name}.detach()"
    )
