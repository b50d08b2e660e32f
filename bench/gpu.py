"""Every check and timing that needs a GPU, within six minutes: bench/gpu.sh

Needs torch and triton only. Each section runs in a process of its own with a deadline: one that
fails, hangs or poisons the GPU is reported, and the rest goes on. Figures go to
$OUT/<gpu>.json (default bench/results), as bench.figures keeps them. Without a GPU, or with
--interpret, everything that can runs at tiny sizes on CPU tensors, where triton interprets the
kernels; nothing is asked of its timings then.

Timings are medians of CUDA events around one call, the L2 cache flushed before each, with the GPU
held busy until the call is enqueued, so that they are device time. An event pair around nothing
reads a few microseconds; these are not subtracted, but kept beside the small kernels.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from bench.figures import RESULTS, Figure, at_most, ratio, save

TOTAL_SECONDS = 350
# In this order: what matters most first, should time run out.
DEADLINES = {
    "verify": 120,
    "checks": 60,
    "policy_loss": 50,
    "token_log_probs": 60,
    "linear_log_probs": 50,
    "memcheck": 50,
    "racecheck": 50,
}
GPU = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET", "0") in ("", "0")
DEVICE = "cuda" if GPU else "cpu"


# Operations as plain calls: outputs that are differentiable, and what by


def policy_inputs(
    rows: int, columns: int, device: str = DEVICE, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """A batch with every optional input."""
    generator = torch.Generator(device).manual_seed(rows + columns)

    def normal(scale: float) -> Tensor:
        made = torch.randn(rows, columns, generator=generator, device=device)
        return (scale * made).to(dtype)

    current = normal(1) - 2
    return {
        "log_probs": current.requires_grad_(),
        "old_log_probs": current.detach() + normal(0.2),
        "advantages": normal(1)[:, :1],
        "mask": torch.rand(rows, columns, generator=generator, device=device) > 0.1,
        "ref_log_probs": current.detach() + normal(0.2),
        "entropy": normal(1).abs().requires_grad_(),
    }


def policy_call(inputs: dict[str, Tensor], **options) -> tuple[list[Tensor], list[Tensor]]:
    """All losses and metrics; what the losses are differentiable by."""
    from grpo_kernels import policy_loss

    everything = {
        "kl_mask_threshold": 0.5,
        "kl_to_ref_coeff": 0.1,
        "kl_to_inference_coeff": 0.2,
        "entropy_coeff": 0.01,
    }
    out = policy_loss(**inputs, **everything, **options, backend="triton")
    return list(out), [inputs["log_probs"], inputs["entropy"]]


def token_inputs(
    rows: int, vocab: int, dtype: torch.dtype = torch.float32, device: str = DEVICE
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(device).manual_seed(vocab)
    logits = torch.empty(rows, vocab, dtype=dtype, device=device)
    logits.normal_(0, 3, generator=generator)
    tokens = torch.randint(0, vocab, (rows,), generator=generator, device=device)
    return logits.requires_grad_(), tokens


def token_call(logits: Tensor, tokens: Tensor, **options) -> tuple[list[Tensor], list[Tensor]]:
    from grpo_kernels import token_log_probs

    return list(token_log_probs(logits, tokens, **options, backend="triton")), [logits]


def linear_inputs(
    rows: int, width: int, vocab: int, dtype: torch.dtype = torch.float32, device: str = DEVICE
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator(device).manual_seed(vocab)
    hidden, weight = (
        torch.empty(size, width, dtype=dtype, device=device).normal_(0, 1, generator=generator)
        for size in (rows, vocab)
    )
    weight *= width**-0.5
    tokens = torch.randint(0, vocab, (rows,), generator=generator, device=device)
    return hidden.requires_grad_(), weight.requires_grad_(), tokens


def linear_call(
    hidden: Tensor, weight: Tensor, tokens: Tensor, **options
) -> tuple[list[Tensor], list[Tensor]]:
    from grpo_kernels import linear_log_probs

    out = linear_log_probs(hidden, weight, tokens, **options, backend="triton")
    return list(out), [hidden, weight]


def gradients(outputs: list[Tensor], by: list[Tensor], retain: bool = False) -> list[Tensor]:
    """By the differentiable outputs, with an upstream gradient that is not 1."""
    outputs = [output for output in outputs if output.requires_grad]
    upstream = [torch.full_like(output, 0.5) for output in outputs]
    return list(torch.autograd.grad(outputs, by, upstream, retain_graph=retain))


def small_calls() -> dict[str, Callable[[], tuple[list[Tensor], list[Tensor]]]]:
    """Every operation at sizes that take each path: one block, several; split rows, whole ones."""
    calls = {}
    kinds = [(o, s) for o in ("grpo", "cispo") for s in ("torchrl", "corrected")]
    for rows, columns in (3, 5), (4, 1025) if GPU else (1, 129):
        inputs = policy_inputs(rows, columns)
        for objective, semantics in kinds if GPU else kinds[::3]:
            name = f"policy_loss {objective} {semantics} {rows}x{columns}"
            options = {"objective": objective, "semantics": semantics}
            options["aggregation"] = "none" if columns == 5 else "prompt_mean"
            calls[name] = lambda inputs=inputs, o=options: policy_call(inputs, **o)
    for rows, vocab in (3, 4099), (600, 1025) if GPU else (2, 9):
        made = token_inputs(rows, vocab, torch.bfloat16)
        calls[f"token_log_probs {rows}x{vocab}"] = lambda made=made: token_call(*made)
    rows, vocab = (70, 1031) if GPU else (3, 37)
    made = linear_inputs(rows, 32, vocab, torch.bfloat16 if GPU else torch.float32)
    calls[f"linear_log_probs {rows}x32"] = lambda made=made: linear_call(*made)
    return calls


def synchronise() -> None:
    if GPU:
        torch.cuda.synchronize()


# Checks: each yields nothing and raises AssertionError, or returns a reason for not running


def all_of(call: Callable[[], tuple[list[Tensor], list[Tensor]]]) -> list[Tensor]:
    outputs, by = call()
    return [*[output.detach() for output in outputs], *gradients(outputs, by)]


def assert_same(name: str, got: list[Tensor], want: list[Tensor]) -> None:
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert torch.equal(a, b), f"{name}: tensor {i} differs by {(a - b).abs().max().item():.3g}"


def check_twice_equal() -> None:
    """The same call gives the same bits, whatever ran between."""
    calls = small_calls()
    first = {name: all_of(call) for name, call in calls.items()}
    for name, call in reversed(calls.items()):
        assert_same(name, all_of(call), first[name])


def check_no_synchronisation() -> None:
    """Nothing in forward or backward waits for the device."""
    for name, call in small_calls().items():
        all_of(call)  # compiles
        synchronise()
        if GPU:
            torch.cuda.set_sync_debug_mode("error")
        try:
            all_of(call)
        except RuntimeError as error:
            raise AssertionError(f"{name}: {error}") from error
        finally:
            if GPU:
                torch.cuda.set_sync_debug_mode("default")


def check_cuda_graph() -> str | None:
    """Forward and backward captured once give, replayed on new data, what a call gives."""
    for name, call in small_calls().items():
        before = all_of(call)
        if not GPU:
            continue
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            all_of(call)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = all_of(call)
        _, by = call()
        for turn in range(3):
            with torch.no_grad():
                by[0].copy_(by[0].roll(1, 0) if turn else by[0])
            graph.replay()
            want = all_of(call)  # between replays: the captured and the usual counter are apart
            synchronise()
            assert_same(f"{name}, replay {turn}", captured, want)
            if turn == 0:
                assert_same(f"{name}, first replay", captured, before)
        del graph, captured
    return None if GPU else "without a GPU: calls only, no capture"


def check_streams() -> str | None:
    """Calls that overlap on two streams do not disturb each other."""
    inputs = [policy_inputs(64 if GPU else 1, 2048 if GPU else 130) for _ in range(2)]
    want = [all_of(lambda i=i: policy_call(i)) for i in inputs]
    if not GPU:
        return "without a GPU: one after the other"
    streams = [torch.cuda.Stream() for _ in inputs]
    synchronise()
    for _ in range(20):
        got = []
        for stream, batch in zip(streams, inputs, strict=True):
            with torch.cuda.stream(stream):
                got.append(all_of(lambda batch=batch: policy_call(batch)))
        synchronise()
        for a, b in zip(got, want, strict=True):
            assert_same("policy_loss on two streams", a, b)
    return None


def check_other_device() -> str | None:
    """Tensors on a GPU that is not the current one."""
    if not GPU or torch.cuda.device_count() < 2:
        return "needs two GPUs"
    with torch.cuda.device(1):
        want = [
            all_of(lambda: policy_call(policy_inputs(4, 300, "cuda:1"))),
            all_of(lambda: token_call(*token_inputs(3, 4099, device="cuda:1"))),
        ]
    got = [
        all_of(lambda: policy_call(policy_inputs(4, 300, "cuda:1"))),
        all_of(lambda: token_call(*token_inputs(3, 4099, device="cuda:1"))),
    ]
    for a, b in zip(got, want, strict=True):
        assert_same("on cuda:1", a, b)
    return None


def beyond_int32() -> int:
    """Elements that 31 bits do not count; few where the kernels are interpreted."""
    return 2**31 if GPU else 2**10


def lacking(gib: float) -> str | None:
    if GPU and torch.cuda.mem_get_info()[0] < gib * 2**30:
        return f"needs {gib:g} GiB of free GPU memory"
    return None


def check_large_logits() -> str | None:
    """The last rows of logits with more than 2**31 elements, against the same rows alone."""
    if reason := lacking(16):
        return reason
    vocab = 151_937 if GPU else 513
    rows, last = beyond_int32() // vocab + 9, 4
    logits, tokens = token_inputs(rows, vocab, torch.bfloat16)
    outputs, by = token_call(logits, tokens)
    (grad,) = gradients(outputs, by)
    exact = logits.detach()[-last:].double().requires_grad_()
    log_p = torch.log_softmax(exact, -1)
    want = [log_p.gather(-1, tokens[-last:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)]
    (want_grad,) = gradients(want, [exact])
    for got, right in zip(outputs, want, strict=True):
        assert (got[-last:] - right).abs().max().item() < 2e-4, "scores of the last rows"
    difference = (grad[-last:] - want_grad).abs()
    assert (difference <= 0.01 * want_grad.abs() + 1e-7).all(), "gradient of the last rows"
    return None


def check_large_batch() -> str | None:
    """policy_loss over more than 2**31 tokens, and rows that lie more than 2**31 apart."""
    if reason := lacking(24):
        return reason
    from grpo_kernels import policy_loss

    columns = 8192 if GPU else 64
    rows = beyond_int32() // columns + 3
    shape = (rows, columns)
    log_probs = torch.empty(shape, dtype=torch.bfloat16, device=DEVICE).normal_(-2, 0.1)
    log_probs.requires_grad_()
    old = torch.full((1, 1), -2.0, device=DEVICE).expand(shape)
    advantages = torch.linspace(-1, 1, rows, device=DEVICE)
    out = policy_loss(log_probs, old, advantages, aggregation="prompt_mean", backend="triton")
    (grad,) = torch.autograd.grad(out.loss_objective, log_probs, torch.full_like(out[0], 1e6))
    for row in (0, 1, rows - 1):
        one = log_probs.detach()[row].double().requires_grad_()
        ratio_ = (one + 2).exp()
        value = -torch.minimum(ratio_ * advantages[row], ratio_.clamp(0.8, 1.2) * advantages[row])
        (want,) = torch.autograd.grad(value.mean() / rows * 1e6, one)
        close = (grad[row] - want).abs() <= 0.02 * want.abs() + 1e-9
        assert close.all(), f"gradient of row {row} of {rows}"
    del grad, log_probs, out

    apart = beyond_int32() // 2 + 64  # elements from one row to the next, of 4 rows
    wide = torch.empty(3 * apart + 70, dtype=torch.bfloat16, device=DEVICE)
    far = wide.as_strided((4, 70), (apart, 1))
    near = torch.randn(4, 70, device=DEVICE).to(torch.bfloat16)
    far.copy_(near)
    old = torch.zeros(4, 70, device=DEVICE)
    results = []
    for value in (far, near):
        leaf = value.detach().requires_grad_()
        loss = policy_loss(leaf, old, torch.ones(4, device=DEVICE), backend="triton")
        results.append([*loss[:1], *loss[4:7], *torch.autograd.grad(loss.loss_objective, leaf)])
    for got, want in zip(*results, strict=True):  # the order of a sum may follow the alignment
        assert torch.allclose(got, want, rtol=1e-5, atol=1e-6), "rows far apart"
    return None


CHECKS: dict[str, Callable[[], str | None]] = {
    "the same call twice gives the same bits": check_twice_equal,
    "no synchronisation": check_no_synchronisation,
    "CUDA graph capture and replay": check_cuda_graph,
    "two streams at once": check_streams,
    "a GPU that is not the current one": check_other_device,
    "logits beyond 2**31 elements": check_large_logits,
    "tokens and strides beyond 2**31": check_large_batch,
}


# Measuring


def median_us(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median microseconds of device time of each call, cold L2, the calls taking turns."""
    rounds = rounds if GPU else 1
    for call in calls.values():
        for _ in range(2 if GPU else 1):
            call()
    synchronise()
    times: dict[str, list[float]] = {name: [] for name in calls}
    if not GPU:
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append((time.perf_counter() - start) * 1e6)
        return {name: taken[0] for name, taken in times.items()}
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    flush = torch.empty(max(4 * cache, 2**27), dtype=torch.int8, device="cuda")
    for _ in range(rounds):
        for name, call in calls.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.zero_()
            torch.cuda._sleep(1_000_000)  # half a millisecond: the call is enqueued meanwhile
            begin.record()
            result = call()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) * 1e3)
            del result
    return {name: statistics.median(taken) for name, taken in times.items()}


