"""Which backend runs, and what is said when a named one cannot."""

import re
import threading

import pytest
import torch

from grpo_kernels import backends, policy_loss, use_backend
from grpo_kernels.backends import resolve_backend
from grpo_kernels.policy_loss import eager
from grpo_kernels.policy_loss import op as policy_loss_op

CPU, META, CUDA = (torch.device(name) for name in ("cpu", "meta", "cuda"))
REASON = "the C++ extension is not built"


def test_auto_prefers_the_kernels_of_the_device(monkeypatch):
    monkeypatch.setattr(backends, "cpp_problem", None)
    monkeypatch.setattr(backends, "triton_problem", None)
    assert resolve_backend("auto", CPU) == "cpu"
    assert resolve_backend("auto", CUDA) == "triton"
    assert resolve_backend("auto", META) == "eager"


def test_auto_never_fails_for_want_of_a_kernel(monkeypatch):
    monkeypatch.setattr(backends, "cpp_problem", REASON)
    monkeypatch.setattr(backends, "triton_problem", "triton is not installed")
    assert resolve_backend("auto", CPU) == "eager"
    assert resolve_backend("auto", CUDA) == "eager"
    x = torch.zeros(2, 3)
    assert policy_loss(x, x, x).loss_objective == 0


@pytest.mark.parametrize(
    ("backend", "device", "problem", "reason"),
    [
        ("cpu", CPU, "cpp_problem", REASON),
        ("cpu", CUDA, None, "need CPU tensors, got cuda"),
        ("triton", CUDA, "triton_problem", REASON),
        ("triton", META, None, "needs tensors on a GPU, got meta"),
    ],
)
def test_a_named_backend_that_cannot_run_says_why(monkeypatch, backend, device, problem, reason):
    if problem is not None:
        monkeypatch.setattr(backends, problem, reason)
    with pytest.raises(
        RuntimeError, match=f"backend='{backend}' cannot run: .*{re.escape(reason)}"
    ):
        resolve_backend(backend, device)


def test_a_forced_cpu_backend_without_the_extension_raises_in_a_call(monkeypatch):
    monkeypatch.setattr(backends, "cpp_problem", REASON)
    x = torch.zeros(2, 3)
    with pytest.raises(RuntimeError, match=re.escape(REASON)):
        policy_loss(x, x, x, backend="cpu")
    with use_backend("cpu"), pytest.raises(RuntimeError, match=re.escape(REASON)):
        policy_loss(x, x, x)


def test_triton_on_cpu_tensors_needs_the_interpreter(monkeypatch):
    monkeypatch.setattr(backends, "triton_interprets", False)
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1"):
        resolve_backend("triton", CPU)
    monkeypatch.setattr(backends, "triton_interprets", True)
    assert resolve_backend("triton", CPU) == "triton"


def test_an_unknown_backend_is_named():
    with pytest.raises(ValueError, match=r"backend must be one of .*'numpy'"):
        resolve_backend("numpy", CPU)
    with pytest.raises(ValueError, match="numpy"), use_backend("numpy"):
        pass


def test_use_backend_is_the_meaning_of_auto_only_and_nests():
    with use_backend("eager"):
        assert resolve_backend("auto", CPU) == "eager"
        assert resolve_backend("triton", CPU) == "triton"
        with use_backend("triton"):
            assert resolve_backend("auto", CPU) == "triton"
        assert resolve_backend("auto", CPU) == "eager"
    assert resolve_backend("auto", CPU) != "triton"


def test_use_backend_ends_with_an_exception_too():
    before = resolve_backend("auto", CPU)
    with pytest.raises(ZeroDivisionError), use_backend("triton"):
        raise ZeroDivisionError
    assert resolve_backend("auto", CPU) == before


def test_use_backend_stays_in_its_thread():
    seen = []
    with use_backend("triton"):
        thread = threading.Thread(target=lambda: seen.append(resolve_backend("auto", CPU)))
        thread.start()
        thread.join()
    assert seen != ["triton"]


def test_the_named_backend_does_the_work(backend, monkeypatch):
    module = policy_loss_op.implementation(backend)
    calls = []
    forward = module.forward
    monkeypatch.setattr(module, "forward", lambda *args: calls.append(backend) or forward(*args))
    x = torch.zeros(2, 3)
    policy_loss(x, x, x, backend=backend)
    with use_backend(backend):
        policy_loss(x, x, x)
    assert calls == [backend, backend]
    assert (module is eager) == (backend == "eager")
