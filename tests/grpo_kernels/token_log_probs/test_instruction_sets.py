"""The C++ kernels for lesser processors, each in a process of its own."""

import os
import subprocess
import sys

import pytest
import torch

from grpo_kernels.token_log_probs import token_log_probs


@pytest.mark.parametrize("name", ["baseline", "avx2"])
def test_values_hold_for_instruction_set(name):
    """The whole of test_values.py and test_rows.py, on the C++ backend, under that choice."""
    if os.environ.get("GRPO_KERNELS_CPU"):
        pytest.skip("already under a chosen instruction set")
    folder = os.path.dirname(__file__)
    result = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            os.path.join(folder, "test_values.py"),
            os.path.join(folder, "test_rows.py"),
            os.path.join(folder, "test_instruction_sets.py"),
            "-k",
            "cpu or threads or in_force or sixteen_bit",
        ],
        env={**os.environ, "GRPO_KERNELS_CPU": name},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]


def test_instruction_set_in_force_is_the_one_asked_for():
    asked = os.environ.get("GRPO_KERNELS_CPU")
    name = torch.ops.grpo_kernels_cpp.instruction_set()
    if asked == "avx2" and name == "baseline":
        pytest.skip("this processor has no AVX2")
    assert asked in (None, name)


def test_sixteen_bit_floats_round_to_nearest_even():
    """Two tokens far apart: each one's gradient is the upstream gradient alone."""
    torch.manual_seed(0)
    for dtype in (torch.bfloat16, torch.float16):
        rows = 4096
        logits = torch.zeros(rows, 33, dtype=dtype)
        logits[:, 0] = 30000.0
        upstream = torch.randn(rows) * torch.logspace(-9, 4, rows)
        logits.requires_grad_()
        log_probs, _ = token_log_probs(
            logits, torch.full((rows,), 32), entropy=False, backend="cpu"
        )
        log_probs.backward(upstream)
        assert torch.equal(logits.grad[:, 32], upstream.to(dtype))
        assert torch.equal(logits.grad[:, 0], (-upstream).to(dtype))
