"""`policy_loss` on GPUs: one launch forward, one backward. The formulas are those of eager.py.

Forward: each program takes a segment of one row and writes its sums; the program that finishes last
merges them, in an order that depends on the shape only, and writes losses, metrics and row weights.
Its counter goes back to 0, so that a captured CUDA graph replays. Backward: per token, no sums.

A hyper-parameter is a number or a pointer to one (a scheduled bound; in fp64, which a scalar
argument would round), so that no change of it recompiles or synchronises.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..backends import on_device
from ..precision import compute_dtype
from . import eager
from .options import (
    InputGradients,
    LossGradients,
    PolicyLossOptions,
    PolicyLossOutput,
    output_shapes,
)

SMALL_BLOCK, BLOCK = 128, 1024  # tokens a program: of BLOCK 8 a thread, 16 bytes of bf16
# Without a cap ptxas spills for the sake of occupancy. fp64 takes what there is.
MAX_REGISTERS = {tl.float32: 128, tl.float64: 255}
# Programs whose sums are merged at a time, by block: 2 a thread. With 4 the merge would set the
# registers of the whole kernel, 123 for 96, and halve the programs that run at once.
MERGE = {SMALL_BLOCK: 64, BLOCK: 256}

# Rows of the [sums, programs] buffer.
_OBJECTIVE = tl.constexpr(0)
_ENTROPY_TRAINED = tl.constexpr(1)
_KL_TO_REF = tl.constexpr(2)
_KL_TO_INFERENCE = tl.constexpr(3)
_TRAINED = tl.constexpr(4)
_VALID = tl.constexpr(5)
_CLIPPED = tl.constexpr(6)
_KL_APPROX = tl.constexpr(7)
_ENTROPY = tl.constexpr(8)
_ESS_MAX = tl.constexpr(9)
_ESS_WEIGHTS = tl.constexpr(10)
_ESS_SQUARES = tl.constexpr(11)
_SUMS = 12


if hasattr(tl, "to_tensor"):

    @triton.jit
    def _as_tensor(value):
        """The interpreter passes a number as Python's."""
        return tl.to_tensor(value)
else:  # before triton 3.7

    @triton.jit
    def _as_tensor(value):
        """A compiled kernel's number is a tensor already."""
        return value


@triton.jit
def _number(value, DTYPE: tl.constexpr):
    """A hyper-parameter, given as a number or as a pointer to one."""
    value = _as_tensor(value)
    if value.dtype.is_ptr():
        value = tl.load(value)
    return value.to(DTYPE)


@triton.jit
def _log_bound(bound, SIGN: tl.constexpr, DTYPE: tl.constexpr):
    """log(1 + SIGN * bound); a tensor's in its own precision, as a scheduled buffer is compared."""
    bound = _as_tensor(bound)
    if bound.dtype.is_ptr():
        bound = tl.load(bound)
    OWN: tl.constexpr = bound.dtype
    bound = SIGN * bound.to(tl.float64 if tl.float64 == OWN else tl.float32)
    total = 1 + bound
    log1p = tl.log(total) + (bound - (total - 1)) / total  # what the sum rounded off
    return tl.where(total == float("inf"), total, log1p).to(OWN).to(DTYPE)


@triton.jit
def _times(weight, by):
    """weight * by, and 0 where `by` is 0 though the weight is infinite."""
    return tl.where((by == 0) & (tl.abs(weight) == float("inf")), 0.0, weight * by)


@triton.jit
def _out_of_range(log_ratio, log_low, log_high):
    return (log_ratio > log_high) | (log_ratio < log_low)


@triton.jit
def _clip_ratio(log_ratio, ratio, log_low, log_high):
    below_high = tl.where(log_ratio > log_high, tl.exp(log_high), ratio)
    return tl.where(log_ratio < log_low, tl.exp(log_low), below_high)


@triton.jit
def _grpo(log_probs, log_ratio, ratio, advantages, capped, log_low, log_high):
    """-min(r A, clip(r) A)"""
    above = (advantages >= 0) & (log_ratio > log_high)
    below = (advantages < 0) & (log_ratio < log_low)
    clipped = above | below
    ratio = tl.where(clipped, _clip_ratio(log_ratio, ratio, log_low, log_high), ratio)
    gain = _times(ratio, advantages)
    return -gain, tl.where(clipped | capped, 0.0, -gain), clipped


