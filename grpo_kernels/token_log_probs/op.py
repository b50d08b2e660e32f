"""Autograd and torch.library registration of token_log_probs, the same for every backend.

Calls in eager mode go through one autograd.Function; calls under torch.compile and torch.export
through the operators grpo_kernels::token_log_probs and token_log_probs_backward.
"""

from __future__ import annotations

import importlib
from types import ModuleType

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from ..once_differentiable import not_twice_differentiable, refuse_second_derivative
from ..precision import compute_dtype


def implementation(backend: str) -> ModuleType:
    """The module of forward and backward for a resolved backend."""
    return importlib.import_module(f"{__package__}.{backend}")


def as_rows(logits: Tensor) -> Tensor:
    """`logits` as [B, T, V] with inner stride 1: a view wherever the strides allow one."""
    if logits.stride(-1) != 1 and logits.shape[-1] > 1:
        logits = logits.contiguous()
    if logits.dim() > 3:
        return logits.flatten(0, -3)
    return logits.reshape((1,) * (3 - logits.dim()) + logits.shape)


def _rows_share_memory(rows: Tensor) -> bool:
    """Whether any two rows of [B, T, V] may overlap."""
    end = rows.shape[2]
    for stride, size in sorted(zip(rows.stride()[:2], rows.shape[:2], strict=True)):
        if size > 1:
            if stride < end:
                return True
            end += (size - 1) * stride
    return False


def new_grad(rows: Tensor) -> Tensor:
    """An empty gradient, its rows aligned like the logits' unless that wastes memory."""
    span = 1 + sum(
        (size - 1) * stride for size, stride in zip(rows.shape, rows.stride(), strict=True)
    )
    if span <= 1.25 * rows.numel() and not _rows_share_memory(rows):
        return torch.empty_strided(rows.shape, rows.stride(), dtype=rows.dtype, device=rows.device)
    return torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)


def _per_row(values: Tensor | None, rows: Tensor) -> Tensor | None:
    """[...] as [B, T]; a stride of 0 stays one."""
    return None if values is None else values.reshape(rows.shape[:2])


def _temperature_per_row(temperature: float | Tensor, tokens: Tensor, rows: Tensor):
    if not isinstance(temperature, Tensor):
        return temperature
    return _per_row(temperature.to(compute_dtype(rows)).expand(tokens.shape), rows)


