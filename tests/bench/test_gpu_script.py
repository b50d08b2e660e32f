"""bench/gpu.sh runs end to end without a GPU, and says what fails."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.gpu import __main__ as gpu
from grpo_kernels import backends

SCRIPT = Path(__file__).parents[2] / "bench" / "gpu.sh"
pytestmark = pytest.mark.skipif(
    backends.triton_problem is not None, reason=str(backends.triton_problem)
)


def run(tmp_path: Path, *arguments: str) -> str:
    done = subprocess.run(
        [SCRIPT, "--interpret", *arguments],
        env={**os.environ, "OUT": str(tmp_path), "PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_one_section_runs_interpreted_and_keeps_its_figures(tmp_path):
    output = run(tmp_path, "--only", "policy_loss")
    assert "policy_loss        ok" in output
    (kept,) = tmp_path.glob("*.json")
    figures = json.loads(kept.read_text())["suites"]["gpu policy_loss"]["figures"]
    assert any("launches forward" in figure["claim"] for figure in figures)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_section_runs_interpreted(tmp_path):
    output = run(tmp_path)
    summary = output[output.index("== summary") :]
    for section in gpu.DEADLINES:
        assert f"\n{section:18} ok" in summary


@pytest.mark.parametrize(
    ("code", "seconds", "how"),
    [
        ("raise SystemExit(3)", 60, "FAILED: exit status 3"),
        ("import time; time.sleep(60)", 6, "FAILED: longer than 6 s"),
        ("", 4, "FAILED: no time was left"),
    ],
)
def test_a_section_that_fails_or_hangs_is_reported(code, seconds, how, monkeypatch, tmp_path):
    monkeypatch.setattr(gpu, "command", lambda *_: [sys.executable, "-c", code])
    assert gpu.run_section("checks", tmp_path / "keep", seconds, dict(os.environ)) == how


def test_the_sections_fit_into_six_minutes():
    assert gpu.TOTAL_SECONDS <= 355
