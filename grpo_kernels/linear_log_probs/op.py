"""Autograd and torch.library registration of linear_log_probs, the same for every backend."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from ..once_differentiable import not_twice_differentiable, refuse_second_derivative
from ..precision import compute_dtype
from . import chunked


def _flat(values: Tensor | None) -> Tensor | None:
    """[...] as [N]."""
    return None if values is None else values.reshape(-1)


def _flat_inputs(
    hidden: Tensor, tokens: Tensor, mask: Tensor | None, temperature: float | Tensor
) -> tuple[Tensor, Tensor, Tensor | None, float | Tensor]:
    if isinstance(temperature, Tensor):
        temperature = temperature.to(compute_dtype(hidden)).expand(tokens.shape).reshape(-1)
    return (
        hidden.reshape(-1, hidden.shape[-1]),
        tokens.to(torch.int64).reshape(-1).contiguous(),
        None if mask is None else mask.reshape(-1).contiguous(),
        temperature,
    )


class LinearLogProbs(torch.autograd.Function):
    """The eager-mode path."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tokens: Tensor,
        mask: Tensor | None,
        temperature: float | Tensor,
        entropy: bool,
        logit_softcap: float | None,
        workspace_mib: int,
        backend: str,
    ):
        shape = tokens.shape
        flat_hidden, tokens, mask, temperature = _flat_inputs(hidden, tokens, mask, temperature)
        log_probs, entropies, row_max, log_sum = chunked.forward(
            flat_hidden,
            weight,
            bias,
            tokens,
            mask,
            temperature,
            entropy,
            logit_softcap,
            workspace_mib,
            backend,
        )
        entropies = None if entropies is None else entropies.view(shape)
        per_row = isinstance(temperature, Tensor)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(
            hidden,
            weight,
            bias,
            tokens,
            mask,
            temperature if per_row else None,
            entropies,
            row_max,
            log_sum,
        )
        ctx.temperature = None if per_row else temperature
        ctx.options = (logit_softcap, workspace_mib, backend)
        return log_probs.view(shape).detach(), entropies

    @staticmethod
    def backward(ctx: FunctionCtx, grad_log_probs: Tensor | None, grad_entropy: Tensor | None):
        hidden, weight, bias, tokens, mask, temperature, entropy, *sums = ctx.saved_tensors
        logit_softcap, workspace_mib, backend = ctx.options
        with torch.no_grad():
            grads = chunked.backward(
                _flat(grad_log_probs),
                _flat(grad_entropy),
                hidden.reshape(-1, hidden.shape[-1]),
                weight,
                bias,
                tokens,
                mask,
                ctx.temperature if temperature is None else temperature,
                logit_softcap,
                _flat(entropy),
                *sums,
                ctx.needs_input_grad[:3],
                workspace_mib,
                backend,
            )
            grad_hidden, grad_weight, grad_bias = grads
            if grad_hidden is not None:
                grad_hidden = grad_hidden.view(hidden.shape)
        depends_on = (grad_log_probs, grad_entropy, hidden, weight, bias)
        return (
            *(
                None
                if grad is None
                else not_twice_differentiable(grad, "linear_log_probs", *depends_on)
                for grad in (grad_hidden, grad_weight, grad_bias)
            ),
            *(None,) * 7,
        )


