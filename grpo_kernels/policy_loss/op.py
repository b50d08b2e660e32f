"""Autograd and torch.library registration of `policy_loss`.

Eager calls go through `PolicyLossFunction`, which skips the dispatcher. Under torch.compile and
torch.export the operator `grpo_kernels::policy_loss` stands in the graph instead: same backends,
same numbers. Both are differentiable once; a second derivative raises.
"""

from __future__ import annotations

from types import ModuleType
from typing import NoReturn

import torch
from torch import Tensor

from ..once_differentiable import not_twice_differentiable, refuse_second_derivative
from ..precision import compute_dtype
from . import cpu, eager
from .options import (
    OPTIONS_SCHEMA,
    LossGradients,
    PolicyLossOptions,
    PolicyLossOutput,
    output_shapes,
    present_terms,
)


def implementation(backend: str) -> ModuleType:
    """The module whose forward and backward do the work."""
    if backend == "triton":
        from . import triton

        return triton
    return cpu if backend == "cpu" else eager


class PolicyLossFunction(torch.autograd.Function):
    """Differentiable by log_probs, ref_log_probs and entropy, through the four loss terms."""

    @staticmethod
    def forward(
        ctx,
        log_probs: Tensor,
        ref_log_probs: Tensor | None,
        entropy: Tensor | None,
        old_log_probs: Tensor,
        advantages: Tensor,
        mask: Tensor | None,
        options: PolicyLossOptions,
        backend: str,
    ) -> tuple[Tensor | None, ...]:
        inputs = (log_probs, old_log_probs, advantages, mask, ref_log_probs, entropy)
        output, saved = implementation(backend).forward(*inputs, options)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[metric for metric in output[4:] if metric is not None])
        ctx.save_for_backward(*inputs, saved)
        ctx.options = options
        ctx.backend = backend
        return tuple(output)

    @staticmethod
    def backward(ctx, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        *inputs, saved = ctx.saved_tensors
        upstream = LossGradients(*upstream[:4])
        backward = implementation(ctx.backend).backward
        arguments = (*inputs, ctx.options, saved, ctx.needs_input_grad[:3])
        if not torch.is_grad_enabled():  # it is only where a graph of the gradient is asked for
            return *backward(upstream, *arguments), None, None, None, None, None
        with torch.no_grad():
            gradients = backward(upstream, *arguments)
        gradients = [
            None
            if gradient is None
            else not_twice_differentiable(gradient, "policy_loss", *upstream, *inputs)
            for gradient in gradients
        ]
        return *gradients, None, None, None, None, None


# An operator returns tensors only, so an absent one is empty.
_INPUTS_SCHEMA = (
    "Tensor log_probs, Tensor old_log_probs, Tensor advantages, Tensor? mask, "
    f"Tensor? ref_log_probs, Tensor? entropy, {OPTIONS_SCHEMA}"
)
_INPUTS = 6
_library = torch.library.Library("grpo_kernels", "FRAGMENT")
_library.define(
    f"policy_loss({_INPUTS_SCHEMA}, str backend) -> ({', '.join(['Tensor'] * 11)})",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "policy_loss_backward(Tensor? grad_objective, Tensor? grad_kl_to_ref, "
    f"Tensor? grad_kl_to_inference, Tensor? grad_entropy, {_INPUTS_SCHEMA}, str backend, "
    "Tensor saved, bool wants_log_probs, bool wants_ref_log_probs, bool wants_entropy) "
    "-> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _policy_loss(*args) -> tuple[Tensor, ...]:
    inputs, flat_options, backend = args[:_INPUTS], args[_INPUTS:-1], args[-1]
    options = PolicyLossOptions.unflatten(flat_options)
    module = implementation(backend)
    forward = getattr(module, "forward_of_operator", module.forward)
    output, saved = forward(*inputs, options)
    absent = saved.new_empty(0)
    return *[absent.clone() if term is None else term for term in output], saved


def _policy_loss_fake(*args) -> tuple[Tensor, ...]:
    log_probs, _, _, _, ref_log_probs, entropy = args[:_INPUTS]
    options = PolicyLossOptions.unflatten(args[_INPUTS:-1])
    shapes = output_shapes(log_probs, ref_log_probs, entropy, options)
    shapes.append((log_probs.shape[0] + 1, 2))
    dtype = compute_dtype(log_probs)
    return tuple(
        log_probs.new_empty((0,) if shape is None else shape, dtype=dtype) for shape in shapes
    )


def _policy_loss_backward(*args) -> tuple[Tensor, Tensor, Tensor]:
    upstream, inputs, args = args[:4], args[4 : 4 + _INPUTS], args[4 + _INPUTS :]
    *flat_options, backend, saved = args[:-3]
    gradients = implementation(backend).backward(
        LossGradients(*upstream),
        *inputs,
        PolicyLossOptions.unflatten(tuple(flat_options)),
        saved,
        args[-3:],
    )
    wanted = zip(gradients, args[-3:], strict=True)
    return tuple(
        gradient if gradient is not None and want else saved.new_empty(0)
        for gradient, want in wanted
    )


def _policy_loss_backward_fake(*args) -> tuple[Tensor, Tensor, Tensor]:
    _, by_kl_to_ref, _, by_entropy = args[:4]
    log_probs, _, _, _, ref_log_probs, entropy = args[4 : 4 + _INPUTS]
    saved, wants_log_probs, wants_ref, wants_entropy = args[-4:]
    likes = (
        log_probs if wants_log_probs else None,
        ref_log_probs if wants_ref and by_kl_to_ref is not None else None,
        entropy if wants_entropy and by_entropy is not None else None,
    )
    return tuple(
        saved.new_empty(0) if like is None else like.new_empty(like.shape) for like in likes
    )


def _save_for_backward(ctx, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    *terms, saved = output
    options = PolicyLossOptions.unflatten(inputs[_INPUTS:-1])
    present = present_terms(options, inputs[4], inputs[5])
    without_gradient = [loss for loss, there in zip(terms[:4], present, strict=False) if not there]
    ctx.mark_non_differentiable(*without_gradient, *terms[4:], saved)
    tensors = (*inputs, saved)
    ctx.is_tensor = [isinstance(value, Tensor) for value in tensors]
    ctx.save_for_backward(*[value for value in tensors if isinstance(value, Tensor)])
    ctx.others = [None if isinstance(value, Tensor) else value for value in tensors]


def _backward_of_policy_loss(ctx, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
    saved = iter(ctx.saved_tensors)
    arguments = [
        next(saved) if is_tensor else other
        for is_tensor, other in zip(ctx.is_tensor, ctx.others, strict=True)
    ]
    wanted = [ctx.needs_input_grad[i] for i in (0, 4, 5)]
    gradients = torch.ops.grpo_kernels.policy_loss_backward.default(
        *upstream[:4], *arguments, *wanted
    )
    _, by_kl_to_ref, _, by_entropy = upstream[:4]
    leads_there = (True, by_kl_to_ref is not None, by_entropy is not None)
    log_probs, ref_log_probs, entropy = (
        gradient if want and leads else None
        for gradient, want, leads in zip(gradients, wanted, leads_there, strict=True)
    )
    rest = (None,) * (len(arguments) - 1 - _INPUTS)
    return log_probs, None, None, None, ref_log_probs, entropy, *rest


def _no_second_derivative(ctx, *upstream: Tensor) -> NoReturn:
    refuse_second_derivative("policy_loss")


_library.impl("policy_loss", _policy_loss, "CompositeExplicitAutograd")
_library.impl("policy_loss_backward", _policy_loss_backward, "CompositeExplicitAutograd")
torch.library.register_fake("grpo_kernels::policy_loss", _policy_loss_fake, lib=_library)
torch.library.register_fake(
    "grpo_kernels::policy_loss_backward", _policy_loss_backward_fake, lib=_library
)
torch.library.register_autograd(
    "grpo_kernels::policy_loss",
    _backward_of_policy_loss,
    setup_context=_save_for_backward,
    lib=_library,
)
torch.library.register_autograd(
    "grpo_kernels::policy_loss_backward", _no_second_derivative, lib=_library
)


def policy_loss_function(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor | None,
    ref_log_probs: Tensor | None,
    entropy: Tensor | None,
    options: PolicyLossOptions,
    backend: str,
) -> PolicyLossOutput:
    """`policy_loss` on checked inputs, by the way that suits the caller."""
    if not torch.compiler.is_compiling():
        output = PolicyLossFunction.apply(
            log_probs, ref_log_probs, entropy, old_log_probs, advantages, mask, options, backend
        )
        return PolicyLossOutput(*output)
    # Numbers that change often reach the graph as tensors, which do not recompile it.
    one = torch.ones((), dtype=compute_dtype(log_probs), device=log_probs.device)
    changing = {
        name: value * one
        for name in ("clip_low", "clip_high", "normaliser")
        if (value := getattr(options, name)) is not None and not isinstance(value, Tensor)
    }
    options = options._replace(**changing)
    *output, _ = torch.ops.grpo_kernels.policy_loss.default(
        log_probs,
        old_log_probs,
        advantages,
        mask,
        ref_log_probs,
        entropy,
        *options.flatten(),
        backend,
    )
    present = present_terms(options, ref_log_probs, entropy)
    terms = [term if there else None for term, there in zip(output, present, strict=True)]
    metrics = [metric if metric is None else metric.detach() for metric in terms[4:]]
    return PolicyLossOutput(*terms[:4], *metrics)
