"""Chunks of rows through the output layer, for every backend.

A chunk's logits live in one workspace: the library's matmul writes them, token_log_probs' kernel
reads them. Backward computes them again, turns them into their gradient in place, and multiplies
that into the gradients of hidden and weight.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..token_log_probs.op import implementation

# At least so many chunks, of at least so many rows: the workspace is a small part of the logits
# however few they are, and the matmuls stay efficient.
MIN_CHUNKS = 5
MIN_CHUNK_ROWS = 64
# Rows of a 16-bit weight gradient that are computed in 16 bits before they are added in 32.
WEIGHT_SLICE_BYTES = 2**24


def _chunk_rows(rows: int, weight: Tensor, workspace_mib: int) -> int:
    row_bytes = weight.shape[0] * weight.element_size()
    wanted = max(MIN_CHUNK_ROWS, -(-rows // MIN_CHUNKS))
    return max(1, min(rows, wanted, workspace_mib * 2**20 // row_bytes))


def _chunks(rows: int, weight: Tensor, workspace_mib: int) -> Iterator[tuple[slice, Tensor]]:
    """Slices of rows, each with the workspace for its logits."""
    step = _chunk_rows(rows, weight, workspace_mib)
    workspace = weight.new_empty((step, weight.shape[0]))
    for begin in range(0, rows, step):
        end = min(begin + step, rows)
        yield slice(begin, end), workspace[: end - begin]


def _project(hidden: Tensor, weight: Tensor, bias: Tensor | None, logits: Tensor) -> None:
    if bias is None:
        torch.mm(hidden, weight.t(), out=logits)
    else:
        torch.addmm(bias, hidden, weight.t(), out=logits)


def _row(values: Tensor | None, rows: slice) -> Tensor | None:
    """Some of [N] as [1, n]."""
    return None if values is None else values[rows].unsqueeze(0)


def _valid_rows(mask: Tensor | None) -> Tensor | None:
    """Indices of the valid rows on a CPU; None where all are, or where asking would wait."""
    if mask is None or mask.device.type != "cpu" or mask.all():
        return None
    return mask.nonzero().squeeze(-1)


def _zero_masked(hidden: Tensor, mask: Tensor | None, rows: slice) -> Tensor:
    """hidden[rows] with zeros at masked rows, whose NaN would spoil the weight's gradient."""
    if mask is None:
        return hidden[rows]
    return hidden[rows].where(mask[rows].unsqueeze(-1), 0)


def forward(
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
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """log_probs, entropy, and the maximum and log-sum that backward needs, each [N]."""
    valid = _valid_rows(mask)
    if valid is not None:
        if isinstance(temperature, Tensor):
            temperature = temperature[valid]
        scores = forward(
            hidden[valid],
            weight,
            bias,
            tokens[valid],
            None,
            temperature,
            entropy,
            logit_softcap,
            workspace_mib,
            backend,
        )
        return tuple(
            None if score is None else score.new_zeros(mask.shape).index_copy_(0, valid, score)
            for score in scores
        )
    kernel = implementation(backend)
    dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
    log_probs, row_max, log_sum = (
        torch.empty(tokens.shape, dtype=dtype, device=weight.device) for _ in range(3)
    )
    entropies = torch.empty_like(log_probs) if entropy else None
    for rows, logits in _chunks(len(tokens), weight, workspace_mib):
        _project(hidden[rows], weight, bias, logits)
        scores = kernel.forward(
            logits.unsqueeze(0),
            _row(tokens, rows),
            _row(mask, rows),
            _row(temperature, rows) if isinstance(temperature, Tensor) else temperature,
            entropy,
            logit_softcap,
        )
        for whole, part in zip((log_probs, entropies, row_max, log_sum), scores):
            if whole is not None:
                whole[rows] = part.squeeze(0)
    return log_probs, entropies, row_max, log_sum


def _add_weight_gradient(total: Tensor, grad_logits: Tensor, hidden: Tensor, first: bool) -> None:
    """total = [0 if first else total] + grad_logits^T hidden, accumulated in total's dtype."""
    beta = 0 if first else 1
    if total.dtype == hidden.dtype:
        torch.addmm(total, grad_logits.t(), hidden, beta=beta, out=total)
        return
    if total.device.type == "cuda":
        torch.ops.aten.addmm.dtype_out(
            total, grad_logits.t(), hidden, total.dtype, beta=beta, out=total
        )
        return
    step = max(1, WEIGHT_SLICE_BYTES // (hidden.shape[1] * hidden.element_size()))
    for begin in range(0, len(total), step):
        part = torch.mm(grad_logits[:, begin : begin + step].t(), hidden)
        if first:
            total[begin : begin + step] = part
        else:
            total[begin : begin + step] += part


def backward(
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tokens: Tensor,
    mask: Tensor | None,
    temperature: float | Tensor,
    logit_softcap: float | None,
    entropy: Tensor | None,
    row_max: Tensor,
    log_sum: Tensor,
    needs: tuple[bool, bool, bool],
    workspace_mib: int,
    backend: str,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of hidden, weight and bias, those that `needs` asks for."""
    valid = _valid_rows(mask)
    if valid is not None:
        grad_hidden, grad_weight, grad_bias = backward(
            *(None if x is None else x[valid] for x in (grad_log_probs, grad_entropy)),
            hidden[valid],
            weight,
            bias,
            tokens[valid],
            None,
            temperature[valid] if isinstance(temperature, Tensor) else temperature,
            logit_softcap,
            *(None if x is None else x[valid] for x in (entropy, row_max, log_sum)),
            needs,
            workspace_mib,
            backend,
        )
        if grad_hidden is not None:
            grad_hidden = torch.zeros_like(hidden).index_copy_(0, valid, grad_hidden)
        return grad_hidden, grad_weight, grad_bias
    kernel = implementation(backend)
    needs_hidden, needs_weight, needs_bias = needs
    wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
    # One chunk needs no wider sum than the matmul's own.
    one_chunk = len(tokens) <= _chunk_rows(len(tokens), weight, workspace_mib)
    sum_dtype = weight.dtype if one_chunk else wide
    grad_hidden = torch.empty_like(hidden) if needs_hidden else None
    grad_weight = torch.empty_like(weight, dtype=sum_dtype) if needs_weight else None
    grad_bias = torch.zeros_like(bias, dtype=wide) if needs_bias else None
    if needs_weight and len(tokens) == 0:
        grad_weight.zero_()
    for rows, logits in _chunks(len(tokens), weight, workspace_mib):
        chunk_hidden = _zero_masked(hidden, mask, rows)
        _project(chunk_hidden, weight, bias, logits)
        kernel.backward(
            _row(grad_log_probs, rows),
            _row(grad_entropy, rows),
            logits.unsqueeze(0),
            _row(tokens, rows),
            _row(mask, rows),
            _row(temperature, rows) if isinstance(temperature, Tensor) else temperature,
            logit_softcap,
            _row(entropy, rows),
            _row(row_max, rows),
            _row(log_sum, rows),
            logits.unsqueeze(0),
        )
        if needs_hidden:
            torch.mm(logits, weight, out=grad_hidden[rows])
        if needs_weight:
            _add_weight_gradient(grad_weight, logits, chunk_hidden, first=rows.start == 0)
        if needs_bias:
            grad_bias += logits.sum(0, dtype=wide)
    return (
        grad_hidden,
        None if grad_weight is None else grad_weight.to(weight.dtype),
        None if grad_bias is None else grad_bias.to(bias.dtype),
    )
