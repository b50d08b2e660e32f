"""The same call gives the same bits on any number of threads, the same numbers on any CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from policy_loss_reference import FULL, evaluate, make_batch

from grpo_kernels import backends, policy_loss

needs_cpp = pytest.mark.skipif(backends.cpp_problem is not None, reason="no C++ extension")


@pytest.mark.parametrize("aggregation", ["token_mean", "prompt_mean"])
def test_the_same_call_twice_is_bitwise_equal(backend, aggregation):
    options = {"aggregation": aggregation, "backend": backend, **FULL}
    batch = make_batch(2, 1500)
    first, second = (evaluate(policy_loss, batch, options) for _ in range(2))
    for name, want in first.items():
        torch.testing.assert_close(second[name], want, rtol=0, atol=0)


@needs_cpp
@pytest.mark.parametrize("semantics", ["torchrl", "corrected"])
def test_the_number_of_threads_does_not_matter(semantics):
    options = {"semantics": semantics, "backend": "cpu", **FULL}
    batch = make_batch(96, 1100)  # 192 runs: enough for several threads
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            results.append(evaluate(policy_loss, batch, options))
    finally:
        torch.set_num_threads(threads)
    for result in results[1:]:
        for name, want in results[0].items():
            torch.testing.assert_close(result[name], want, rtol=0, atol=0)


CHECK_THE_FORMULA = """
import sys
import torch
from policy_loss_reference import *
from grpo_kernels import policy_loss

print(torch.ops.grpo_kernels_cpp.instruction_set())
for dtype in (torch.float32, torch.float64, torch.bfloat16):
    for objective in ("grpo", "cispo"):
        for semantics in ("torchrl", "corrected"):
            options = dict(
                FULL, objective=objective, semantics=semantics, aggregation="none",
                kl_mask_threshold=0.5,
            )
            batch = make_batch(2, 1063, dtype=dtype)
            expected = evaluate(naive_policy_loss, batch, options, double=True)
            actual = evaluate(policy_loss, batch, {**options, "backend": "cpu"})
            assert_equal_outputs(actual, expected, batch)
"""


@needs_cpp
@pytest.mark.parametrize("instruction_set", ["baseline", "avx2"])
def test_lesser_instruction_sets_give_the_formula(instruction_set):
    here = Path(__file__).parent
    paths = [str(here), str(here.parents[2]), os.environ.get("PYTHONPATH", "")]
    result = subprocess.run(
        [sys.executable, "-c", CHECK_THE_FORMULA],
        env={
            **os.environ,
            "GRPO_KERNELS_CPU": instruction_set,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        },
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    # A CPU without AVX2 has the baseline only.
    assert result.stdout.strip() in (instruction_set, "baseline")
