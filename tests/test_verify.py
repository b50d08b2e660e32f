"""python -m grpo_kernels.verify: passes on what is right, and catches what is wrong."""

import importlib
import subprocess
import sys

import pytest
import torch

from grpo_kernels import backends, verify

policy_eager = importlib.import_module("grpo_kernels.policy_loss.eager")
policy_cpu = importlib.import_module("grpo_kernels.policy_loss.cpu")
token_eager = importlib.import_module("grpo_kernels.token_log_probs.eager")
subset_eager = importlib.import_module("grpo_kernels.group_subset.eager")

CPU = torch.device("cpu")


@pytest.mark.parametrize("backend", ["cpu", "eager"])
def test_every_operation_passes(backend, capsys):
    if reason := backends.why_not(backend, CPU):
        pytest.skip(reason)
    assert verify.main(["--backend", backend]) == 0, capsys.readouterr().out
    assert "FAILED" not in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_triton_kernels_pass(capsys):
    if reason := backends.why_not("triton", CPU):
        pytest.skip(reason)
    assert verify.main(["--backend", "triton"]) == 0, capsys.readouterr().out


def only(monkeypatch, operation: str, of_name: str = "") -> None:
    cases = [c for c in verify.all_cases() if c.operation == operation and of_name in c.name]
    monkeypatch.setattr(verify, "all_cases", lambda: cases)


def wrong_coefficient(tokens, bounds):
    right = GRPO(tokens, bounds)
    return right._replace(coefficient=-right.coefficient)


GRPO = policy_eager.grpo
FORWARD = token_eager.forward
BACKWARD = token_eager.backward
OBJECTIVES = policy_eager.objective_and_kl_weights
CPU_FORWARD = policy_cpu.forward


def entropy_a_little_off(*arguments):
    log_probs, entropy, *rest = FORWARD(*arguments)
    return log_probs, None if entropy is None else entropy * (1 + 1e-5), *rest


def gradient_at_masked_rows(*arguments):
    BACKWARD(*arguments)
    mask, grad_logits = arguments[4], arguments[-1]
    if mask is not None:
        grad_logits[~mask] = 1e-30


def ess_of_all_positions(*arguments):
    output, weights = CPU_FORWARD(*arguments)
    return output._replace(ESS=output.ESS * 0.99), weights


@pytest.mark.parametrize(
    ("module", "name", "wrong", "operation", "backend"),
    [
        (policy_eager.TOKEN_OBJECTIVES, "grpo", wrong_coefficient, "policy_loss", "eager"),
        (policy_eager, "k3", lambda x: x.exp() - 1 + x, "policy_loss", "eager"),
        (policy_cpu, "forward", ess_of_all_positions, "policy_loss", "cpu"),
        (token_eager, "forward", entropy_a_little_off, "token_log_probs", "eager"),
        (token_eager, "backward", gradient_at_masked_rows, "token_log_probs", "eager"),
    ],
)
def test_a_wrong_backend_is_caught_and_the_case_named(
    module, name, wrong, operation, backend, monkeypatch, capsys
):
    if reason := backends.why_not(backend, CPU):
        pytest.skip(reason)
    only(monkeypatch, operation)
    replace = monkeypatch.setitem if isinstance(module, dict) else monkeypatch.setattr
    replace(module, name, wrong)
    assert verify.main(["--backend", backend]) == 1
    failures = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAILED")]
    assert failures
    assert f"FAILED {operation} ({backend}, cpu, float32) " in "\n".join(failures)


def test_an_exception_is_a_failure(monkeypatch, capsys):
    def broken(*_):
        raise RuntimeError("no kernel image")

    only(monkeypatch, "token_log_probs", "without entropy")
    monkeypatch.setattr(token_eager, "forward", broken)
    assert verify.main(["--backend", "eager"]) == 1
    assert "without entropy: RuntimeError: no kernel image" in capsys.readouterr().out


def test_processes_share_the_work(monkeypatch):
    only(monkeypatch, "group_subset")
    results = verify.verify([("eager", "cpu")], jobs=2)
    assert len(results) == len(verify.all_cases())
    assert not any(result.problem for result in results)


def test_it_needs_torch_alone():
    code = (
        "import sys\n"
        "sys.modules['triton'] = None\n"
        "for name in ('tensordict', 'torchrl', 'transformers', 'numpy'):\n"
        "    sys.modules[name] = None\n"
        "import importlib.util\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *a: None if name == 'triton' else find(name, *a)\n"
        "from grpo_kernels import verify\n"
        "sys.exit(verify.main(['--backend', 'eager']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "triton is not installed" in done.stdout