@triton.jit
def _clipped_ratio(log_probs, log_ratio, ratio, advantages, capped, log_low, log_high):
    """-clip(r) A, differentiated through the clip"""
    clipped = _out_of_range(log_ratio, log_low, log_high)
    gain = _times(_clip_ratio(log_ratio, ratio, log_low, log_high), advantages)
    return -gain, tl.where(clipped | capped, 0.0, -gain), clipped


@triton.jit
def _cispo(log_probs, log_ratio, ratio, advantages, capped, log_low, log_high):
    """-sg(clip(r)) A l"""
    gain = _times(_clip_ratio(log_ratio, ratio, log_low, log_high), advantages)
    clipped = _out_of_range(log_ratio, log_low, log_high)
    return -_times(log_probs, gain), -gain, clipped


@triton.jit
def _token_objective(
    log_probs, log_ratio, ratio, advantages, capped, log_low, log_high, OBJECTIVE: tl.constexpr
):
    if OBJECTIVE == "grpo":
        result = _grpo(log_probs, log_ratio, ratio, advantages, capped, log_low, log_high)
    elif OBJECTIVE == "clipped_ratio":
        result = _clipped_ratio(log_probs, log_ratio, ratio, advantages, capped, log_low, log_high)
    else:
        tl.static_assert(OBJECTIVE == "cispo")
        result = _cispo(log_probs, log_ratio, ratio, advantages, capped, log_low, log_high)
    return result


@triton.jit
def _k3_series(x):
    """(exp(x) - 1 - x) near 0, where the plain difference cancels; |x| <= 1/4."""
    TERMS: tl.constexpr = 13 if x.dtype == tl.float64 else 6
    series = x * 0
    for k in tl.static_range(TERMS):
        series = (1 + series * x) / (TERMS + 1 - k)  # 1/n! by nested division
    return series * x * x


@triton.jit
def _k3(x):
    """exp(x) - 1 - x"""
    return tl.where(tl.abs(x) < 0.25, _k3_series(x), tl.exp(x) - 1 - x)


@triton.jit
def _expm1(x):
    return tl.where(tl.abs(x) < 0.25, x + _k3_series(x), tl.exp(x) - 1)


@triton.jit
def _cap(log_ratio, log_ratio_cap, DTYPE: tl.constexpr):
    """The log-ratio held within +-log_ratio_cap, and where it was held."""
    limit = float("inf")
    if log_ratio_cap is not None:
        limit = _number(log_ratio_cap, DTYPE)
    above = log_ratio > limit
    below = log_ratio < -limit
    return tl.where(above, limit, tl.where(below, -limit, log_ratio)), above | below


@triton.jit
def _kl_penalty(target_log_probs, log_probs, kl_mask, log_ratio_cap, DTYPE: tl.constexpr):
    """k3 to the target policy, 0 where masked."""
    log_ratio = tl.where(kl_mask, target_log_probs - log_probs, 0.0)
    log_ratio, _ = _cap(log_ratio, log_ratio_cap, DTYPE)
    return _k3(log_ratio)


@triton.jit
def _row_offsets(strides, row, columns):
    """Element offsets, 64-bit from the first product."""
    return row * strides[0] + columns.to(tl.int64) * strides[1]


@triton.jit
def _load(pointer, strides, row, columns, T, DTYPE: tl.constexpr):
    # Masked by position only: a mask that is data would keep the load from being vectorised.
    offsets = _row_offsets(strides, row, columns)
    return tl.load(pointer + offsets, mask=columns < T, other=0).to(DTYPE)


@triton.jit
def _select_tokens(
    inputs, strides, row, columns, T, kl_mask_threshold, TORCHRL: tl.constexpr, DTYPE: tl.constexpr
):
    """The tokens asked for, valid and trained, with their log-probs; 0 where not valid."""
    asked = columns < T
    log_probs = _load(inputs[0], strides[0], row, columns, T, DTYPE)
    old_log_probs = _load(inputs[1], strides[1], row, columns, T, DTYPE)
    if inputs[3] is not None:
        mask = tl.load(inputs[3] + _row_offsets(strides[3], row, columns), mask=asked, other=0)
        asked = asked & (mask != 0)
    valid = asked & (old_log_probs - old_log_probs == 0)  # inf - inf is NaN
    log_probs = tl.where(valid, log_probs, 0.0)
    old_log_probs = tl.where(valid, old_log_probs, 0.0)
    log_ratio = log_probs - old_log_probs
    trained = valid
    if kl_mask_threshold is not None:
        divergence = 0.5 * log_ratio * log_ratio
        threshold = _number(kl_mask_threshold, DTYPE)
        if TORCHRL:
            trained = valid & (divergence <= threshold)
        else:
            trained = valid & ((divergence > threshold) == 0)
    return asked, valid, trained, log_probs, old_log_probs, log_ratio


