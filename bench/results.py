"""What a benchmark found, and the file that keeps it: bench/results/<machine>.json

A case is one set of inputs that every contender got; a figure is one measured number beside what
is asked of it; a curve is a contender's cost over sizes.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from bench.device import machine_name, processor

RESULTS = Path(__file__).parent / "results"


@dataclass
class Figure:
    """`measured` should be at least, or at most, `asked`; `detail` holds what it comes from."""

    case: str
    claim: str
    measured: float
    asked: float | None
    at_least: bool
    detail: dict[str, float]

    @property
    def holds(self) -> bool:
        if self.asked is None:
            return True
        return self.measured >= self.asked if self.at_least else self.measured <= self.asked

    def __str__(self) -> str:
        bound = "" if self.asked is None else f"{'>=' if self.at_least else '<='} {self.asked:g}"
        mark = "" if self.holds else "  FALLS SHORT"
        return f"{self.case:46} {self.claim:38} {self.measured:8.3g} {bound:8}{mark}"


def ratio(
    case: str, claim: str, times: dict[str, float], slow: str, fast: str, asked: float | None
) -> Figure:
    """How many times faster `fast` is than `slow`."""
    return Figure(case, claim, times[slow] / times[fast], asked, True, times)


def at_most(
    case: str, claim: str, measured: float, asked: float | None, detail: dict[str, float]
) -> Figure:
    """A figure that should not be more than `asked`."""
    return Figure(case, claim, measured, asked, False, detail)


@dataclass
class Case:
    """One set of inputs; the contenders by name, ours first.

    `ms`: medians of calls that took turns. `error`: the largest difference from the same formula
    in fp64, as a share of the largest value, over all outputs and gradients. `bandwidth`: bytes
    that must move over the time taken, as a share of a copy's. `peak_mib`: memory above what was
    there before the call. `host_us`: until the call returns, at a size where nothing else counts.
    """

    name: str
    ms: dict[str, float]
    error: dict[str, float] = field(default_factory=dict)
    bandwidth: dict[str, float] = field(default_factory=dict)
    peak_mib: dict[str, float] = field(default_factory=dict)
    host_us: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        rows = [self.name]
        for contender, ms in self.ms.items():
            row = f"    {contender:24} {ms:10.4g} ms"
            for label, values in (
                ("error {:.1e}", self.error),
                ("{:.0%} of a copy's bandwidth", self.bandwidth),
                ("peak {:.1f} MiB", self.peak_mib),
                ("host {:.0f} us", self.host_us),
            ):
                if contender in values:
                    row += "  " + label.format(values[contender])
            rows.append(row)
        return "\n".join(rows)


@dataclass
class Curve:
    """What one contender costs over sizes, in milliseconds, for the plot of that name."""

    plot: str
    contender: str
    sizes: list[int]
    ms: list[float]

    def __str__(self) -> str:
        points = "  ".join(f"{size}: {ms:.4g}" for size, ms in zip(self.sizes, self.ms))
        return f"{self.plot}, {self.contender}, ms at {points}"


Finding = Case | Figure | Curve


def read(path: Path) -> dict:
    """A machine's results, as `save` writes them."""
    stored = json.loads(path.read_text())
    kinds = {"cases": Case, "figures": Figure, "curves": Curve}
    for suite in stored["suites"].values():
        for name, kind in kinds.items():
            suite[name] = [kind(**made) for made in suite[name]]
    return stored


def save(suites: dict[str, list[Finding]], folder: Path = RESULTS) -> Path:
    """Write the machine's results, keeping suites that were not run again."""
    path = folder / f"{machine_name()}.json"
    folder.mkdir(parents=True, exist_ok=True)
    stored = json.loads(path.read_text()) if path.exists() else {"suites": {}}
    stored["torch"] = torch.__version__
    stored["processor"] = processor()
    stored["threads"] = torch.get_num_threads()
    for suite, findings in suites.items():
        stored["suites"][suite] = {
            name: [asdict(finding) for finding in findings if isinstance(finding, kind)]
            for name, kind in (("cases", Case), ("figures", Figure), ("curves", Curve))
        }
    path.write_text(json.dumps(stored, indent=1) + "\n")
    return path
