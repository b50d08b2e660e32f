"""Triton kernels: the logits are read once forward, read and written once backward.

Forward: a program takes a row, or one of SPLITS parts of it when there are few rows; a second
kernel then merges the parts in order. Each lane keeps its own running maximum m and sums
s = sum e^z and t = sum z e^z, z = (x - m) / T, so that nothing crosses threads before the end.
Backward: the saved maximum and log-sum give each probability from its own logit alone.

A row may start anywhere, and its length need not be a multiple of a 16-byte vector. So it is cut
into a middle that starts and ends on vectors, read as such, and edges of less than a vector each.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..backends import on_device

VECTOR_BYTES = 16
# Vectors in a tile, NUM_WARPS * 32 threads: two 16-byte loads a thread are in flight.
LANES = 512
NUM_WARPS = 8
# Programs that fill a GPU; fewer rows than that are split. A constant, not the device's own
# number, so that the order of summation depends on shapes only.
FULL_GRID = 512
MAX_SPLITS = 32
# Tiles that a backward program takes: enough to pay for reading the row's scalars.
TILES_PER_PROGRAM = 4


@triton.jit
def _tanh(x):
    magnitude = tl.abs(x)
    e = tl.exp(-2.0 * magnitude)
    far = (1.0 - e) / (1.0 + e)
    if x.dtype == tl.float64:
        return tl.where(x < 0, -far, far)
    # 1 - e^-2x cancels near 0: there tanh x = x + x^3 q(x^2), a Chebyshev fit on [0, 0.6].
    u = x * x
    q = -0.006276387 * u + 0.021116214
    q = q * u - 0.053875138
    q = q * u + 0.13332924
    q = q * u - 0.3333333
    return tl.where(magnitude < 0.6, x + x * u * q, tl.where(x < 0, -far, far))


@triton.jit
def _row_begin(row, columns, batch_stride, column_stride, first_element):
    """Offset of a row of a [B, T, V] tensor, in elements and in 64 bits."""
    batch = row // columns
    column = row - batch * columns
    return first_element + batch.to(tl.int64) * batch_stride + column.to(tl.int64) * column_stride


@triton.jit
def _row_is_valid(mask_ptr, row):
    valid = True
    if mask_ptr is not None:
        valid = tl.load(mask_ptr + row) != 0
    return valid


@triton.jit
def _inverse_temperature(temperature_ptr, temperature_stride, inverse_temperature, row):
    inverse = inverse_temperature
    if temperature_ptr is not None:
        inverse = 1.0 / tl.load(temperature_ptr + row.to(tl.int64) * temperature_stride)
    return inverse


@triton.jit
def _edges(begin, vocab, VECTOR: tl.constexpr, LANES: tl.constexpr):
    """Positions in the row, and which of them count, of its elements outside whole vectors."""
    middle = (begin + VECTOR - 1) // VECTOR * VECTOR - begin
    tail = (begin + vocab) // VECTOR * VECTOR - begin
    lane = tl.arange(0, LANES)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    in_head = (lane < VECTOR) & (lane < middle) & (lane < vocab)
    tail_position = tail + lane - VECTOR
    in_tail = (lane >= VECTOR) & (tail_position >= middle) & (tail_position < vocab)
    return tl.where(lane < VECTOR, lane, tail_position), in_head | in_tail


@triton.jit
def _capped(x, softcap: tl.constexpr):
    out = x
    if softcap is not None:
        out = softcap * _tanh(x / softcap)
    return out


@triton.jit
def _rescaled(m, s, t, new_m, inverse_temperature):
    """The sums about new_m; NaN in them stays, and a maximum of -inf stands for empty sums."""
    base = tl.where(new_m == float("-inf"), 0.0, new_m)
    shift = tl.where(m == float("-inf"), 0.0, (m - base) * inverse_temperature)
    scale = tl.exp(shift)
    return base, s * scale, (t + shift * s) * scale


@triton.jit
def _accumulate(m, s, t, x, inside, inverse_temperature, ENTROPY: tl.constexpr, softcap):
    x = tl.where(inside, _capped(x.to(m.dtype), softcap), float("-inf"))
    new_m = tl.maximum(m, tl.max(x, axis=1))
    base, s, t = _rescaled(m, s, t, new_m, inverse_temperature)
    z = (x - base[:, None]) * inverse_temperature
    e = tl.exp(z)
    s += tl.sum(e, axis=1)
    if ENTROPY:
        # z is -inf where the logit is, and 0 * -inf would be NaN.
        t += tl.sum(tl.where(e == 0.0, 0.0, z * e), axis=1)
    return new_m, s, t


@triton.jit
def _merge(m, s, t, inverse_temperature):
    """The sums of all lanes about their common maximum, in a fixed order."""
    row_m = tl.max(m, axis=0)
    _, s, t = _rescaled(m, s, t, row_m, inverse_temperature)
    return row_m, tl.sum(s, axis=0), tl.sum(t, axis=0)


@triton.jit
def _store_scores(
    row,
    m,
    s,
    t,
    logits_ptr,
    begin,
    tokens_ptr,
    log_probs_ptr,
    entropy_ptr,
    max_ptr,
    log_sum_ptr,
    inverse_temperature,
    vocab,
    softcap: tl.constexpr,
):
    token = tl.load(tokens_ptr + row)
    in_range = (token >= 0) & (token < vocab)
    # A token out of range makes the row NaN and, through the saved sum, its gradient.
    log_sum = tl.where(in_range, tl.log(s), float("nan"))
    logit = tl.load(logits_ptr + begin + tl.where(in_range, token, 0)).to(m.dtype)
    log_prob = (_capped(logit, softcap) - m) * inverse_temperature - log_sum
    tl.store(log_probs_ptr + row, log_prob)
    tl.store(max_ptr + row, m)
    tl.store(log_sum_ptr + row, log_sum)
    if entropy_ptr is not None:
        tl.store(entropy_ptr + row, log_sum - t / s)


RUN_TIME_SCALARS = [
    "columns",
    "batch_stride",
    "column_stride",
    "first_element",
    "vocab",
    "temperature_stride",
    "inverse_temperature",
]


@triton.jit(do_not_specialize=RUN_TIME_SCALARS)
def forward_kernel(
    logits_ptr,
    tokens_ptr,
    mask_ptr,
    temperature_ptr,
    log_probs_ptr,
    entropy_ptr,
    max_ptr,
    log_sum_ptr,
    parts_ptr,
    columns,
    batch_stride,
    column_stride,
    first_element,
    vocab,
    temperature_stride,
    inverse_temperature,
    softcap: tl.constexpr,
    SPLITS: tl.constexpr,
    VECTOR: tl.constexpr,
    LANES: tl.constexpr,
):
    row = tl.program_id(0) // SPLITS
    split = tl.program_id(0) % SPLITS
    accumulator: tl.constexpr = log_probs_ptr.dtype.element_ty
    if not _row_is_valid(mask_ptr, row):
        if SPLITS == 1:
            tl.store(log_probs_ptr + row, 0.0)
            tl.store(max_ptr + row, 0.0)
            tl.store(log_sum_ptr + row, 0.0)
            if entropy_ptr is not None:
                tl.store(entropy_ptr + row, 0.0)
        return
    TILE: tl.constexpr = LANES * VECTOR
    ENTROPY: tl.constexpr = entropy_ptr is not None
    begin = _row_begin(row, columns, batch_stride, column_stride, first_element)
    inverse = _inverse_temperature(
        temperature_ptr, temperature_stride, inverse_temperature, row
    ).to(accumulator)
    m = tl.full((LANES,), float("-inf"), accumulator)
    s = tl.zeros((LANES,), accumulator)
    t = tl.zeros((LANES,), accumulator)

    if split == 0:
        position, inside = _edges(begin, vocab, VECTOR, LANES)
        x = tl.load(logits_ptr + begin + position, mask=inside, other=0.0)
        m, s, t = _accumulate(m, s, t, x, inside, inverse, ENTROPY, softcap)

    middle = (begin + VECTOR - 1) // VECTOR * VECTOR
    length = ((begin + vocab) // VECTOR - middle // VECTOR).to(tl.int32) * VECTOR
    share = tl.cdiv(tl.cdiv(length, TILE), SPLITS) * TILE
    end = tl.multiple_of(tl.minimum((split + 1) * share, length), VECTOR)
    lane = tl.arange(0, LANES)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    for offset in range(split * share, end, TILE):
        position = tl.multiple_of(offset, VECTOR) + lane
        inside = position < end
        x = tl.load(logits_ptr + middle + position, mask=inside, other=0.0)
        m, s, t = _accumulate(m, s, t, x, inside, inverse, ENTROPY, softcap)

    m, s, t = _merge(m, s, t, inverse)
    if SPLITS == 1:
        _store_scores(
            row,
            m,
            s,
            t,
            logits_ptr,
            begin,
            tokens_ptr,
            log_probs_ptr,
            entropy_ptr,
            max_ptr,
            log_sum_ptr,
            inverse,
            vocab,
            softcap,
        )
    else:
        part = parts_ptr + (row * SPLITS + split) * 3
        tl.store(part, m)
        tl.store(part + 1, s)
        tl.store(part + 2, t)


@triton.jit(do_not_specialize=RUN_TIME_SCALARS)
def merge_kernel(
    logits_ptr,
    tokens_ptr,
    mask_ptr,
    temperature_ptr,
    log_probs_ptr,
    entropy_ptr,
    max_ptr,
    log_sum_ptr,
    parts_ptr,
    columns,
    batch_stride,
    column_stride,
    first_element,
    vocab,
    temperature_stride,
    inverse_temperature,
    softcap: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """The scores of a row from its SPLITS parts."""
    row = tl.program_id(0)
    accumulator: tl.constexpr = log_probs_ptr.dtype.element_ty
    if not _row_is_valid(mask_ptr, row):
        tl.store(log_probs_ptr + row, 0.0)
        tl.store(max_ptr + row, 0.0)
        tl.store(log_sum_ptr + row, 0.0)
        if entropy_ptr is not None:
            tl.store(entropy_ptr + row, 0.0)
        return
    begin = _row_begin(row, columns, batch_stride, column_stride, first_element)
    inverse = _inverse_temperature(
        temperature_ptr, temperature_stride, inverse_temperature, row
    ).to(accumulator)
    part = parts_ptr + (row * SPLITS + tl.arange(0, SPLITS)) * 3
    m, s, t = _merge(tl.load(part), tl.load(part + 1), tl.load(part + 2), inverse)
    _store_scores(
        row,
        m,
        s,
        t,
        logits_ptr,
        begin,
        tokens_ptr,
        log_probs_ptr,
        entropy_ptr,
        max_ptr,
        log_sum_ptr,
        inverse,
        vocab,
        softcap,
    )


@triton.jit
def _gradient(
    x,
    position,
    token,
    log_prob_slope,
    entropy_slope,
    entropy,
    m,
    log_sum,
    inverse_temperature,
    softcap: tl.constexpr,
):
    x = x.to(m.dtype)
    c = _capped(x, softcap)
    log_p = (c - m) * inverse_temperature - log_sum
    p = tl.exp(log_p)
    # log_p is -inf where the logit is, and 0 * -inf would be NaN.
    grad = tl.where(p == 0.0, 0.0, -p * (log_prob_slope + entropy_slope * (log_p + entropy)))
    grad += tl.where(position == token, log_prob_slope, 0.0)
    grad *= inverse_temperature
    if softcap is not None:
        tanh = c / softcap
        grad *= 1.0 - tanh * tanh
    return grad


@triton.jit(
    do_not_specialize=[
        *RUN_TIME_SCALARS,
        "programs_per_row",
        "grad_batch_stride",
        "grad_column_stride",
        "grad_first_element",
        "log_prob_slope_batch_stride",
        "log_prob_slope_column_stride",
        "entropy_slope_batch_stride",
        "entropy_slope_column_stride",
    ]
)
def backward_kernel(
    logits_ptr,
    tokens_ptr,
    mask_ptr,
    temperature_ptr,
    log_prob_slope_ptr,
    entropy_slope_ptr,
    entropy_ptr,
    max_ptr,
    log_sum_ptr,
    grad_ptr,
    columns,
    batch_stride,
    column_stride,
    first_element,
    vocab,
    temperature_stride,
    inverse_temperature,
    programs_per_row,
    grad_batch_stride,
    grad_column_stride,
    grad_first_element,
    log_prob_slope_batch_stride,
    log_prob_slope_column_stride,
    entropy_slope_batch_stride,
    entropy_slope_column_stride,
    softcap: tl.constexpr,
    SAME_ALIGNMENT: tl.constexpr,
    TILES: tl.constexpr,
    VECTOR: tl.constexpr,
    LANES: tl.constexpr,
):
    row = tl.program_id(0) // programs_per_row
    chunk = tl.program_id(0) % programs_per_row
    accumulator: tl.constexpr = max_ptr.dtype.element_ty
    TILE: tl.constexpr = LANES * VECTOR
    valid = _row_is_valid(mask_ptr, row)
    begin = _row_begin(row, columns, batch_stride, column_stride, first_element)
    grad_begin = _row_begin(row, columns, grad_batch_stride, grad_column_stride, grad_first_element)
    inverse = _inverse_temperature(
        temperature_ptr, temperature_stride, inverse_temperature, row
    ).to(accumulator)
    token = tl.load(tokens_ptr + row)
    m = tl.load(max_ptr + row)
    log_sum = tl.load(log_sum_ptr + row)
    log_prob_slope = tl.zeros((), accumulator)
    entropy_slope = tl.zeros((), accumulator)
    entropy = tl.zeros((), accumulator)
    if log_prob_slope_ptr is not None:
        at = _row_begin(row, columns, log_prob_slope_batch_stride, log_prob_slope_column_stride, 0)
        log_prob_slope = tl.load(log_prob_slope_ptr + at)
    if entropy_slope_ptr is not None:
        at = _row_begin(row, columns, entropy_slope_batch_stride, entropy_slope_column_stride, 0)
        entropy_slope = tl.load(entropy_slope_ptr + at)
        entropy = tl.load(entropy_ptr + row)

    if chunk == 0:
        position, inside = _edges(begin, vocab, VECTOR, LANES)
        x = tl.load(logits_ptr + begin + position, mask=inside & valid, other=0.0)
        grad = _gradient(
            x,
            position,
            token,
            log_prob_slope,
            entropy_slope,
            entropy,
            m,
            log_sum,
            inverse,
            softcap,
        )
        grad = tl.where(valid, grad, 0.0)
        tl.store(grad_ptr + grad_begin + position, grad, mask=inside)

    middle = (begin + VECTOR - 1) // VECTOR * VECTOR
    length = ((begin + vocab) // VECTOR - middle // VECTOR).to(tl.int32) * VECTOR
    grad_middle = grad_begin + middle - begin
    if SAME_ALIGNMENT:
        grad_middle = grad_middle // VECTOR * VECTOR
    lead = (middle - begin).to(tl.int32)
    lane = tl.arange(0, LANES)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    for tile in range(TILES):
        position = (chunk * TILES + tile) * TILE + lane
        inside = position < length
        x = tl.load(logits_ptr + middle + position, mask=inside & valid, other=0.0)
        grad = _gradient(
            x,
            position + lead,
            token,
            log_prob_slope,
            entropy_slope,
            entropy,
            m,
            log_sum,
            inverse,
            softcap,
        )
        grad = tl.where(valid, grad, 0.0)
        tl.store(grad_ptr + grad_middle + position, grad, mask=inside)


def _from_alignment(rows: Tensor) -> tuple[Tensor, int]:
    """A view that starts at a 16-byte boundary, and how many elements later `rows` starts."""
    lead = rows.data_ptr() % VECTOR_BYTES // rows.element_size()
    if lead == 0 or lead > rows.storage_offset():
        return rows, 0
    return rows.as_strided(rows.shape, rows.stride(), rows.storage_offset() - lead), lead


def _temperature_arguments(temperature: float | Tensor, rows: Tensor) -> tuple:
    """temperature_ptr, temperature_stride, inverse_temperature."""
    if isinstance(temperature, Tensor):
        temperature = temperature.reshape(-1)
        return temperature, temperature.stride(0), 1.0
    if rows.dtype == torch.float64:  # a scalar argument is fp32
        return rows.new_full((1,), temperature), 0, 1.0
    return None, 0, 1.0 / temperature


def _splits(rows: int, vocab: int, vector: int) -> int:
    """Programs for each row: a power of two, 1 once the rows alone fill the grid."""
    tiles = triton.cdiv(vocab, LANES * vector)
    wanted = min(triton.cdiv(FULL_GRID, max(rows, 1)), tiles, MAX_SPLITS)
    return 1 << (wanted.bit_length() - 1)


def forward(
    logits: Tensor,
    tokens: Tensor,
    mask: Tensor | None,
    temperature: float | Tensor,
    entropy: bool,
    logit_softcap: float | None,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """As eager.forward, but a token out of range gives NaN."""
    batch, columns, vocab = logits.shape
    rows = batch * columns
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    log_probs, row_max, log_sum = (
        torch.empty((batch, columns), dtype=dtype, device=logits.device) for _ in range(3)
    )
    entropies = torch.empty_like(log_probs) if entropy else None
    if rows == 0:
        return log_probs, entropies, row_max, log_sum
    vector = VECTOR_BYTES // logits.element_size()
    splits = _splits(rows, vocab, vector)
    parts = log_probs.new_empty((rows, splits, 3)) if splits > 1 else None
    aligned, first_element = _from_alignment(logits)
    temperature_ptr, temperature_stride, inverse = _temperature_arguments(temperature, logits)
    arguments = (
        aligned,
        tokens,
        mask,
        temperature_ptr,
        log_probs,
        entropies,
        row_max,
        log_sum,
        parts,
        columns,
        logits.stride(0),
        logits.stride(1),
        first_element,
        vocab,
        temperature_stride,
        inverse,
        logit_softcap,
        splits,
    )
    with on_device(logits):
        forward_kernel[(rows * splits,)](*arguments, vector, LANES, num_warps=NUM_WARPS)
        if splits > 1:
            merge_kernel[(rows,)](*arguments, num_warps=1)
    return log_probs, entropies, row_max, log_sum


def backward(
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
    logits: Tensor,
    tokens: Tensor,
    mask: Tensor | None,
    temperature: float | Tensor,
    logit_softcap: float | None,
    entropy: Tensor | None,
    row_max: Tensor,
    log_sum: Tensor,
    grad_logits: Tensor,
) -> None:
    """As eager.backward."""
    batch, columns, vocab = logits.shape
    rows = batch * columns
    if rows == 0:
        return
    vector = VECTOR_BYTES // logits.element_size()
    aligned, first_element = _from_alignment(logits)
    aligned_grad, grad_first_element = _from_alignment(grad_logits)
    same_alignment = all(
        (a - b) % vector == 0
        for a, b in zip(
            (first_element, *logits.stride()[:2]),
            (grad_first_element, *grad_logits.stride()[:2]),
            strict=True,
        )
    )
    temperature_ptr, temperature_stride, inverse = _temperature_arguments(temperature, logits)
    programs_per_row = triton.cdiv(vocab, LANES * vector * TILES_PER_PROGRAM)
    with on_device(logits):
        backward_kernel[(rows * programs_per_row,)](
            aligned,
            tokens,
            mask,
            temperature_ptr,
            grad_log_probs,
            grad_entropy,
            entropy if grad_entropy is not None else None,
            row_max,
            log_sum,
            aligned_grad,
            columns,
            logits.stride(0),
            logits.stride(1),
            first_element,
            vocab,
            temperature_stride,
            inverse,
            programs_per_row,
            grad_logits.stride(0),
            grad_logits.stride(1),
            grad_first_element,
            *(grad_log_probs.stride() if grad_log_probs is not None else (0, 0)),
            *(grad_entropy.stride() if grad_entropy is not None else (0, 0)),
            logit_softcap,
            same_alignment,
            TILES_PER_PROGRAM,
            vector,
            LANES,
            num_warps=NUM_WARPS,
        )