@triton.jit
def _objective_of_block(
    inputs,
    strides,
    row,
    columns,
    T,
    trained,
    log_probs,
    log_ratio,
    log_low,
    log_high,
    log_ratio_cap,
    OBJECTIVE: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Value, coefficient and clip flag of every trained token."""
    advantages = _load(inputs[2], strides[2], row, columns, T, DTYPE)
    advantages = tl.where(trained, advantages, 0.0)
    log_ratio, capped = _cap(tl.where(trained, log_ratio, 0.0), log_ratio_cap, DTYPE)
    log_probs = tl.where(trained, log_probs, 0.0)
    value, coefficient, clipped = _token_objective(
        log_probs, log_ratio, tl.exp(log_ratio), advantages, capped, log_low, log_high, OBJECTIVE
    )
    # A bound that is no number clips nothing: it must show.
    unbounded = (log_low != log_low) | (log_high != log_high)
    poison = tl.where(unbounded, float("nan"), 0.0)
    return value + poison, coefficient + poison, clipped


@triton.jit
def _add_sum(sums_ptr, which, value):
    tl.store(sums_ptr + which * tl.num_programs(0) + tl.program_id(0), value)


@triton.jit
def _part(sums_ptr, which, program, other=0.0):
    """One sum of a block of programs; `other` beyond the last."""
    programs = tl.num_programs(0)
    return tl.load(sums_ptr + which * programs + program, mask=program < programs, other=other)


@triton.jit
def _totals(
    sums_ptr,
    HAS_ENTROPY: tl.constexpr,
    HAS_REF: tl.constexpr,
    HAS_INFERENCE: tl.constexpr,
    MERGE: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """All sums over all programs, in one pass: no load waits for another but the last step's.

    ESS is (sum r)^2 / sum r^2 as a share of the trained tokens, from each program's own largest r.
    """
    lanes = tl.arange(0, MERGE)
    zero = tl.zeros([MERGE], DTYPE)
    objective, trained, valid, clipped, kl_approx = zero, zero, zero, zero, zero
    entropy, entropy_trained, kl_to_ref, kl_to_inference = zero, zero, zero, zero
    weights, squares = zero, zero
    largest = tl.full([MERGE], float("-inf"), DTYPE)
    for begin in range(0, tl.num_programs(0), MERGE):
        program = begin + lanes
        objective += _part(sums_ptr, _OBJECTIVE, program)
        trained += _part(sums_ptr, _TRAINED, program)
        valid += _part(sums_ptr, _VALID, program)
        clipped += _part(sums_ptr, _CLIPPED, program)
        kl_approx += _part(sums_ptr, _KL_APPROX, program)
        if HAS_ENTROPY:
            entropy += _part(sums_ptr, _ENTROPY, program)
            entropy_trained += _part(sums_ptr, _ENTROPY_TRAINED, program)
        if HAS_REF:
            kl_to_ref += _part(sums_ptr, _KL_TO_REF, program)
        if HAS_INFERENCE:
            kl_to_inference += _part(sums_ptr, _KL_TO_INFERENCE, program)
        own = _part(sums_ptr, _ESS_MAX, program, float("-inf"))
        top = tl.maximum(largest, own)
        base = tl.where(top == float("-inf"), 0.0, top)
        before, now = tl.exp(largest - base), tl.exp(own - base)
        weights = before * weights + now * _part(sums_ptr, _ESS_WEIGHTS, program)
        squares = before * before * squares + now * now * _part(sums_ptr, _ESS_SQUARES, program)
        largest = top
    base = tl.max(largest)
    scale = tl.exp(largest - tl.where(base == float("-inf"), 0.0, base))
    weight = tl.sum(scale * weights)
    square = tl.sum(scale * scale * squares)
    count = tl.sum(trained)
    # NaN <= 0 is false: a NaN log-ratio stays visible.
    ess = tl.where(square <= 0, 0.0, (weight / square) * (weight / count))
    return (
        tl.sum(objective),
        tl.sum(entropy_trained),
        tl.sum(kl_to_ref),
        tl.sum(kl_to_inference),
        count,
        tl.sum(valid),
        tl.sum(clipped),
        tl.sum(kl_approx),
        ess,
        tl.sum(entropy),
    )


@triton.jit
def _row_total(sums_ptr, which, rows, segments, inside, DTYPE: tl.constexpr):
    """One sum of a block of rows over their segments."""
    total = tl.zeros(rows.shape, DTYPE)
    for segment in range(segments):
        at = which * tl.num_programs(0) + rows * segments + segment
        total += tl.load(sums_ptr + at, mask=inside, other=0)
    return total


@triton.jit
def _filled_rows(sums_ptr, which, B, segments, MERGE: tl.constexpr, DTYPE: tl.constexpr):
    """How many rows have a token; at least 1."""
    lanes = tl.arange(0, MERGE)
    filled = tl.zeros([MERGE], DTYPE)
    for begin in range(0, B, MERGE):
        rows = begin + lanes
        count = _row_total(sums_ptr, which, rows, segments, rows < B, DTYPE)
        filled += tl.where(count > 0, 1.0, 0.0).to(DTYPE)
    return tl.maximum(tl.sum(filled), 1)


@triton.jit
def _denominator(
    sums_ptr,
    which,
    tokens,
    B,
    segments,
    normaliser,
    AGGREGATION: tl.constexpr,
    TORCHRL: tl.constexpr,
    MERGE: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """What every row's weight is divided by: tokens, or sequences, or the caller's normaliser."""
    if AGGREGATION == "none":
        denominator = tl.full([], 1, DTYPE)
    elif normaliser is not None:
        denominator = _number(normaliser, DTYPE)
    elif AGGREGATION == "token_mean":
        denominator = tl.maximum(tokens, 1)
    elif TORCHRL:
        denominator = B.to(DTYPE)
    else:
        denominator = _filled_rows(sums_ptr, which, B, segments, MERGE, DTYPE)
    return denominator


@triton.jit
def _merge(
    losses,
    metrics,
    saved_ptr,
    sums_ptr,
    B,
    T,
    segments,
    kl_to_ref_coeff,
    kl_to_inference_coeff,
    entropy_coeff,
    normaliser,
    AGGREGATION: tl.constexpr,
    TORCHRL: tl.constexpr,
    MERGE: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Row weights, losses and metrics from the sums of all programs, by one program."""
    objective_ptr, loss_to_ref_ptr, loss_to_inference_ptr, loss_entropy_ptr = losses
    clip_fraction_ptr, kl_approx_ptr, ess_ptr, entropy_ptr, to_ref_ptr, to_inference_ptr = metrics
    HAS_ENTROPY: tl.constexpr = entropy_ptr is not None
    HAS_REF: tl.constexpr = to_ref_ptr is not None
    HAS_INFERENCE: tl.constexpr = to_inference_ptr is not None
    totals = _totals(sums_ptr, HAS_ENTROPY, HAS_REF, HAS_INFERENCE, MERGE, DTYPE)
    objective, entropy_trained, to_ref, to_inference, trained, valid = totals[:6]
    clipped, approx, ess, entropy = totals[6:]
    positions = B.to(DTYPE) * T
    mean_over = positions if TORCHRL else tl.maximum(valid, 1)
    tl.store(clip_fraction_ptr, clipped / mean_over)
    tl.store(kl_approx_ptr, approx / mean_over)
    tl.store(ess_ptr, ess)
    if HAS_ENTROPY:
        tl.store(entropy_ptr, entropy / mean_over)
    if HAS_REF:
        tl.store(to_ref_ptr, to_ref / mean_over)
    if HAS_INFERENCE:
        tl.store(to_inference_ptr, to_inference / mean_over)

    weight = 1 / _denominator(
        sums_ptr, _TRAINED, trained, B, segments, normaliser, AGGREGATION, TORCHRL, MERGE, DTYPE
    )
    if TORCHRL:
        kl_weight = 1 / positions
    else:
        kl_weight = 1 / _denominator(
            sums_ptr, _VALID, valid, B, segments, normaliser, AGGREGATION, TORCHRL, MERGE, DTYPE
        )
    BY_ROW: tl.constexpr = AGGREGATION == "prompt_mean"
    KL_BY_ROW: tl.constexpr = BY_ROW and not TORCHRL
    lanes = tl.arange(0, MERGE)
    zero = tl.zeros([MERGE], DTYPE)
    objectives, entropies, kls_to_ref, kls_to_inference = zero, zero, zero, zero
    for begin in range(0, B, MERGE):
        rows = begin + lanes
        inside = rows < B
        row_weight, row_kl_weight = zero + weight, zero + kl_weight
        if BY_ROW:
            tokens = _row_total(sums_ptr, _TRAINED, rows, segments, inside, DTYPE)
            row_weight /= tl.maximum(tokens, 1)
            total = _row_total(sums_ptr, _OBJECTIVE, rows, segments, inside, DTYPE)
            objectives += row_weight * total
            if HAS_ENTROPY:
                total = _row_total(sums_ptr, _ENTROPY_TRAINED, rows, segments, inside, DTYPE)
                entropies += row_weight * total
        if KL_BY_ROW:
            tokens = _row_total(sums_ptr, _VALID, rows, segments, inside, DTYPE)
            row_kl_weight /= tl.maximum(tokens, 1)
            if HAS_REF:
                total = _row_total(sums_ptr, _KL_TO_REF, rows, segments, inside, DTYPE)
                kls_to_ref += row_kl_weight * total
            if HAS_INFERENCE:
                total = _row_total(sums_ptr, _KL_TO_INFERENCE, rows, segments, inside, DTYPE)
                kls_to_inference += row_kl_weight * total
        tl.store(saved_ptr + 2 * rows, row_weight, mask=inside)
        tl.store(saved_ptr + 2 * rows + 1, row_kl_weight, mask=inside)
    if BY_ROW:
        objective, entropy_trained = tl.sum(objectives), tl.sum(entropies)
    else:
        objective, entropy_trained = weight * objective, weight * entropy_trained
    if KL_BY_ROW:
        to_ref, to_inference = tl.sum(kls_to_ref), tl.sum(kls_to_inference)
    else:
        to_ref, to_inference = kl_weight * to_ref, kl_weight * to_inference
    if AGGREGATION != "none":
        tl.store(objective_ptr, objective)
        if loss_entropy_ptr is not None:
            tl.store(loss_entropy_ptr, -_number(entropy_coeff, DTYPE) * entropy_trained)
    if TORCHRL or AGGREGATION != "none":
        if loss_to_ref_ptr is not None:
            tl.store(loss_to_ref_ptr, _number(kl_to_ref_coeff, DTYPE) * to_ref)
        if loss_to_inference_ptr is not None:
            coeff = _number(kl_to_inference_coeff, DTYPE)
            tl.store(loss_to_inference_ptr, coeff * to_inference)


# Not specialised: a batch of one row would make B a constant without methods, and a batch whose
# size is not always a multiple of 16 would compile the kernel again.
@triton.jit(do_not_specialize=["B", "segments"])
def _forward_kernel(
    inputs,
    strides,
    clip_low,
    clip_high,
    kl_mask_threshold,
    log_ratio_cap,
    kl_to_ref_coeff,
    kl_to_inference_coeff,
    entropy_coeff,
    normaliser,
    losses,
    metrics,
    saved_ptr,
    sums_ptr,
    finished_ptr,
    B,
    T,
    segments,
    OBJECTIVE: tl.constexpr,
    AGGREGATION: tl.constexpr,
    TORCHRL: tl.constexpr,
    ENTROPY_OF_PADS: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
    MERGE: tl.constexpr,
):
    """Program (row, segment) sums its tokens; the last one to finish merges all sums."""
    program = tl.program_id(0)
    row = (program // segments).to(tl.int64)
    columns = (program % segments) * BLOCK + tl.arange(0, BLOCK)
    log_low = _log_bound(clip_low, -1, DTYPE)
    log_high = _log_bound(clip_high, 1, DTYPE)
    if program == 0:  # the backward's, whatever becomes of a scheduled bound until then
        tl.store(saved_ptr + 2 * B, log_low)
        tl.store(saved_ptr + 2 * B + 1, log_high)
    asked, valid, trained, log_probs, old_log_probs, log_ratio = _select_tokens(
        inputs, strides, row, columns, T, kl_mask_threshold, TORCHRL, DTYPE
    )
    value, _, clipped = _objective_of_block(
        inputs,
        strides,
        row,
        columns,
        T,
        trained,
        log_probs,
        log_ratio,
        log_low,
        log_high,
        log_ratio_cap,
        OBJECTIVE,
        DTYPE,
    )
    value = tl.where(trained, value, 0.0)
    if TORCHRL:  # a NaN ratio counts as outside
        outside = _out_of_range(log_ratio, log_low, log_high) | (log_ratio != log_ratio)
        outside = outside & valid
    else:
        outside = clipped & trained
    per_token = row * T + columns
    _add_sum(sums_ptr, _OBJECTIVE, tl.sum(value))
    _add_sum(sums_ptr, _TRAINED, tl.sum(trained.to(tl.int32)).to(DTYPE))
    _add_sum(sums_ptr, _VALID, tl.sum(valid.to(tl.int32)).to(DTYPE))
    _add_sum(sums_ptr, _CLIPPED, tl.sum(outside.to(tl.int32)).to(DTYPE))
    _add_sum(sums_ptr, _KL_APPROX, -tl.sum(log_ratio))
    if AGGREGATION == "none":
        tl.store(losses[0] + per_token, value, mask=columns < T)

    largest = tl.max(tl.where(trained, log_ratio, float("-inf")))
    base = tl.where(largest == float("-inf"), 0.0, largest)
    weights = tl.where(trained, tl.exp(tl.where(trained, log_ratio - base, 0.0)), 0.0)
    _add_sum(sums_ptr, _ESS_MAX, largest)
    _add_sum(sums_ptr, _ESS_WEIGHTS, tl.sum(weights))
    _add_sum(sums_ptr, _ESS_SQUARES, tl.sum(weights * weights))

    if inputs[5] is not None:
        entropy = _load(inputs[5], strides[5], row, columns, T, DTYPE)
        counted = tl.where(trained, entropy, 0.0)
        _add_sum(sums_ptr, _ENTROPY_TRAINED, tl.sum(counted))
        in_mean = asked if TORCHRL else valid  # asked: also a token without an old log-prob
        if ENTROPY_OF_PADS and TORCHRL:
            in_mean = in_mean | (entropy - entropy == 0.0)  # inf - inf is NaN
        _add_sum(sums_ptr, _ENTROPY, tl.sum(tl.where(in_mean, entropy, 0.0)))
        if AGGREGATION == "none" and losses[3] is not None:
            loss = counted * -_number(entropy_coeff, DTYPE)
            tl.store(losses[3] + per_token, loss, mask=columns < T)
    kl_mask = trained if TORCHRL else valid
    if inputs[4] is not None:
        target = _load(inputs[4], strides[4], row, columns, T, DTYPE)
        penalty = _kl_penalty(target, log_probs, kl_mask, log_ratio_cap, DTYPE)
        _add_sum(sums_ptr, _KL_TO_REF, tl.sum(penalty))
        if AGGREGATION == "none" and not TORCHRL and losses[1] is not None:
            loss = penalty * _number(kl_to_ref_coeff, DTYPE)
            tl.store(losses[1] + per_token, loss, mask=columns < T)
    if losses[2] is not None:
        penalty = _kl_penalty(old_log_probs, log_probs, kl_mask, log_ratio_cap, DTYPE)
        _add_sum(sums_ptr, _KL_TO_INFERENCE, tl.sum(penalty))
        if AGGREGATION == "none" and not TORCHRL:
            loss = penalty * _number(kl_to_inference_coeff, DTYPE)
            tl.store(losses[2] + per_token, loss, mask=columns < T)

    # Every thread's stores come before the count, and the count before the merge's loads.
    tl.debug_barrier()
    finished = tl.atomic_add(finished_ptr, 1, sem="acq_rel", scope="gpu")
    if finished == tl.num_programs(0) - 1:
        tl.debug_barrier()
        _merge(
            losses,
            metrics,
            saved_ptr,
            sums_ptr,
            B,
            T,
            segments,
            kl_to_ref_coeff,
            kl_to_inference_coeff,
            entropy_coeff,
            normaliser,
            AGGREGATION,
            TORCHRL,
            MERGE,
            DTYPE,
        )
        tl.store(finished_ptr, 0)


@triton.jit
def _upstream(gradient, strides, row, columns, T, DTYPE: tl.constexpr):
    """The upstream gradient of a loss term: one number, or one a token where strides are given."""
    if strides is None:
        scale = tl.load(gradient).to(DTYPE)
    else:
        scale = _load(gradient, strides, row, columns, T, DTYPE)
    return scale


@triton.jit
def _kl_gradient(
    scale, coeff, target_log_probs, log_probs, kl_mask, log_ratio_cap, DTYPE: tl.constexpr
):
    """By the target's log-prob; the negative is by the policy's."""
    log_ratio = tl.where(kl_mask, target_log_probs - log_probs, 0.0)
    log_ratio, capped = _cap(log_ratio, log_ratio_cap, DTYPE)
    gradient = scale * _number(coeff, DTYPE) * _expm1(log_ratio)
    return tl.where(kl_mask & (capped == 0), gradient, 0.0)


@triton.jit(do_not_specialize=["B", "segments"])
def _backward_kernel(
    upstream,
    upstream_strides,
    inputs,
    strides,
    kl_mask_threshold,
    log_ratio_cap,
    kl_to_ref_coeff,
    kl_to_inference_coeff,
    entropy_coeff,
    saved_ptr,
    gradients,
    B,
    T,
    segments,
    OBJECTIVE: tl.constexpr,
    TORCHRL: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gradients of the tokens of program (row, segment)."""
    program = tl.program_id(0)
    row = (program // segments).to(tl.int64)
    columns = (program % segments) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < T
    at = row * T + columns
    _, valid, trained, log_probs, old_log_probs, log_ratio = _select_tokens(
        inputs, strides, row, columns, T, kl_mask_threshold, TORCHRL, DTYPE
    )
    weight = tl.load(saved_ptr + 2 * row)
    kl_weight = tl.load(saved_ptr + 2 * row + 1)
    kl_mask = trained if TORCHRL else valid
    by_log_probs = tl.zeros([BLOCK], DTYPE)
    if upstream[0] is not None:
        log_low = tl.load(saved_ptr + 2 * B)
        log_high = tl.load(saved_ptr + 2 * B + 1)
        _, coefficient, _ = _objective_of_block(
            inputs,
            strides,
            row,
            columns,
            T,
            trained,
            log_probs,
            log_ratio,
            log_low,
            log_high,
            log_ratio_cap,
            OBJECTIVE,
            DTYPE,
        )
        scale = weight * _upstream(upstream[0], upstream_strides[0], row, columns, T, DTYPE)
        by_log_probs += tl.where(trained, scale * coefficient, 0.0)
    if upstream[1] is not None:
        target = _load(inputs[4], strides[4], row, columns, T, DTYPE)
        scale = kl_weight * _upstream(upstream[1], upstream_strides[1], row, columns, T, DTYPE)
        by_ref = _kl_gradient(
            scale, kl_to_ref_coeff, target, log_probs, kl_mask, log_ratio_cap, DTYPE
        )
        by_log_probs -= by_ref
        if gradients[1] is not None:
            tl.store(gradients[1] + at, by_ref, mask=inside)
    if upstream[2] is not None:
        scale = kl_weight * _upstream(upstream[2], upstream_strides[2], row, columns, T, DTYPE)
        by_log_probs -= _kl_gradient(
            scale, kl_to_inference_coeff, old_log_probs, log_probs, kl_mask, log_ratio_cap, DTYPE
        )
    if gradients[0] is not None:
        tl.store(gradients[0] + at, by_log_probs, mask=inside)
    if gradients[2] is not None:
        scale = weight * _upstream(upstream[3], upstream_strides[3], row, columns, T, DTYPE)
        by_entropy = -_number(entropy_coeff, DTYPE) * scale
        tl.store(gradients[2] + at, tl.where(trained, by_entropy, 0.0), mask=inside)


def _strides(tensor: Tensor | None) -> tuple[int, int] | None:
    return None if tensor is None else tensor.stride()


def _hyper_parameter(value: float | Tensor | None, like: Tensor) -> float | Tensor | None:
    """A scalar argument is fp32: fp64 takes its numbers by pointer."""
    if value is None or isinstance(value, Tensor):
        return value
    return (
        torch.full((), value, dtype=like.dtype, device=like.device)
        if (like.dtype == torch.float64)
        else float(value)
    )


_counters: dict[tuple[torch.device, int], Tensor] = {}


def _finished_counter(device: torch.device) -> Tensor:
    """A zero that the forward kernel leaves at zero; one a stream, since streams overlap."""
    if device.type == "cpu":
        return torch.zeros((), dtype=torch.int32)
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():  # the graph owns, and clears, its own
            return torch.zeros((), dtype=torch.int32, device=device)
        key = (device, torch.cuda.current_stream(device).cuda_stream)
    else:
        key = (device, torch.xpu.current_stream(device).sycl_queue)
    counter = _counters.get(key)
    if counter is None:
        counter = _counters[key] = torch.zeros((), dtype=torch.int32, device=device)
    return counter


def num_warps(block: int, hip: bool) -> int:
    """8 tokens a thread of BLOCK; a warp has 32 lanes, or 64 with HIP."""
    if block == SMALL_BLOCK:
        return 1
    return 2 if hip else 4


def _launch(log_probs: Tensor, options: PolicyLossOptions) -> tuple[int, int, dict]:
    """Programs, segments a row, and the constants of the forward and backward kernels."""
    rows, columns = log_probs.shape
    block = SMALL_BLOCK if columns <= SMALL_BLOCK else BLOCK
    segments = triton.cdiv(columns, block)
    constants = {
        "OBJECTIVE": options.token_objective,
        "TORCHRL": options.semantics == "torchrl",
        "DTYPE": tl.float64 if log_probs.dtype == torch.float64 else tl.float32,
        "BLOCK": block,
        "num_warps": num_warps(block, hip=torch.version.hip is not None),
    }
    if torch.version.cuda is not None:
        constants["maxnreg"] = MAX_REGISTERS[constants["DTYPE"]]
    return rows * segments, segments, constants


def forward(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor | None,
    ref_log_probs: Tensor | None,
    entropy: Tensor | None,
    options: PolicyLossOptions,
    counter: Tensor | None = None,
) -> tuple[PolicyLossOutput, Tensor]:
    """See eager.forward. `counter` is a zero to use instead of the stream's."""
    inputs = (log_probs, old_log_probs, advantages, mask, ref_log_probs, entropy)
    if log_probs.numel() == 0:
        return eager.forward(*inputs, options)
    rows, columns = log_probs.shape
    programs, segments, constants = _launch(log_probs, options)
    dtype = compute_dtype(log_probs)
    output = PolicyLossOutput(
        *[
            None if shape is None else log_probs.new_empty(shape, dtype=dtype)
            for shape in output_shapes(log_probs, ref_log_probs, entropy, options)
        ]
    )
    saved = log_probs.new_empty((rows + 1, 2), dtype=dtype)
    sums = log_probs.new_empty((_SUMS, programs), dtype=dtype)
    numbers = [
        _hyper_parameter(value, saved)
        for value in (
            options.clip_low,
            options.clip_high,
            options.kl_mask_threshold,
            options.log_ratio_cap,
            options.kl_to_ref_coeff,
            options.kl_to_inference_coeff,
            options.entropy_coeff,
            options.normaliser,
        )
    ]
    with on_device(log_probs):
        _forward_kernel[(programs,)](
            inputs,
            tuple(_strides(tensor) for tensor in inputs),
            *numbers,
            tuple(output[:4]),
            tuple(output[4:]),
            saved,
            sums,
            _finished_counter(log_probs.device) if counter is None else counter,
            rows,
            columns,
            segments,
            AGGREGATION=options.aggregation,
            ENTROPY_OF_PADS=options.entropy_of_pads,
            MERGE=MERGE[constants["BLOCK"]],
            **constants,
        )
    return output, saved


def forward_of_operator(log_probs: Tensor, *others) -> tuple[PolicyLossOutput, Tensor]:
    """`forward` that keeps no memory, at the cost of a fill: what a compiled graph allocates while
    it warms up lies in its CUDA graph's pool, which torch requires to hold outputs only.
    """
    return forward(log_probs, *others, counter=log_probs.new_zeros((), dtype=torch.int32))


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
    """See eager.backward."""
    inputs = (log_probs, old_log_probs, advantages, mask, ref_log_probs, entropy)
    if log_probs.numel() == 0:
        return eager.backward(upstream, *inputs, options, saved, wanted)

    def gradient_of(tensor: Tensor, wanted: bool) -> Tensor | None:
        return tensor.new_empty(tensor.shape) if wanted else None

    wants_log_probs, wants_ref, wants_entropy = wanted
    gradients = InputGradients(
        gradient_of(log_probs, wants_log_probs),
        gradient_of(ref_log_probs, wants_ref and upstream.kl_to_ref is not None),
        gradient_of(entropy, wants_entropy and upstream.entropy is not None),
    )
    programs, segments, constants = _launch(log_probs, options)
    numbers = [
        _hyper_parameter(value, saved)
        for value in (
            options.kl_mask_threshold,
            options.log_ratio_cap,
            options.kl_to_ref_coeff,
            options.kl_to_inference_coeff,
            options.entropy_coeff,
        )
    ]
    with on_device(log_probs):
        _backward_kernel[(programs,)](
            tuple(upstream),
            tuple(
                _strides(gradient) if gradient is not None and gradient.ndim == 2 else None
                for gradient in upstream
            ),
            inputs,
            tuple(_strides(tensor) for tensor in inputs),
            *numbers,
            saved,
            tuple(gradients),
            *log_probs.shape,
            segments,
            **constants,
        )
    return gradients
