"""Every benchmark runs, at a tiny size; what it finds is kept and shown as it was found."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench import report
from bench.__main__ import SUITES
from bench.results import Case, Curve, Figure, read, save

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("suite", SUITES)
def test_every_case_runs(suite):
    # pytest-benchmark measures nothing where xdist runs, which these would tell it.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_XDIST")}
    done = subprocess.run(
        [sys.executable, "-m", "bench", "--quick", suite],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert " skipped" not in done.stdout


def test_an_unknown_suite_is_named():
    done = subprocess.run(
        [sys.executable, "-m", "bench", "polcy_loss"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "unknown suite polcy_loss; there are group_subset, linear_log_probs" in done.stderr


CASE = Case(
    "a case",
    {"ours": 2.0, "eager": 7.0, "TRL": 5.0},
    error={"ours": 1e-7, "eager": 2e-7, "TRL": 3e-7},
    bandwidth={"ours": 0.5},
    peak_mib={"ours": 10.0, "eager": 90.0},
)
FIGURES = [
    Figure("a case", "faster than eager", 3.5, 3.0, True, {"ours": 2.0, "eager": 7.0}),
    Figure("a case", "memory", 2.0, 1.1, False, {}),
    Figure("a case", "not asked", 2.0, None, False, {}),
]
CURVE = Curve("tokens", "ours", [1, 2], [0.1, 0.2])


def test_findings_are_kept_and_a_suite_that_did_not_run_again_stays(tmp_path):
    save({"one": [CASE, CURVE], "two": [FIGURES[1]]}, tmp_path)
    path = save({"two": FIGURES}, tmp_path)
    suites = read(path)["suites"]
    assert suites["one"] == {"cases": [CASE], "figures": [], "curves": [CURVE]}
    assert suites["two"] == {"cases": [], "figures": FIGURES, "curves": []}


def test_the_table_has_ours_beside_each_other():
    row = report.case_row(CASE)
    assert row == "| a case | 2 |  |  | 3.5 (eager) | 2.5 (TRL) | 1e-07 / 2e-07 | 50 | 10 / 90 |  |"
    assert row.count("|") == report.case_table([CASE]).splitlines()[0].count("|")


def test_the_report_says_what_falls_short(tmp_path, monkeypatch):
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- bench -->\nold\n<!-- /bench -->\nafter\n")
    results = tmp_path / "results"
    monkeypatch.setattr(report, "README", readme)
    monkeypatch.setattr(report, "RESULTS", results)
    save({"one": [CASE, CURVE, *FIGURES]}, results)
    report.main()
    text = readme.read_text()
    assert text.startswith("before\n<!-- bench -->\n")
    assert text.endswith("<!-- /bench -->\nafter\n")
    assert "old" not in text
    assert report.case_row(CASE) in text
    assert "1 of 2 targets are met (a case: memory, 2 for 1.1)" in text
    assert text.count("![") == 1
    assert "| a case | memory | 2 | ≤ 1.1 | falls short |" in (results / "README.md").read_text()
    assert [plot.name for plot in results.glob("*.png")] == [
        f"{next(results.glob('*.json')).stem}-tokens.png"
    ]
