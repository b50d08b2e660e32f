"""Interleaved wall-clock medians, bandwidth of a copy, and peak memory of a call on its own."""

from __future__ import annotations

import functools
import multiprocessing
import queue
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from bench.device import DEVICE, GPU, synchronise

COPY_BYTES = 2**28  # beyond any cache


def milliseconds(call: Callable[[], object]) -> float:
    """One call, until the device has finished."""
    start = time.perf_counter()
    call()
    synchronise()
    return (time.perf_counter() - start) * 1e3


def medians_ms(calls: Mapping[str, Callable[[], object]], rounds: int = 7) -> dict[str, float]:
    """Median milliseconds of each call; the calls take turns, after one warm-up each."""
    for call in calls.values():
        milliseconds(call)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(milliseconds(call))
    return {name: statistics.median(taken) for name, taken in times.items()}


@functools.cache
def copy_bytes_per_ms(size: int = COPY_BYTES) -> float:
    """Bytes read and written by a copy into memory that is there already."""
    source = torch.ones(size, dtype=torch.int8, device=DEVICE)
    target = torch.empty_like(source)
    (ms,) = medians_ms({"copy": lambda: target.copy_(source)}).values()
    return 2 * size / ms


def _status_mib(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    raise KeyError(field)


def _extra_mib(call: Callable[[], object]) -> float:
    if GPU:
        synchronise()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = call()
        peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    else:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before = _status_mib("VmRSS")
        result = call()
        peak = _status_mib("VmHWM") - before
    del result
    return max(peak, 0.0)  # below 0 where memory was there and free


def _measure(prepare: Callable, arguments: tuple, answer) -> None:
    torch.set_num_threads(1)
    answer.put(_extra_mib(prepare(*arguments)))


def peak_extra_mib(prepare: Callable, *arguments: object) -> float:
    """Peak MiB above the start of `prepare(*arguments)()`, in a process of its own.

    Resident memory on Linux, the allocator's on a GPU.
    """
    context = multiprocessing.get_context("spawn")
    answer = context.Queue()
    process = context.Process(target=_measure, args=(prepare, arguments, answer))
    process.start()
    while True:
        try:
            peak = answer.get(timeout=1)
            break
        except queue.Empty:
            if not process.is_alive():
                raise RuntimeError(f"{prepare.__name__} died before it was measured") from None
    process.join()
    return peak