@torch.library.custom_op("grpo_kernels::linear_log_probs", mutates_args=())
def linear_log_probs_op(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tokens: Tensor,
    mask: Tensor | None,
    temperatures: Tensor | None,
    temperature: float,
    entropy: bool,
    logit_softcap: float,
    workspace_mib: int,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """log_probs, entropy ([0] if not asked), maximum, log-sum; softcap 0 stands for none."""
    shape = tokens.shape
    hidden, tokens, mask, scale = _flat_inputs(
        hidden, tokens, mask, temperature if temperatures is None else temperatures
    )
    log_probs, entropies, row_max, log_sum = chunked.forward(
        hidden,
        weight,
        bias,
        tokens,
        mask,
        scale,
        entropy,
        logit_softcap or None,
        workspace_mib,
        backend,
    )
    entropies = log_probs.new_empty(0) if entropies is None else entropies.view(shape)
    return log_probs.view(shape), entropies, row_max.view(shape), log_sum.view(shape)


@linear_log_probs_op.register_fake
def _(hidden, weight, bias, tokens, mask, temperatures, temperature, entropy, *_):
    def new(shape):
        return torch.empty(shape, dtype=compute_dtype(weight), device=weight.device)

    shape = tokens.shape
    return new(shape), new(shape if entropy else (0,)), new(shape), new(shape)


@torch.library.custom_op("grpo_kernels::linear_log_probs_backward", mutates_args=())
def linear_log_probs_backward_op(
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tokens: Tensor,
    mask: Tensor | None,
    temperatures: Tensor | None,
    temperature: float,
    logit_softcap: float,
    entropy: Tensor | None,
    row_max: Tensor,
    log_sum: Tensor,
    needs_hidden: bool,
    needs_weight: bool,
    needs_bias: bool,
    workspace_mib: int,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of hidden, weight and bias; [0] where not needed."""
    flat_hidden, tokens, mask, scale = _flat_inputs(
        hidden, tokens, mask, temperature if temperatures is None else temperatures
    )
    grad_hidden, grad_weight, grad_bias = chunked.backward(
        _flat(grad_log_probs),
        _flat(grad_entropy),
        flat_hidden,
        weight,
        bias,
        tokens,
        mask,
        scale,
        logit_softcap or None,
        _flat(entropy),
        _flat(row_max),
        _flat(log_sum),
        (needs_hidden, needs_weight, needs_bias),
        workspace_mib,
        backend,
    )
    none = hidden.new_empty
    return (
        none(0) if grad_hidden is None else grad_hidden.reshape(hidden.shape),
        none(0) if grad_weight is None else grad_weight.contiguous(),
        none(0) if grad_bias is None else grad_bias,
    )


@linear_log_probs_backward_op.register_fake
def _(grad_log_probs, grad_entropy, hidden, weight, bias, *rest):
    needs_hidden, needs_weight, needs_bias = rest[-5:-2]

    def new(like, needed):
        return torch.empty(like.shape if needed else (0,), dtype=hidden.dtype, device=weight.device)

    return (
        new(hidden, needs_hidden),
        new(weight, needs_weight),
        new(hidden if bias is None else bias, needs_bias),
    )


def _setup_context(ctx: FunctionCtx, inputs: tuple, output: tuple) -> None:
    *tensors, temperature, entropy, logit_softcap, workspace_mib, backend = inputs
    _, entropies, row_max, log_sum = output
    ctx.mark_non_differentiable(row_max, log_sum)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, entropies if entropy else None, row_max, log_sum)
    ctx.scale = (temperature, logit_softcap)
    ctx.options = (workspace_mib, backend)


def _backward(ctx: FunctionCtx, grad_log_probs, grad_entropy, *_):
    *tensors, entropies, row_max, log_sum = ctx.saved_tensors
    needs = ctx.needs_input_grad[:3]
    grads = torch.ops.grpo_kernels.linear_log_probs_backward.default(
        grad_log_probs,
        grad_entropy if entropies is not None else None,
        *tensors,
        *ctx.scale,
        entropies,
        row_max,
        log_sum,
        *needs,
        *ctx.options,
    )
    return *(grad if need else None for grad, need in zip(grads, needs, strict=True)), *(None,) * 8


def _double_backward(ctx: FunctionCtx, *_):
    refuse_second_derivative("linear_log_probs")


linear_log_probs_op.register_autograd(_backward, setup_context=_setup_context)
linear_log_probs_backward_op.register_autograd(_double_backward)
