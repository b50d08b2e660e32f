"""The `bench` fixture: contenders that take turns on one case, under pytest-benchmark."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor

from bench.device import synchronise
from bench.results import Case, Curve, Figure, Finding, at_most, ratio, save
from bench.timing import COPY_BYTES, copy_bytes_per_ms, medians_ms, milliseconds, peak_extra_mib

QUICK_SIZE = 40  # of every dimension
FOUND = pytest.StashKey[dict[str, list[Finding]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--quick", action="store_true", help="every case at a tiny size; nothing is asked or kept"
    )
    parser.addoption(
        "--keep", action="store_true", help="the suite's findings take the place of those kept"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[FOUND] = {}
    torch.set_num_threads(1)


def pytest_sessionfinish(session: pytest.Session) -> None:
    found = session.config.stash[FOUND]
    if found and session.config.getoption("keep") and not session.testsfailed:
        print(f"\nkept in {save(found)}")


class Bench:
    """Measures one case; what it finds is printed and, unless quick, kept."""

    def __init__(self, benchmark: BenchmarkFixture, quick: bool) -> None:
        self.benchmark, self.quick = benchmark, quick
        self.found: list[Finding] = []
        self.case: Case | None = None

    def size(self, *sizes: int) -> tuple[int, ...]:
        """The sizes of this case, tiny in a quick run."""
        return tuple(min(size, QUICK_SIZE) for size in sizes) if self.quick else sizes

    def times(
        self,
        name: str,
        calls: Mapping[str, Callable[[], object]],
        rounds: int = 7,
        repeats: int = 1,
    ) -> dict[str, float]:
        """Median milliseconds; the first call is ours, and the one that pytest-benchmark times.

        It is one that does its work `repeats` times, where once is too short beside the others.
        """
        ours, *others = calls
        taken: dict[str, list[float]] = {other: [] for other in others}

        def run_others() -> None:
            for other in others:
                taken[other].append(milliseconds(calls[other]))

        def run_ours() -> None:
            calls[ours]()
            synchronise()

        for call in calls.values():  # compiles, and touches the memory
            milliseconds(call)
        self.benchmark.name = name
        self.benchmark.pedantic(run_ours, setup=run_others, rounds=2 if self.quick else rounds)
        ms = {ours: self.benchmark.stats.stats.median * 1e3 / repeats}
        ms |= {other: statistics.median(times) for other, times in taken.items()}
        self.benchmark.extra_info.update(ms)
        self.case = Case(name, ms)
        self.found.append(self.case)
        return ms

    def error(self, results: Mapping[str, list[Tensor]], exact: list[Tensor]) -> None:
        """Keep each contender's largest difference from what the formula gives in fp64."""
        for name, tensors in results.items():
            self.case.error[name] = max(
                ((got.double() - want).abs().max() / want.abs().max().clamp_min(1e-300)).item()
                for got, want in zip(tensors, exact, strict=True)
            )

    def bandwidth(self, bytes_moved: float, *contenders: str) -> None:
        """Keep the bytes that must move over the time taken, beside a copy's."""
        copy = copy_bytes_per_ms(2**20 if self.quick else COPY_BYTES)
        for name in contenders:
            self.case.bandwidth[name] = bytes_moved / self.case.ms[name] / copy

    def peak(self, prepare: Callable, arguments: Mapping[str, tuple]) -> dict[str, float]:
        """Peak MiB of `prepare(*arguments)()` for each contender, in processes of their own."""
        peaks = {name: peak_extra_mib(prepare, *given) for name, given in arguments.items()}
        self.case.peak_mib |= peaks
        return peaks

    def host(self, calls: Mapping[str, Callable[[], object]]) -> dict[str, float]:
        """Microseconds until calls at a size that costs nothing return."""
        times = medians_ms(calls, 3 if self.quick else 201)
        self.case.host_us |= {name: ms * 1e3 for name, ms in times.items()}
        return self.case.host_us

    def asked(self, figure: Figure) -> None:
        """Keep a figure; at a quick run's tiny sizes nothing is asked of it."""
        figure.asked = None if self.quick else figure.asked
        self.found.append(figure)

    def faster_than(self, contender: str, asked: float | None) -> None:
        """Keep how many times faster ours is."""
        ours = next(iter(self.case.ms))
        claim = f"faster than {contender}"
        self.asked(ratio(self.case.name, claim, self.case.ms, contender, ours, asked))

    def at_most(
        self, claim: str, measured: float, asked: float | None, detail: dict[str, float]
    ) -> None:
        """Keep a figure that should not be more than `asked`."""
        self.asked(at_most(self.case.name, claim, measured, asked, detail))

    def at_least(
        self, claim: str, measured: float, asked: float | None, detail: dict[str, float]
    ) -> None:
        """Keep a figure that should not be less than `asked`."""
        self.asked(Figure(self.case.name, claim, measured, asked, True, detail))

    def curves(
        self, plot: str, sizes: Iterable[int], calls: Mapping[str, Callable[[int], Callable]]
    ) -> None:
        """Keep what the contenders' `calls[name](size)()` cost over sizes, in turns at each."""
        sizes = list(sizes)[: 2 if self.quick else None]
        rounds = 1 if self.quick else 5
        times = [
            medians_ms({name: call_of(size) for name, call_of in calls.items()}, rounds)
            for size in sizes
        ]
        self.found += [Curve(plot, name, sizes, [at[name] for at in times]) for name in calls]


@pytest.fixture
def bench(benchmark: BenchmarkFixture, request: pytest.FixtureRequest, capsys) -> Iterator[Bench]:
    quick = request.config.getoption("quick")
    measured = Bench(benchmark, quick)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield measured
    with capsys.disabled():
        print("\n" + "\n".join(map(str, measured.found)), flush=True)
    suite = request.module.__name__.removeprefix("bench.bench_")
    request.config.stash[FOUND].setdefault(suite, []).extend(measured.found)
