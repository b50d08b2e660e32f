"""What a run shows and leaves: a progress bar, metrics.csv, curves.png, summary.txt."""

from __future__ import annotations

import contextlib
import csv
import json
import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.columns import Columns
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torchrl._utils import logger as torchrl_logger
from torchrl._utils import timeit
from torchrl.record.loggers import Logger

# Shown in the progress bar: label, metric, format.
SHOWN = (
    ("reward", "reward_mean", ".3f"),
    ("ESS", "ESS", ".3f"),
    ("KL", "kl_approx", ".4f"),
    ("entropy", "entropy", ".3f"),
    ("clipped", "clip_fraction", ".3f"),
    ("|dlogp|", "rollout_difference", ".1e"),
    ("tok/s", "tokens_per_second", ".0f"),
)
# Phases of a run, as timed by `timeit`.
PHASES = {
    "warm-up": "warm-up",
    "engine start": "engine start",
    "rollout": "rollout",
    "reward": "reward",
    "rescore": "rescoring",
    "loss forward": "loss forward",
    "backward": "backward",
    "optimizer": "optimiser",
    "hook/update_weights": "weight sync",
}
# Metrics that count from the beginning of the run.
COUNTED_BY_THE_TRAINER = ("skipped_nonfinite_steps", "left_out_micro_batches")
BEFORE_THE_FIRST_ITERATION = ("warm-up", "engine start")
CURVES = (
    ("reward", ("reward_mean", "solved")),
    ("loss", ("loss_objective",)),
    ("KL (old - new log-prob)", ("kl_approx", "kl_to_ref")),
    ("entropy", ("entropy",)),
    ("ESS, clip fraction", ("ESS", "clip_fraction")),
    ("|rollout - trainer log-prob|", ("rollout_difference",)),
    ("gradient norm", ("grad_norm",)),
    ("response tokens / s", ("tokens_per_second",)),
)


class LineHandler(logging.Handler):
    """Shows what is logged as lines of the report."""

    def __init__(self, line: Callable[[str], None]) -> None:
        super().__init__()
        self.line = line

    def emit(self, record: logging.LogRecord) -> None:
        """Without time and place, which say nothing to the user of a run."""
        self.line(f"{record.levelname.lower()}: {record.getMessage()}")


