"""The wheel, and installs without a compiler."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
IMPORTS = """
import torch, grpo_kernels, grpo_kernels.backends as backends
print(grpo_kernels.__file__)
print(backends.cpp_problem)
x = torch.zeros(2, 3, requires_grad=True)
out = grpo_kernels.policy_loss(x, torch.zeros(2, 3), torch.ones(2))
out.loss_objective.backward()
print(out.loss_objective.item(), x.grad.sum().item())
"""


def build(tmp_path: Path, **environment: str) -> Path:
    """A wheel of this checkout, built from a copy so that its own build stays as it is."""
    source = tmp_path / "source"
    tracked = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\0")
    for name in filter(None, tracked):
        if (ROOT / name).exists():
            target = source / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps"]
    subprocess.run(
        [*command, "--quiet", "--wheel-dir", tmp_path / "dist", source],
        env={**os.environ, **environment},
        check=True,
    )
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    return wheel


def run_installed(wheel: Path, tmp_path: Path) -> str:
    """Why the extension does not load, or None, with the wheel in a folder of its own."""
    site = tmp_path / "site"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", site]
    subprocess.run([*command, wheel], check=True)
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=True,
    )
    where, problem, numbers = done.stdout.splitlines()
    assert where.startswith(str(site))
    assert numbers == "-1.0 -1.0"
    return problem


@pytest.mark.slow
def test_one_abi3_wheel_serves_every_python(tmp_path):
    wheel = build(tmp_path, GRPO_KERNELS_REQUIRE_CPP="1")
    assert "-cp310-abi3-" in wheel.name
    assert run_installed(wheel, tmp_path) == "None"


@pytest.mark.slow
def test_without_a_compiler_the_install_succeeds_and_the_definition_runs(tmp_path):
    wheel = build(tmp_path, CXX="/nonexistent/c++", CC="/nonexistent/cc")
    problem = run_installed(wheel, tmp_path)
    assert "install a C++20 compiler" in problem


@pytest.mark.slow
def test_the_extension_can_be_left_out(tmp_path):
    wheel = build(tmp_path, GRPO_KERNELS_NO_CPP="1")
    problem = run_installed(wheel, tmp_path)
    assert "GRPO_KERNELS_NO_CPP" in problem


def test_kernels_import_nothing_of_the_torchrl_layer():
    code = (
        "import sys, grpo_kernels; "
        "print([m for m in ('tensordict', 'torchrl', 'transformers', 'vllm', 'grpo') "
        "if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
