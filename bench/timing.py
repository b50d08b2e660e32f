"""Interleaved wall-clock medians, and peak memory of a call in a process of its own."""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path


def medians_ms(calls: Mapping[str, Callable[[], object]], rounds: int = 7) -> dict[str, float]:
    """Median milliseconds of each call; the calls take turns, after one warm-up each."""
    for call in calls.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(taken) for name, taken in times.items()}


def _status_mib(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    raise KeyError(field)


def _measure(prepare: Callable, arguments: tuple, answer) -> None:
    call = prepare(*arguments)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _status_mib("VmRSS")
    result = call()
    answer.put(_status_mib("VmHWM") - before)
    del result


def peak_extra_mib(prepare: Callable, *arguments: object) -> float:
    """Peak resident MiB above the start of `prepare(*arguments)()`, on Linux."""
    context = multiprocessing.get_context("spawn")
    answer = context.Queue()
    process = context.Process(target=_measure, args=(prepare, arguments, answer))
    process.start()
    peak = answer.get()
    process.join()
    return peak