class TokenLogProbs(torch.autograd.Function):
    """The eager-mode path."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        logits: Tensor,
        tokens: Tensor,
        mask: Tensor | None,
        temperature: float | Tensor,
        entropy: bool,
        logit_softcap: float | None,
        overwrite_logits: bool,
        backend: str,
    ):
        rows = as_rows(logits)
        if overwrite_logits and _rows_share_memory(rows):
            raise ValueError(
                "overwrite_logits needs logits whose rows do not share memory, got strides "
                f"{tuple(logits.stride())} for shape {tuple(logits.shape)}"
            )
        row_tokens = tokens.to(torch.int64).reshape(rows.shape[:2]).contiguous()
        row_mask = None if mask is None else mask.reshape(rows.shape[:2]).contiguous()
        row_temperature = _temperature_per_row(temperature, tokens, rows)
        log_probs, entropies, row_max, log_sum = implementation(backend).forward(
            rows, row_tokens, row_mask, row_temperature, entropy, logit_softcap
        )
        entropies = None if entropies is None else entropies.view(tokens.shape)
        ctx.set_materialize_grads(False)
        per_row = isinstance(row_temperature, Tensor)
        ctx.save_for_backward(
            rows,
            row_tokens,
            row_mask,
            row_temperature if per_row else None,
            entropies,
            row_max,
            log_sum,
        )
        ctx.temperature = None if per_row else row_temperature
        ctx.logit_softcap = logit_softcap
        ctx.overwrite_logits = overwrite_logits
        ctx.overwritten = False
        ctx.backend = backend
        ctx.shape = logits.shape
        # Detached: a view must not be changed in place once autograd.Function returns it.
        return log_probs.view(tokens.shape).detach(), entropies

    @staticmethod
    def backward(ctx: FunctionCtx, grad_log_probs: Tensor | None, grad_entropy: Tensor | None):
        if ctx.overwritten:
            raise RuntimeError(
                "token_log_probs: the first backward has written the gradient over the logits; "
                "call with overwrite_logits=False to run backward more than once"
            )
        rows, tokens, mask, temperature, entropy, row_max, log_sum = ctx.saved_tensors
        ctx.overwritten = ctx.overwrite_logits
        depends_on = (grad_log_probs, grad_entropy, rows)
        with torch.no_grad():
            grad_logits = rows if ctx.overwrite_logits else new_grad(rows)
            implementation(ctx.backend).backward(
                _per_row(grad_log_probs, rows),
                _per_row(grad_entropy, rows),
                rows,
                tokens,
                mask,
                ctx.temperature if temperature is None else temperature,
                ctx.logit_softcap,
                _per_row(entropy, rows),
                row_max,
                log_sum,
                grad_logits,
            )
            if ctx.overwrite_logits:
                torch.autograd.graph.increment_version(rows)
            grad_logits = grad_logits.view(ctx.shape)
        grad_logits = not_twice_differentiable(grad_logits, "token_log_probs", *depends_on)
        return grad_logits, *(None,) * 7


@torch.library.custom_op("grpo_kernels::token_log_probs", mutates_args=())
def token_log_probs_op(
    logits: Tensor,
    tokens: Tensor,
    mask: Tensor | None,
    temperatures: Tensor | None,
    temperature: float,
    entropy: bool,
    logit_softcap: float,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """log_probs, entropy ([0] if not asked), max(c), log sum e^z; softcap 0 stands for none."""
    rows = as_rows(logits)
    shape = tokens.shape
    outputs = implementation(backend).forward(
        rows,
        tokens.to(torch.int64).reshape(rows.shape[:2]).contiguous(),
        None if mask is None else mask.reshape(rows.shape[:2]).contiguous(),
        _temperature_per_row(temperature if temperatures is None else temperatures, tokens, rows),
        entropy,
        logit_softcap or None,
    )
    log_probs, entropies, row_max, log_sum = outputs
    entropies = log_probs.new_empty(0) if entropies is None else entropies.reshape(shape)
    return log_probs.reshape(shape), entropies, row_max.reshape(shape), log_sum.reshape(shape)


@token_log_probs_op.register_fake
def _(logits, tokens, mask, temperatures, temperature, entropy, logit_softcap, backend):
    dtype = compute_dtype(logits)
    log_probs, row_max, log_sum = (
        torch.empty(tokens.shape, dtype=dtype, device=logits.device) for _ in range(3)
    )
    entropy_shape = tokens.shape if entropy else (0,)
    entropies = torch.empty(entropy_shape, dtype=dtype, device=logits.device)
    return log_probs, entropies, row_max, log_sum


@torch.library.custom_op("grpo_kernels::token_log_probs_backward", mutates_args=())
def token_log_probs_backward_op(
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
    logits: Tensor,
    tokens: Tensor,
    mask: Tensor | None,
    temperatures: Tensor | None,
    temperature: float,
    logit_softcap: float,
    entropy: Tensor | None,
    row_max: Tensor,
    log_sum: Tensor,
    backend: str,
) -> Tensor:
    """The gradient of logits, contiguous."""
    rows = as_rows(logits)
    grad_logits = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
    implementation(backend).backward(
        _per_row(grad_log_probs, rows),
        _per_row(grad_entropy, rows),
        rows,
        tokens.to(torch.int64).reshape(rows.shape[:2]).contiguous(),
        None if mask is None else mask.reshape(rows.shape[:2]).contiguous(),
        _temperature_per_row(temperature if temperatures is None else temperatures, tokens, rows),
        logit_softcap or None,
        _per_row(entropy, rows),
        _per_row(row_max, rows).contiguous(),
        _per_row(log_sum, rows).contiguous(),
        grad_logits,
    )
    return grad_logits.view(logits.shape)


@token_log_probs_backward_op.register_fake
def _(grad_log_probs, grad_entropy, logits, *_):
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


def _setup_context(ctx: FunctionCtx, inputs: tuple, output: tuple) -> None:
    logits, tokens, mask, temperatures, temperature, entropy, logit_softcap, backend = inputs
    _, entropies, row_max, log_sum = output
    ctx.mark_non_differentiable(row_max, log_sum)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(logits, tokens, mask, temperatures, entropies, row_max, log_sum)
    ctx.arguments = (temperature, logit_softcap)
    ctx.entropy = entropy
    ctx.backend = backend


def _backward(ctx: FunctionCtx, grad_log_probs, grad_entropy, *_):
    logits, tokens, mask, temperatures, entropies, row_max, log_sum = ctx.saved_tensors
    grad_logits = torch.ops.grpo_kernels.token_log_probs_backward.default(
        grad_log_probs,
        grad_entropy if ctx.entropy else None,
        logits,
        tokens,
        mask,
        temperatures,
        *ctx.arguments,
        entropies if ctx.entropy else None,
        row_max,
        log_sum,
        ctx.backend,
    )
    return grad_logits, *(None,) * 7


def _double_backward(ctx: FunctionCtx, *_):
    refuse_second_derivative("token_log_probs")


token_log_probs_op.register_autograd(_backward, setup_context=_setup_context)
token_log_probs_backward_op.register_autograd(_double_backward)