class Report:
    """Collects what the trainer logs, one row an iteration; a logger to the trainer."""

    def __init__(
        self, directory: Path, iterations: int, *, also: Logger | None = None, quiet: bool = False
    ) -> None:
        self.directory = directory
        self.iterations = iterations
        self.also = also  # a torchrl logger that gets every row too, by iteration
        self.rows: list[dict[str, float]] = []
        self.seconds = dict.fromkeys(PHASES.values(), 0.0)
        self.total_seconds = 0.0
        self._row: dict[str, float] = {}
        self._columns: list[str] = []
        self._metrics_file = directory / "metrics.csv"
        self._started = time.monotonic()
        self._finished_before = 0.0  # seconds of the run that this one resumes
        self.quiet = quiet
        self.console = Console(stderr=True, quiet=quiet)
        progress = Progress(
            BarColumn(),
            TextColumn("{task.completed:.0f} of {task.total:.0f} iterations, left:"),
            TimeRemainingColumn(),
            console=self.console,
        )
        self.bar = progress.add_task("GRPO", total=iterations)
        self.progress = progress
        self.shown = Columns(padding=(0, 2))

    @contextlib.contextmanager
    def messages(self) -> Iterator[None]:
        """Shows warnings as lines, which leave the progress bar in one piece, while it is open."""
        handlers, level = torchrl_logger.handlers, torchrl_logger.level
        torchrl_logger.handlers = [LineHandler(self.line)]
        torchrl_logger.setLevel(logging.WARNING)
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: self.line(f"warning: {message}")
            try:
                yield
            finally:
                torchrl_logger.handlers = handlers
                torchrl_logger.setLevel(level)

    def live(self) -> contextlib.AbstractContextManager:
        """Shows the progress bar and the metrics under it while it is open, on a terminal."""
        if not self.console.is_terminal or self.quiet:
            return contextlib.nullcontext()
        return Live(Group(self.progress, self.shown), console=self.console)

    # A logger to the trainer

    def log_scalar(self, name: str, value: float, step: int | None = None) -> None:
        """Keep a metric of the running iteration."""
        self._row[name] = float(value)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run goes on from."""
        return {
            "rows": json.dumps(self.rows),
            "seconds": self.seconds,
            "total_seconds": self.total_seconds,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint; metrics.csv loses what came after it."""
        self.rows = json.loads(state["rows"])
        self.seconds = dict(state["seconds"])
        self.total_seconds = self._finished_before = state["total_seconds"]
        self._write_all_rows()
        self.progress.update(self.bar, completed=len(self.rows))

    # The run

    def start(self) -> None:
        """The clock starts."""
        timeit.erase()
        self._started = time.monotonic()

    def line(self, text: str) -> None:
        """A line of text above the progress bar."""
        self.console.print(text, highlight=False, soft_wrap=not self.console.is_terminal)

    def end_iteration(
        self, metrics: dict[str, float], within_rollout: Mapping[str, float] | None = None
    ) -> None:
        """A row is complete: with what was logged, `metrics`, and the seconds of each phase.

        `within_rollout`: seconds of other phases that were timed as the rollout's, by timer.
        """
        spent = timeit.todict(percall=False)
        timeit.erase()
        for timer, seconds in (within_rollout or {}).items():
            spent[timer] = spent.get(timer, 0.0) + seconds
            spent["rollout"] -= seconds
        for timer, phase in PHASES.items():
            self.seconds[phase] += spent.get(timer, 0.0)
        before, self.total_seconds = (
            self.total_seconds,
            self._finished_before + time.monotonic() - self._started,
        )
        row = {"iteration": len(self.rows) + 1, "seconds": self.total_seconds}
        row |= self._row | metrics
        before += sum(spent.get(timer, 0.0) for timer in BEFORE_THE_FIRST_ITERATION)
        row["tokens_per_second"] = metrics["response_tokens"] / (self.total_seconds - before)
        row |= {
            f"seconds/{phase}": spent.get(timer, 0.0)
            for timer, phase in PHASES.items()
            if phase not in BEFORE_THE_FIRST_ITERATION
        }
        if self.also is not None:
            self.also.log_metrics(row, step=row["iteration"])
        self._row = {}
        self.rows.append(row)
        if set(row) - set(self._columns):
            self._write_all_rows()
        elif not self.quiet:
            with self._metrics_file.open("a", newline="") as file:
                csv.DictWriter(file, self._columns).writerow(row)
        self.progress.advance(self.bar)
        self.shown.renderables = [
            f"{label} {format(row[name], spec)}" for label, name, spec in SHOWN if name in row
        ]
        if not self.console.is_terminal and (len(self.rows) % 10 == 0 or len(self.rows) == 1):
            shown = "  ".join(self.shown.renderables)
            self.line(f"{len(self.rows):4d}/{self.iterations}  {shown}")

    def _write_all_rows(self) -> None:
        """At once: a process killed here leaves the old file or the new one."""
        if self.quiet:
            return
        self._columns = list(dict.fromkeys(name for row in self.rows for name in row))
        new = self._metrics_file.with_suffix(".csv.new")
        with new.open("w", newline="") as file:
            writer = csv.DictWriter(file, self._columns)
            writer.writeheader()
            writer.writerows(self.rows)
        new.replace(self._metrics_file)

    def finish(self) -> None:
        """Draw the curves and write the summary; what cannot be written is said, not raised."""
        if self.quiet or not self.rows:
            return
        summary = self.summary()
        for name, write in (
            ("curves.png", self._draw),
            ("summary.txt", lambda path: path.write_text(summary + "\n")),
        ):
            try:
                write(self.directory / name)
            except OSError as error:
                self.line(f"warning: {name} could not be written: {error}")
        print(summary, file=sys.stdout)

    def summary(self) -> str:
        """Rewards at both ends, and where the seconds went."""
        span = min(10, len(self.rows))

        def mean(rows: list[dict[str, float]], name: str) -> float:
            values = [row[name] for row in rows if name in row]
            return sum(values) / len(values) if values else float("nan")

        ends = {
            name: (mean(self.rows[:span], name), mean(self.rows[-span:], name))
            for name in ("reward_mean", "solved")
        }
        lines = [
            f"{len(self.rows)} iterations in {self.total_seconds:.1f} s",
            *(
                f"{label}, first and last {span} iterations: {first:.3f} -> {last:.3f}"
                for label, (first, last) in zip(
                    ("mean reward", "solved"), ends.values(), strict=True
                )
            ),
        ]
        for name, what in (
            ("skipped_nonfinite_steps", "optimiser steps skipped, loss or gradient not finite"),
            ("left_out_micro_batches", "micro-batches left out: another rank had fewer"),
            ("nonfinite_rewards", "responses left out, reward not finite"),
            (
                "dropped_groups",
                "groups left out, without a finite reward or a selection within the bounds",
            ),
            ("prompts_too_long", "prompts left out, longer than the context"),
        ):
            values = [row.get(name, 0) for row in self.rows]
            count = values[-1] if name in COUNTED_BY_THE_TRAINER else sum(values)
            if count:
                lines.append(f"{count:.0f} {what}")
        if not any("grad_norm" in row for row in self.rows):
            lines.append("nothing was trained: no iteration had an optimiser step")
        known = sum(self.seconds.values())
        parts = [*self.seconds.items(), ("everything else", self.total_seconds - known)]
        lines += [
            f"  {phase:16s}{seconds:8.1f} s {100 * seconds / self.total_seconds:5.1f} %"
            for phase, seconds in parts
            if seconds
        ]
        lines.append(f"metrics.csv, curves.png and summary.txt are in {self.directory}")
        return "\n".join(lines)

    def _draw(self, path: Path) -> None:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(2, 4, figsize=(16, 7), layout="constrained")
        for axis, (title, names) in zip(axes.flat, CURVES, strict=True):
            axis.set_title(title, fontsize=10)
            axis.set_xlabel("iteration", fontsize=8)
            for name in names:
                points = [(row["iteration"], row[name]) for row in self.rows if name in row]
                if points:
                    axis.plot(*zip(*points, strict=True), label=name, linewidth=1)
            axis.grid(alpha=0.3)
            if axis.lines:
                axis.legend(fontsize=8)
        figure.savefig(path, dpi=110)
        pyplot.close(figure)