def launches(call: Callable[[], object]) -> tuple[float, float]:
    """Kernels, copies and fills that one call puts on the GPU, and their device microseconds."""
    if not GPU:
        return float("nan"), float("nan")
    from torch.profiler import ProfilerActivity, profile

    call()
    synchronise()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        call()
        synchronise()
    on_gpu = [
        event for event in profiled.events() if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    return len(on_gpu), sum(event.time_range.elapsed_us() for event in on_gpu)


def copy_gb_per_s() -> float:
    """Bytes read and written a second by a copy too large for any cache."""
    source = torch.empty(2**30 if GPU else 2**16, dtype=torch.int8, device=DEVICE)
    target = torch.empty_like(source)
    (us,) = median_us({"copy": lambda: target.copy_(source)}, 9).values()
    return 2 * source.numel() / us / 1e3


def percent_of_copy(bytes_moved: float, us: float, copy: float) -> float:
    return 100 * bytes_moved / us / 1e3 / copy


def liger() -> Callable | None:
    """Liger's triton_grpo_loss where it is installed and imports."""
    if not GPU:
        return None
    try:
        from liger_kernel.transformers.grpo_loss import triton_grpo_loss
    except Exception as error:
        print(f"liger_kernel is left out: {type(error).__name__}: {error}", flush=True)
        return None
    return triton_grpo_loss


def attempt(calls: dict[str, Callable[[], object]], name: str, call: Callable[[], object]) -> None:
    """Add a peer's call if it runs at all: a peer that fails must not cost ours its figures."""
    try:
        call()
        synchronise()
    except Exception as error:
        print(f"{name} is left out: {type(error).__name__}: {str(error)[:200]}", flush=True)
        return
    calls[name] = call


def bench_policy_loss() -> Iterator[Figure]:
    from bench.policy_loss import compiled_formula, formula

    rows, columns = (256, 4096) if GPU else (2, 33)
    inputs = policy_inputs(rows, columns)
    case = f"policy_loss, all terms, {rows}x{columns} fp32"
    outputs, by = policy_call(inputs)

    def formula_losses(function: Callable) -> Tensor:
        return function(*inputs.values())[0]

    losses = [output for output in outputs if output.requires_grad]
    upstream = [torch.ones_like(loss) for loss in losses]

    def backward() -> object:
        return torch.autograd.grad(losses, by, upstream, retain_graph=True)

    def both() -> object:
        outputs, by = policy_call(inputs)
        losses = [output for output in outputs if output.requires_grad]
        return torch.autograd.grad(losses, by, upstream)

    forward_launches, forward_kernel_us = launches(lambda: policy_call(inputs))
    backward_launches, backward_kernel_us = launches(backward)
    yield at_most(case, "launches forward", forward_launches, 1, {"kernel us": forward_kernel_us})
    yield at_most(
        case, "launches backward", backward_launches, 1, {"kernel us": backward_kernel_us}
    )
    copy = copy_gb_per_s()
    calls = {
        "nothing": lambda: None,
        "forward": lambda: policy_call(inputs),
        "backward": backward,
        "forward and backward": both,
        "eager": lambda: torch.autograd.grad(formula_losses(formula), by),
    }
    if GPU:
        attempt(
            calls,
            "torch.compile",
            lambda: torch.autograd.grad(formula_losses(compiled_formula), by),
        )
    us = median_us(calls, 101)
    token = 4 * 4 + 1  # four fp32 inputs and the mask
    for name, moved, asked in (("forward", token, 20), ("backward", token - 4 + 8, 20)):
        yield at_most(case, f"us {name}", us[name], asked, us)
        percent = percent_of_copy(moved * rows * columns, us[name], copy)
        yield Figure(case, f"% of copy bandwidth, {name}", percent, None, True, {"GB/s": copy})
    for peer, asked in (("torch.compile", 1.5), ("eager", None)):
        if peer in us:
            yield ratio(case, f"faster than {peer}", us, peer, "forward and backward", asked)


def token_formula(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """What a user writes without a kernel."""
    log_p = torch.log_softmax(logits.float(), -1)
    return log_p.gather(-1, tokens.unsqueeze(-1)).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


def bench_token_log_probs() -> Iterator[Figure]:
    rows = 8192 if GPU else 2
    vocabularies = (151_936, 151_937) if GPU else (40, 41)
    copy = copy_gb_per_s()
    per_byte: dict[str, float] = {}
    for vocab in vocabularies:
        logits, tokens = token_inputs(rows, vocab, torch.bfloat16)
        upstream = [torch.ones(rows, device=DEVICE)] * 2
        case = f"token_log_probs, {rows}x{vocab} bf16"
        first = vocab == vocabularies[0]

        def both(function: Callable, logits=logits, tokens=tokens, upstream=upstream) -> object:
            return torch.autograd.grad(function(logits, tokens), logits, upstream)

        def ours(logits: Tensor, tokens: Tensor) -> list[Tensor]:
            return token_call(logits, tokens)[0]

        calls = {
            "forward": lambda logits=logits, tokens=tokens: token_call(logits, tokens),
            "forward and backward": lambda: both(ours),
        }
        if first and GPU:
            compiled = torch.compile(token_formula)
            attempt(calls, "torch.compile", lambda compiled=compiled: both(compiled))
        us = median_us(calls, 15)
        read = logits.numel() * logits.element_size()
        for name, asked, passes in (("forward", 0.65, 1), ("forward and backward", 1.9, 3)):
            yield at_most(case, f"ms {name}", us[name] / 1e3, asked, us)
            percent = percent_of_copy(passes * read, us[name], copy)
            yield Figure(case, f"% of copy bandwidth, {name}", percent, None, True, {"GB/s": copy})
            per_byte[f"{name} {vocab}"] = us[name] / read
        if "torch.compile" in us:
            fast = "forward and backward"
            yield ratio(case, "faster than torch.compile", us, "torch.compile", fast, 1.5)
        del logits, tokens, calls
    for name in ("forward", "forward and backward"):
        odd, even = (per_byte[f"{name} {vocab}"] for vocab in reversed(vocabularies))
        yield at_most(
            f"token_log_probs, V={vocabularies[1]} against V={vocabularies[0]}",
            f"time a byte, {name}",
            odd / even,
            1.05,
            {"odd us/MB": odd * 1e6, "even us/MB": even * 1e6},
        )
    yield from bench_grpo_from_logits()


def bench_grpo_from_logits() -> Iterator[Figure]:
    """The whole loss from logits beside Liger's, which has no entropy and fewer metrics."""
    from grpo_kernels import policy_loss, token_log_probs

    peer = liger()
    if peer is None:
        return
    rows, columns, vocab = 8, 1024, 151_936
    logits, _ = token_inputs(rows * (columns + 1), vocab, torch.bfloat16)
    logits = logits.detach().view(rows, columns + 1, vocab).requires_grad_()
    tokens = torch.randint(0, vocab, (rows, columns), device=DEVICE)
    old = torch.full((rows, columns), -12.0, device=DEVICE)
    advantages = torch.randn(rows, device=DEVICE)
    mask = torch.ones(rows, columns, dtype=torch.bool, device=DEVICE)

    def ours() -> object:
        log_probs, entropy = token_log_probs(logits[:, :-1], tokens, backend="triton")
        out = policy_loss(
            log_probs,
            old,
            advantages,
            mask,
            ref_log_probs=old,
            entropy=entropy,
            kl_to_ref_coeff=0.04,
            entropy_coeff=0.01,
            backend="triton",
        )
        losses = [out.loss_objective, out.loss_kl_to_ref, out.loss_entropy]
        return torch.autograd.grad(losses, logits)

    def theirs() -> object:
        out = peer(
            logits, old, old, tokens, advantages, mask.int(), 1.0, 0.04, 0.2, 0.2, inplace=False
        )
        loss = out[0] if isinstance(out, tuple) else out
        return torch.autograd.grad(loss.float().sum(), logits)

    calls: dict[str, Callable[[], object]] = {"ours": ours}
    attempt(calls, "liger", theirs)
    if "liger" not in calls:
        return
    us = median_us(calls, 11)
    case = f"loss from logits, {rows}x{columns}x{vocab} bf16"
    yield ratio(case, "faster than Liger's triton_grpo_loss", us, "liger", "ours", 1.1)


def bench_linear_log_probs() -> Iterator[Figure]:
    rows, width, vocab = (8192, 4096, 131_072) if GPU else (5, 16, 40)
    dtype = torch.bfloat16 if GPU else torch.float32
    hidden, weight, tokens = linear_inputs(rows, width, vocab, dtype)
    upstream = [torch.ones(rows, device=DEVICE)] * 2
    bare_hidden, bare_weight = hidden.detach(), weight.detach()
    logits = torch.empty(rows, vocab, dtype=dtype, device=DEVICE)

    def both() -> object:
        outputs, by = linear_call(hidden, weight, tokens)
        return torch.autograd.grad(outputs, by, upstream)

    def four_matmuls() -> object:
        """Logits twice, and the gradients of hidden and weight."""
        for _ in range(2):
            torch.mm(bare_hidden, bare_weight.t(), out=logits)
        return torch.mm(logits, bare_weight), torch.mm(logits.t(), bare_hidden)

    side = 8192 if GPU else 64
    square = torch.randn(side, side, device=DEVICE).to(dtype)
    calls = {
        "ours": both,
        "four matmuls": four_matmuls,
        "one square matmul": lambda: torch.mm(square, square),
    }
    us = median_us(calls, 5)
    case = f"linear_log_probs, {rows} x H {width} x V {vocab}"
    matmuls = us["ours"] / us["four matmuls"]
    yield at_most(case, "time of four bare matmuls", matmuls, 1.3, us)
    rate = 2 * side**3 / us["one square matmul"] / 1e6
    achieved = 8 * rows * width * vocab / us["ours"] / 1e6
    percent = 100 * achieved / rate
    yield Figure(case, "% of measured matmul rate", percent, None, True, {"TFLOP/s": rate})
    if GPU:
        torch.cuda.reset_peak_memory_stats()
        del logits, square, calls
        before = torch.cuda.memory_allocated()
        result = both()
        extra = (torch.cuda.max_memory_allocated() - before) / 2**20
        del result
        whole = rows * vocab * hidden.element_size() / 2**20
        detail = {"MiB": extra, "logits MiB": whole}
        yield at_most(case, "peak memory over the logits'", extra / whole, None, detail)


BENCHES = {
    "policy_loss": bench_policy_loss,
    "token_log_probs": bench_token_log_probs,
    "linear_log_probs": bench_linear_log_probs,
}


# Sections, each in a process of its own


def section(name: str, keep: Path) -> int:
    """Run one section here; figures go to `keep`, a line each, as they come."""
    if name == "checks":
        failed = 0
        for claim, check in CHECKS.items():
            try:
                reason = check()
                print(f"ok    {claim}" + (f" ({reason})" if reason else ""), flush=True)
            except Exception as error:
                failed += 1
                print(f"FAIL  {claim}: {type(error).__name__}: {error}", flush=True)
                if not isinstance(error, AssertionError):
                    traceback.print_exc()
            if GPU:
                torch.cuda.empty_cache()
        return min(failed, 1)
    if name in ("memcheck", "racecheck"):  # under the sanitizer, or interpreted
        for call in small_calls().values():
            all_of(call)
        synchronise()
        print("all small calls ran")
        return 0
    missed = 0
    with keep.open("a") as lines:
        for figure in BENCHES[name]():
            if not GPU:
                figure.asked = None
            missed += not figure.holds
            print(figure, flush=True)
            lines.write(json.dumps(asdict(figure)) + "\n")
            lines.flush()
    if missed:
        print(f"{missed} of the targets are not met")
    return 0


def command(name: str, keep: Path) -> list[str] | str:
    """The command of a section, or why there is none."""
    if name == "verify":
        verify = [sys.executable, "-m", "grpo_kernels.verify"]
        return [*verify, "--device", "cuda"] if GPU else [*verify, "--backend", "triton"]
    own = [sys.executable, "-m", "bench.gpu", "--section", name, "--keep", str(keep)]
    if name not in ("memcheck", "racecheck") or not GPU:
        return own
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    tool = shutil.which("compute-sanitizer") or shutil.which(f"{home}/bin/compute-sanitizer")
    if tool is None:
        return "compute-sanitizer is not installed"
    return [tool, "--tool", name, "--target-processes", "application-only",
            "--error-exitcode", "9", *own]  # fmt: skip


def run_section(name: str, keep: Path, seconds: float, environment: dict[str, str]) -> str:
    """Run a section and say how it went: "ok", "skipped: ..." or "FAILED: ..."."""
    print(f"\n== {name}", flush=True)
    if seconds < 5:
        return "FAILED: no time was left"
    arguments = command(name, keep)
    if isinstance(arguments, str):
        return f"skipped: {arguments}"
    if name == "memcheck" and GPU:  # so that each tensor has bounds of its own
        environment = {**environment, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    process = subprocess.Popen(
        arguments,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # its workers too
        output, _ = process.communicate()
        print(output[-6000:], flush=True)
        return f"FAILED: longer than {seconds:.0f} s"
    except BaseException:  # interrupted: leave nothing on the GPU
        os.killpg(process.pid, signal.SIGKILL)
        raise
    print(output[-6000:], flush=True)
    if process.returncode == 0:
        return "ok"
    sanitized = name in ("memcheck", "racecheck") and GPU
    if sanitized and process.returncode != 9 and "all small calls ran" in output:
        return f"skipped: the tool does not work here (exit status {process.returncode})"
    return f"FAILED: exit status {process.returncode}"


def machine() -> str:
    if not GPU:
        return "no GPU: interpreted, at tiny sizes"
    properties = torch.cuda.get_device_properties(0)
    return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"


def main() -> int:
    """0 if every section that could run did, and passed."""
    parser = argparse.ArgumentParser(prog="bench/gpu.sh", description=__doc__)
    parser.add_argument("--interpret", action="store_true", help="as without a GPU")
    parser.add_argument("--only", nargs="+", choices=DEADLINES, help="these sections")
    parser.add_argument("--section", choices=DEADLINES, help=argparse.SUPPRESS)
    parser.add_argument("--keep", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.section:
        return section(arguments.section, arguments.keep)

    environment = dict(os.environ)
    interpret = arguments.interpret or not GPU
    if interpret and "TRITON_INTERPRET" not in environment:
        # Before triton is imported, and for the figures of this process too.
        environment["TRITON_INTERPRET"] = "1"
        os.execve(sys.executable, [sys.executable, "-m", "bench.gpu", *sys.argv[1:]], environment)
    try:
        import triton

        print(f"torch {torch.__version__}, triton {triton.__version__}, {machine()}", flush=True)
    except ImportError as error:
        print(f"triton does not import: {error}")
        return 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    outcome: dict[str, str] = {}
    suites: dict[str, list[Figure]] = {}
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.only or DEADLINES:
            keep = Path(folder) / name
            left = TOTAL_SECONDS - (time.monotonic() - start)
            allowed = min(DEADLINES[name], left) if GPU else 600
            began = time.monotonic()
            outcome[name] = run_section(name, keep, allowed, environment)
            outcome[name] += f" ({time.monotonic() - began:.0f} s)"
            if keep.exists():
                lines = keep.read_text().splitlines()
                suites[f"gpu {name}"] = [Figure(**json.loads(line)) for line in lines]
    default = RESULTS if GPU else None  # interpreted timings are no results
    out = Path(os.environ["OUT"]) if os.environ.get("OUT") else default
    if out is not None and suites:
        print(f"\nkept in {save(suites, out)}")
    print("\n== summary")
    for figures in suites.values():
        for figure in figures:
            print(str(figure).splitlines()[0])
    for name, how in outcome.items():
        print(f"{name:18} {how}")
    return int(any(how.startswith("FAILED") for how in outcome.values()))


if __name__ == "__main__":
    sys.exit(main())
