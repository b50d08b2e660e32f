"""One measured figure beside what is asked of it, printed as a line and kept as JSON."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

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
        detail = "  ".join(f"{name} {value:.4g}" for name, value in self.detail.items())
        return f"{self.case:46} {self.claim:38} {self.measured:8.3g} {bound:8}{mark}\n    {detail}"


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


def machine_name() -> str:
    """A file name for this machine's results."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name().lower().replace(" ", "-")
    return f"cpu-{platform.machine()}"


def show(figures: Iterable[Figure], quick: bool = False) -> list[Figure]:
    """Print figures as they come; at a quick run's tiny sizes nothing is asked of them."""
    shown = []
    for figure in figures:
        figure.asked = None if quick else figure.asked
        print(figure, flush=True)
        shown.append(figure)
    return shown


def save(suites: dict[str, list[Figure]], folder: Path = RESULTS) -> Path:
    """Write the machine's results, keeping suites that were not run again."""
    path = folder / f"{machine_name()}.json"
    folder.mkdir(parents=True, exist_ok=True)
    stored = json.loads(path.read_text()) if path.exists() else {"suites": {}}
    stored["torch"] = torch.__version__
    stored["processor"] = processor()
    stored["threads"] = torch.get_num_threads()
    for suite, figures in suites.items():
        stored["suites"][suite] = [asdict(figure) for figure in figures]
    path.write_text(json.dumps(stored, indent=1) + "\n")
    return path


def processor() -> str:
    """The GPU's name where there is one, else the processor's, as the system tells it."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
