"""What must hold on a GPU beside the numbers: repeatability, no waiting, graphs, streams, offsets.

A check raises AssertionError, or returns why it could not run.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bench.device import DEVICE, GPU, synchronise
from bench.gpu.calls import all_of, gradients, policy_call, small_calls, token_call
from bench.inputs import policy_inputs, token_inputs


def assert_same(name: str, got: list[Tensor], want: list[Tensor]) -> None:
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert torch.equal(a, b), f"{name}: tensor {i} differs by {(a - b).abs().max().item():.3g}"


def check_twice_equal() -> None:
    """The same call gives the same bits, whatever ran between."""
    calls = small_calls()
    first = {name: all_of(call) for name, call in calls.items()}
    for name, call in reversed(calls.items()):
        assert_same(name, all_of(call), first[name])


def check_no_synchronisation() -> None:
    """Nothing in forward or backward waits for the device."""
    for name, call in small_calls().items():
        all_of(call)  # compiles
        synchronise()
        if GPU:
            torch.cuda.set_sync_debug_mode("error")
        try:
            all_of(call)
        except RuntimeError as error:
            raise AssertionError(f"{name}: {error}") from error
        finally:
            if GPU:
                torch.cuda.set_sync_debug_mode("default")


def check_cuda_graph() -> str | None:
    """Forward and backward captured once give, replayed on new data, what a call gives."""
    for name, call in small_calls().items():
        before = all_of(call)
        if not GPU:
            continue
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            all_of(call)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = all_of(call)
        _, by = call()
        for turn in range(3):
            with torch.no_grad():
                by[0].copy_(by[0].roll(1, 0) if turn else by[0])
            graph.replay()
            want = all_of(call)  # between replays: the captured and the usual counter are apart
            synchronise()
            assert_same(f"{name}, replay {turn}", captured, want)
            if turn == 0:
                assert_same(f"{name}, first replay", captured, before)
        del graph, captured
    return None if GPU else "without a GPU: calls only, no capture"


def check_streams() -> str | None:
    """Calls that overlap on two streams do not disturb each other."""
    inputs = [policy_inputs(64 if GPU else 1, 2048 if GPU else 130) for _ in range(2)]
    want = [all_of(lambda i=i: policy_call(i)) for i in inputs]
    if not GPU:
        return "without a GPU: one after the other"
    streams = [torch.cuda.Stream() for _ in inputs]
    synchronise()
    for _ in range(20):
        got = []
        for stream, batch in zip(streams, inputs, strict=True):
            with torch.cuda.stream(stream):
                got.append(all_of(lambda batch=batch: policy_call(batch)))
        synchronise()
        for a, b in zip(got, want, strict=True):
            assert_same("policy_loss on two streams", a, b)
    return None


def check_other_device() -> str | None:
    """Tensors on a GPU that is not the current one."""
    if not GPU or torch.cuda.device_count() < 2:
        return "needs two GPUs"
    with torch.cuda.device(1):
        want = [
            all_of(lambda: policy_call(policy_inputs(4, 300, "cuda:1"))),
            all_of(lambda: token_call(*token_inputs(3, 4099, device="cuda:1"))),
        ]
    got = [
        all_of(lambda: policy_call(policy_inputs(4, 300, "cuda:1"))),
        all_of(lambda: token_call(*token_inputs(3, 4099, device="cuda:1"))),
    ]
    for a, b in zip(got, want, strict=True):
        assert_same("on cuda:1", a, b)
    return None


def beyond_int32() -> int:
    """Elements that 31 bits do not count; few where the kernels are interpreted."""
    return 2**31 if GPU else 2**10


def lacking(gib: float) -> str | None:
    if GPU and torch.cuda.mem_get_info()[0] < gib * 2**30:
        return f"needs {gib:g} GiB of free GPU memory"
    return None


def check_large_logits() -> str | None:
    """The last rows of logits with more than 2**31 elements, against the same rows alone."""
    if reason := lacking(16):
        return reason
    vocab = 151_937 if GPU else 513
    rows, last = beyond_int32() // vocab + 9, 4
    logits, tokens = token_inputs(rows, vocab, torch.bfloat16)
    outputs, by = token_call(logits, tokens)
    (grad,) = gradients(outputs, by)
    exact = logits.detach()[-last:].double().requires_grad_()
    log_p = torch.log_softmax(exact, -1)
    want = [log_p.gather(-1, tokens[-last:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)]
    (want_grad,) = gradients(want, [exact])
    for got, right in zip(outputs, want, strict=True):
        assert (got[-last:] - right).abs().max().item() < 2e-4, "scores of the last rows"
    difference = (grad[-last:] - want_grad).abs()
    assert (difference <= 0.01 * want_grad.abs() + 1e-7).all(), "gradient of the last rows"
    return None


def check_large_batch() -> str | None:
    """policy_loss over more than 2**31 tokens, and rows that lie more than 2**31 apart."""
    if reason := lacking(24):
        return reason
    from grpo_kernels import policy_loss

    columns = 8192 if GPU else 64
    rows = beyond_int32() // columns + 3
    shape = (rows, columns)
    log_probs = torch.empty(shape, dtype=torch.bfloat16, device=DEVICE).normal_(-2, 0.1)
    log_probs.requires_grad_()
    old = torch.full((1, 1), -2.0, device=DEVICE).expand(shape)
    advantages = torch.linspace(-1, 1, rows, device=DEVICE)
    out = policy_loss(log_probs, old, advantages, aggregation="prompt_mean", backend="triton")
    (grad,) = torch.autograd.grad(out.loss_objective, log_probs, torch.full_like(out[0], 1e6))
    for row in (0, 1, rows - 1):
        one = log_probs.detach()[row].double().requires_grad_()
        ratio_ = (one + 2).exp()
        value = -torch.minimum(ratio_ * advantages[row], ratio_.clamp(0.8, 1.2) * advantages[row])
        (want,) = torch.autograd.grad(value.mean() / rows * 1e6, one)
        close = (grad[row] - want).abs() <= 0.02 * want.abs() + 1e-9
        assert close.all(), f"gradient of row {row} of {rows}"
    del grad, log_probs, out

    apart = beyond_int32() // 2 + 64  # elements from one row to the next, of 4 rows
    wide = torch.empty(3 * apart + 70, dtype=torch.bfloat16, device=DEVICE)
    far = wide.as_strided((4, 70), (apart, 1))
    near = torch.randn(4, 70, device=DEVICE).to(torch.bfloat16)
    far.copy_(near)
    old = torch.zeros(4, 70, device=DEVICE)
    results = []
    for value in (far, near):
        leaf = value.detach().requires_grad_()
        loss = policy_loss(leaf, old, torch.ones(4, device=DEVICE), backend="triton")
        results.append([*loss[:1], *loss[4:7], *torch.autograd.grad(loss.loss_objective, leaf)])
    for got, want in zip(*results, strict=True):  # the order of a sum may follow the alignment
        assert torch.allclose(got, want, rtol=1e-5, atol=1e-6), "rows far apart"
    return None


CHECKS: dict[str, Callable[[], str | None]] = {
    "the same call twice gives the same bits": check_twice_equal,
    "no synchronisation": check_no_synchronisation,
    "CUDA graph capture and replay": check_cuda_graph,
    "two streams at once": check_streams,
    "a GPU that is not the current one": check_other_device,
    "logits beyond 2**31 elements": check_large_logits,
    "tokens and strides beyond 2**31": check_large_batch,
}
