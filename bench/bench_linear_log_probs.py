"""linear_log_probs beside its bare matmuls, F.linear_cross_entropy, TRL's and Liger's losses."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bench import formulas
from bench.conftest import Bench
from bench.inputs import linear_inputs
from grpo_kernels import linear_log_probs, policy_loss

# rows, width, vocab
SMALL = (64, 64, 1000)
SHAPES = [SMALL, (1024, 128, 32000), (512, 256, 128_256), (1024, 896, 151_936)]
ASKED = {(1024, 128, 32000): (None, None, 1.5), (1024, 896, 151_936): (1.35, 0.25, 1.0)}


def chunked_trl(hidden: Tensor, weight: Tensor, tokens: Tensor) -> list[Tensor]:
    """TRL's log-prob and entropy from hidden states."""
    from trl.kernels import ChunkedLogProbFunction

    log_probs, entropy, *_ = ChunkedLogProbFunction.apply(
        hidden, weight, None, tokens, 1.0, 8192, None, 1.0, ("entropy",)
    )
    return both_ways(log_probs, entropy, hidden, weight)


def both_ways(log_probs: Tensor, entropy: Tensor, hidden: Tensor, weight: Tensor) -> list[Tensor]:
    """The scores and the gradients of their sums."""
    gradients = torch.autograd.grad(log_probs.sum() + entropy.sum(), (hidden, weight))
    return [log_probs.detach(), entropy.detach(), *gradients]


def ours(hidden: Tensor, weight: Tensor, tokens: Tensor) -> list[Tensor]:
    return both_ways(*linear_log_probs(hidden, weight, tokens), hidden, weight)


def eager(hidden: Tensor, weight: Tensor, tokens: Tensor) -> list[Tensor]:
    return both_ways(*formulas.linear_log_probs(hidden, weight, tokens), hidden, weight)


def cross_entropy(hidden: Tensor, weight: Tensor, tokens: Tensor) -> list[Tensor]:
    """PyTorch's own fused loss: log-probs only."""
    loss = F.linear_cross_entropy(hidden, weight, tokens, reduction="sum")
    return list(torch.autograd.grad(loss, (hidden, weight)))


def contenders() -> dict[str, Callable]:
    made = {"ours": ours, "eager": eager}
    if hasattr(F, "linear_cross_entropy"):
        made["F.linear_cross_entropy"] = cross_entropy
    if importlib.util.find_spec("trl"):
        made["TRL"] = chunked_trl
    return made


def bare_matmuls(hidden: Tensor, weight: Tensor, logits: Tensor) -> None:
    """Forward, once again for the recompute, and the two gradients."""
    hidden, weight = hidden.detach(), weight.detach()
    torch.mm(hidden, weight.t(), out=logits)
    torch.mm(hidden, weight.t(), out=logits)
    torch.mm(logits, weight)
    torch.mm(logits.t(), hidden)


def prepare(name: str, *shape: int) -> Callable[[], object]:
    """Forward and backward of one contender, after a small call that loads what it needs."""
    function = contenders()[name]
    function(*linear_inputs(2, shape[1], 64))
    tensors = linear_inputs(*shape)
    return lambda: function(*tensors)


def liger() -> Callable | None:
    """Liger's chunked GRPO loss without a reference model, compiled; None where not installed."""
    try:
        from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss
    except ImportError:
        return None
    return LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False, loss_type="bnpo")


@pytest.mark.parametrize("shape", ASKED, ids="{0[0]}x{0[1]}x{0[2]}".format)
def test_grpo_loss_from_hidden_states(bench: Bench, shape: tuple[int, int, int]) -> None:
    """Ours with policy_loss on top, entropy and metrics, beside Liger's, which has neither."""
    rows, width, vocab = bench.size(*shape)
    hidden, weight, tokens = linear_inputs(rows, width, vocab)
    sequences = 4
    hidden = hidden.detach().view(sequences, -1, width).requires_grad_()
    tokens = tokens.view(sequences, -1)
    old = torch.full(tokens.shape, -10.0, device=hidden.device)
    advantages = torch.linspace(-1, 1, sequences, device=hidden.device)

    def ours_with_loss() -> object:
        log_probs, entropy = linear_log_probs(hidden, weight, tokens)
        out = policy_loss(log_probs, old, advantages, entropy=entropy, entropy_coeff=0.01)
        return torch.autograd.grad(out.loss_objective + out.loss_entropy, (hidden, weight))

    calls: dict[str, Callable[[], object]] = {"ours": ours_with_loss}
    peer, mask = liger(), torch.ones_like(tokens)
    if peer is not None:
        calls["Liger"] = lambda: torch.autograd.grad(
            peer(hidden, weight, tokens, mask, advantages, old_per_token_logps=old)[0],
            (hidden, weight),
        )
    name = f"linear_log_probs + policy_loss, N={rows} H={width} V={vocab}"
    bench.times(name, calls, rounds=1 if width * vocab > 10**8 else 7)
    if peer is not None:
        bench.faster_than("Liger", ASKED[shape][2])


@pytest.mark.parametrize("shape", SHAPES, ids="{0[0]}x{0[1]}x{0[2]}".format)
def test_linear_log_probs(bench: Bench, shape: tuple[int, int, int]) -> None:
    rows, width, vocab = bench.size(*shape)
    tensors = linear_inputs(rows, width, vocab)
    logits = torch.empty(rows, vocab, device=tensors[0].device)
    functions = contenders()
    large = width * vocab > 10**8
    if large:  # seconds each
        del functions["eager"]
    calls = {name: lambda f=function: f(*tensors) for name, function in functions.items()}
    calls["four matmuls"] = lambda: bare_matmuls(*tensors[:2], logits)
    if not large:
        compiled = formulas.compiled(formulas.linear_log_probs)
        calls["torch.compile"] = lambda: both_ways(*compiled(*tensors), *tensors[:2])
    rounds = 41 if shape == SMALL else 1 if large else 3
    times = bench.times(f"linear_log_probs fp32, N={rows} H={width} V={vocab}", calls, rounds)
    if shape == SMALL:
        exact = [tensor.detach().double().requires_grad_() for tensor in tensors[:2]]
        bench.error(
            {
                name: function(*tensors)
                for name, function in functions.items()
                if function is not cross_entropy  # it gives no scores
            },
            eager(*exact, tensors[2]),
        )
        tiny = linear_inputs(1, 8, 8)
        bench.host({name: lambda f=function: f(*tiny) for name, function in functions.items()})
    matmuls, memory, _ = ASKED.get(shape, (None,) * 3)
    if shape in ASKED:
        peaks = bench.peak(prepare, {name: (name, rows, width, vocab) for name in functions})
        gradient = peaks["weight gradient"] = vocab * width * 4 / 2**20
        share = (peaks["ours"] - gradient) / (rows * vocab * 4 / 2**20)
        bench.at_most("memory less the weight gradient, of fp32 logits", share, memory, peaks)
        share = times["ours"] / times["four matmuls"]
        bench.at_most("time, of the four bare matmuls", share, matmuls, times)
