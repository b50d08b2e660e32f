"""Device time beside torch.compile, peers and the bandwidth of a copy.

Medians of CUDA events around one call, the L2 cache flushed before each, with the GPU held busy
until the call is enqueued, so that they are device time. An event pair around nothing reads a few
microseconds; these are not subtracted, but kept beside the small kernels.
"""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from bench import formulas
from bench.device import DEVICE, GPU, synchronise
from bench.gpu.calls import linear_call, policy_call, token_call
from bench.inputs import linear_inputs, policy_inputs, token_inputs
from bench.results import Figure, at_most, ratio


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
            torch.cuda._sleep(5_000_000)  # some 2.5 ms: the call is enqueued meanwhile
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


def host_us(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median microseconds until each call returns, the GPU idle before it."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds if GPU else 1):
        for name, call in calls.items():
            synchronise()
            start = time.perf_counter()
            call()
            times[name].append((time.perf_counter() - start) * 1e6)
    return {name: statistics.median(taken) for name, taken in times.items()}


def peer(module: str, function: str) -> Callable | None:
    """Another library's kernel where it is installed and imports."""
    if not GPU:
        return None
    try:
        return getattr(importlib.import_module(module), function)
    except Exception as error:
        print(f"{module} is left out: {type(error).__name__}: {error}", flush=True)
        return None


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
        "eager": lambda: torch.autograd.grad(formula_losses(formulas.policy_loss), by),
    }
    if GPU:
        compiled = formulas.compiled(formulas.policy_loss)
        attempt(calls, "torch.compile", lambda: torch.autograd.grad(formula_losses(compiled), by))
    us = median_us(calls, 101)
    token = 4 * 4 + 1  # four fp32 inputs and the mask
    for name, moved, asked in (("forward", token, 20), ("backward", token - 4 + 8, 20)):
        yield at_most(case, f"us {name}", us[name], asked, us)
        percent = percent_of_copy(moved * rows * columns, us[name], copy)
        yield Figure(case, f"% of copy bandwidth, {name}", percent, None, True, {"GB/s": copy})
    for other, asked in (("torch.compile", 1.5), ("eager", None)):
        if other in us:
            yield ratio(case, f"faster than {other}", us, other, "forward and backward", asked)
    host = host_us(calls, 101)
    yield at_most(case, "us on the host", host["forward and backward"], None, host)


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
            compiled = formulas.compiled(formulas.token_log_probs)
            attempt(calls, "torch.compile", lambda compiled=compiled: both(compiled))
            trl = peer("trl.kernels.logprob_entropy", "selective_log_softmax_and_entropy")
            if trl is not None:
                attempt(calls, "TRL", lambda trl=trl: both(trl))
        us = median_us(calls, 15)
        read = logits.numel() * logits.element_size()
        for name, asked, passes in (("forward", 0.65, 1), ("forward and backward", 1.9, 3)):
            yield at_most(case, f"ms {name}", us[name] / 1e3, asked, us)
            percent = percent_of_copy(passes * read, us[name], copy)
            yield Figure(case, f"% of copy bandwidth, {name}", percent, None, True, {"GB/s": copy})
            per_byte[f"{name} {vocab}"] = us[name] / read
        for other, asked in (("torch.compile", 1.5), ("TRL", None)):
            if other in us:
                fast = "forward and backward"
                yield ratio(case, f"faster than {other}", us, other, fast, asked)
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

    liger = peer("liger_kernel.transformers.grpo_loss", "triton_grpo_loss")
    if liger is None:
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
        out = liger(
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
