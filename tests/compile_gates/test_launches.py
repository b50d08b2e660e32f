"""What the launchers ask for compiles, with the arguments' real specialisation."""

import os
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_every_launch_that_verify_makes_compiles():
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-m", "tests.compile_gates.launches"],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
