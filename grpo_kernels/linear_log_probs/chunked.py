"""The output layer a chunk of logits at a time, for every backend.

Forward takes chunks of rows: the library's matmul writes their logits to the workspace and
token_log_probs' kernel reads them. Backward takes chunks of the vocabulary: the row's maximum and
log-sum being known, any of its logits has its gradient from itself alone. So it computes a chunk's
logits again, turns them into their gradient in place, and has that chunk of the weight's gradient
from one matmul; only the gradient of hidden is a sum over chunks.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..token_log_probs.op import implementation

# The workspace is at most about this part of the logits, however few they are.
WORKSPACE_PART = 5
# Rows and vocabulary entries below which a matmul is slow.
MIN_ROWS = 64
MIN_VOCAB = 512
# Of which a chunk is a multiple: the blocks of a matmul.
BLOCK = 16
# On a CPU a chunk of this size is still in its caches when the gradients' matmuls read it.
CACHED_BYTES = 4 * 2**20


def _chunks(total: int, least: int, bytes_each: int, workspace: float) -> Iterator[slice]:
    """Slices of `total` entries, each of `bytes_each` bytes, that fit `workspace` bytes."""
    wanted = max(least, -(-total // WORKSPACE_PART))
    step = min(wanted + -wanted % BLOCK, int(workspace // bytes_each))
    step = max(1, step - step % BLOCK if step > BLOCK else step)
    for begin in range(0, total, step):
        yield slice(begin, min(begin + step, total))


class _Workspace:
    """Memory for one chunk of logits at a time, taken anew only to grow."""

    def __init__(self, like: Tensor):
        self.memory = like.new_empty(0)

    def logits(self, rows: int, vocab: int) -> Tensor:
        if self.memory.numel() < rows * vocab:
            self.memory = self.memory.new_empty(rows * vocab)
        return self.memory[: rows * vocab].view(rows, vocab)


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
    workspace = _Workspace(weight)
    row_bytes = weight.shape[0] * weight.element_size()
    for rows in _chunks(len(tokens), MIN_ROWS, row_bytes, workspace_mib * 2**20):
        logits = workspace.logits(rows.stop - rows.start, weight.shape[0])
        _project(hidden[rows], weight, bias, logits)
        scores = kernel.forward(
            logits.unsqueeze(0),
            _row(tokens, rows),
            _row(mask, rows),
            _row(temperature, rows) if isinstance(temperature, Tensor) else temperature,
            entropy,
            logit_softcap,
        )
        for whole, part in zip((log_probs, entropies, row_max, log_sum), scores, strict=True):
            if whole is not None:
                whole[rows] = part.squeeze(0)
    return log_probs, entropies, row_max, log_sum


def _add_matmul(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, where total may be wider than a and b."""
    if total.dtype == a.dtype:
        torch.addmm(total, a, b, out=total)
    elif total.device.type == "cuda":
        torch.ops.aten.addmm.dtype_out(total, a, b, total.dtype, out=total)
    else:
        total += torch.mm(a, b)


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
    if mask is not None:
        # NaN in a masked row would spoil the weight's gradient: 0 * NaN is NaN.
        hidden = hidden.where(mask.unsqueeze(-1), 0)
    wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
    grad_hidden = torch.zeros_like(hidden, dtype=wide) if needs_hidden else None
    grad_weight = torch.empty_like(weight) if needs_weight else None
    grad_bias = torch.empty_like(bias) if needs_bias else None
    workspace = _Workspace(weight)
    column_bytes = max(1, len(tokens)) * weight.element_size()
    chunk_bytes = workspace_mib * 2**20
    if weight.device.type == "cpu":
        chunk_bytes = min(chunk_bytes, max(MIN_VOCAB * column_bytes, CACHED_BYTES))
    every_row = slice(None)
    for vocab in _chunks(weight.shape[0], MIN_VOCAB, column_bytes, chunk_bytes):
        logits = workspace.logits(len(tokens), vocab.stop - vocab.start)
        _project(hidden, weight[vocab], None if bias is None else bias[vocab], logits)
        kernel.backward(
            _row(grad_log_probs, every_row),
            _row(grad_entropy, every_row),
            logits.unsqueeze(0),
            _row(tokens - vocab.start, every_row),
            _row(mask, every_row),
            _row(temperature, every_row) if isinstance(temperature, Tensor) else temperature,
            logit_softcap,
            _row(entropy, every_row),
            _row(row_max, every_row),
            _row(log_sum, every_row),
            logits.unsqueeze(0),
        )
        if needs_hidden:
            _add_matmul(grad_hidden, logits, weight[vocab])
        if needs_weight:
            torch.mm(logits.t(), hidden, out=grad_weight[vocab])
        if needs_bias:
            grad_bias[vocab] = logits.sum(0, dtype=wide)
    if needs_hidden:
        grad_hidden = grad_hidden.to(hidden.dtype)
    return grad_hidden, grad_weight, grad_bias
