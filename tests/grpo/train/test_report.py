"""What a run shows while it runs, on terminals and in files."""

import io
import re
import warnings

import pytest
from rich.console import Console
from torchrl._utils import logger as torchrl_logger

from grpo.train.report import SHOWN, Report

METRICS = {name: 0.123 for _, name, _ in SHOWN} | {"response_tokens": 500}


def report_on(monkeypatch, directory, width, terminal):
    shown = io.StringIO()
    console = Console(file=shown, width=width, force_terminal=terminal, color_system=None)
    monkeypatch.setattr("grpo.train.report.Console", lambda **_: console)
    report = Report(directory, iterations=3)
    report.start()
    return report, shown


@pytest.mark.parametrize("width", [40, 60, 100, 200])
def test_no_metric_is_parted_from_its_name_whatever_the_width(monkeypatch, tmp_path, width):
    report, shown = report_on(monkeypatch, tmp_path, width, terminal=True)
    with report.live():
        for _ in range(3):
            report.end_iteration(METRICS)
    last = re.split(r"\x1b\[1A\x1b\[2K", shown.getvalue())[-10:]
    text = "".join(last)
    for label, _, _ in SHOWN:
        assert re.search(rf"{re.escape(label)} [\d.e+-]+", text), (label, text)
    for line in shown.getvalue().splitlines():
        assert len(re.sub(r"\x1b\[[?\d;]*[a-zA-Z]|\r", "", line)) <= width


class Metrics:
    """A logger that keeps what it gets."""

    def __init__(self):
        self.rows = {}

    def log_metrics(self, metrics, step):
        assert step not in self.rows
        self.rows[step] = metrics


def test_a_logger_gets_every_row_of_the_table_once_by_iteration(tmp_path):
    report = Report(tmp_path, iterations=3, also=Metrics(), quiet=True)
    report.start()
    for iteration in range(1, 4):
        report.log_scalar("loss_objective", 0.5, step=64 * iteration)  # the trainer counts frames
        report.end_iteration(METRICS)
    assert report.also.rows == {row["iteration"]: row for row in report.rows}
    assert report.also.rows[2]["loss_objective"] == 0.5
    assert report.also.rows[2]["tokens_per_second"] > 0


@pytest.mark.parametrize("terminal", [True, False])
def test_warnings_are_whole_lines_beside_the_progress_bar(monkeypatch, tmp_path, terminal):
    report, shown = report_on(monkeypatch, tmp_path, 60, terminal)
    with report.messages(), report.live():
        warnings.warn("rewards are odd", stacklevel=1)
        report.end_iteration(METRICS)
        torchrl_logger.warning("the buffer is empty")
        torchrl_logger.info("nobody needs to know")
    text = shown.getvalue()
    for message in ("warning: rewards are odd", "warning: the buffer is empty"):
        assert len(re.findall(rf"(?:^|\x1b\[2K){message} *$", text, re.MULTILINE)) == 1, text
    assert "nobody" not in text


def test_a_file_gets_lines_without_escapes(monkeypatch, tmp_path):
    report, shown = report_on(monkeypatch, tmp_path, 60, terminal=False)
    with report.messages(), report.live():
        for _ in range(3):
            report.end_iteration(METRICS)
    (line,) = shown.getvalue().splitlines()
    assert re.fullmatch(r" +1/3  reward 0\.123  ESS 0\.123  .*tok/s \d+", line)
