"""token_log_probs beside the same formula, eager and under torch.compile, and beside TRL's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from bench import formulas
from bench.conftest import Bench
from bench.inputs import response_mask, token_inputs
from grpo_kernels import token_log_probs

SHAPES = [(8, 1000), (1024, 32000), (256, 128_256), (256, 151_936), (256, 151_937)]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ASKED = SHAPES[1:2] + SHAPES[3:]


def trl() -> Callable | None:
    """TRL's log-prob and entropy in one call; None where it is not installed."""
    try:
        from trl.trainer.utils import selective_log_softmax_and_entropy
    except ImportError:
        return None
    return selective_log_softmax_and_entropy


def all_of(function: Callable, logits: Tensor, *others: Tensor) -> list[Tensor]:
    """Log-probs, entropies and the logits' gradient."""
    log_probs, entropy = function(logits, *others)
    total = log_probs.sum() + entropy.sum()
    return [log_probs.detach(), entropy.detach(), *torch.autograd.grad(total, logits)]


def contenders() -> dict[str, Callable]:
    made = {
        "ours": token_log_probs,
        "torch.compile": formulas.compiled(formulas.token_log_probs),
        "eager": formulas.token_log_probs,
        "TRL": trl(),
    }
    return {name: function for name, function in made.items() if function is not None}


def prepare(name: str, rows: int, vocab: int) -> Callable[[], object]:
    """Forward and backward of one contender, after a call that loads what it needs."""
    function = contenders()[name]
    logits, tokens = token_inputs(rows, vocab)
    if "compile" in name:
        all_of(function, logits, tokens)
    else:
        all_of(function, *token_inputs(2, 8))
    return lambda: all_of(function, logits, tokens)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids="{0[0]}x{0[1]}".format)
def test_token_log_probs(bench: Bench, shape: tuple[int, int], dtype: str) -> None:
    rows, vocab = bench.size(*shape)
    logits, tokens = token_inputs(rows, vocab, DTYPES[dtype])
    data = logits.detach()
    total = sum(score.sum() for score in token_log_probs(logits, tokens))
    functions = contenders()
    calls = {
        name: lambda function=function: all_of(function, logits, tokens)
        for name, function in functions.items()
    }
    calls |= {
        "ours, forward": lambda: token_log_probs(data, tokens),
        "logits.sum()": lambda: data.sum(),
        "ours, backward": lambda: torch.autograd.grad(total, logits, retain_graph=True),
        "fresh copy": lambda: torch.empty_like(data).copy_(data),
    }
    times = bench.times(f"token_log_probs {dtype}, {rows} x {vocab}", calls)
    exact = logits.detach()[:32].double().requires_grad_()
    bench.error(
        {
            name: all_of(function, logits[:32], tokens[:32])
            for name, function in functions.items()
            if name != "torch.compile"
        },
        all_of(formulas.token_log_probs, exact, tokens[:32]),
    )
    read = data.numel() * data.element_size()
    bench.bandwidth(3 * read, *functions)  # a read forward; a read and a write backward
    bench.bandwidth(read, "ours, forward")
    bench.bandwidth(2 * read, "ours, backward")
    if shape == SHAPES[0]:
        tiny = token_inputs(1, 8, DTYPES[dtype])
        bench.host(
            {
                name: lambda function=function: all_of(function, *tiny)
                for name, function in functions.items()
            }
        )
    if shape == SHAPES[1] and dtype == "fp32":
        bench.peak(prepare, {name: (name, rows, vocab) for name in functions})
    if shape in ASKED:
        asked = (1.8, 0.35, 1.4) if dtype == "fp32" else (None,) * 3
        bench.faster_than("torch.compile", asked[0])
        share = times["logits.sum()"] / times["ours, forward"]
        bench.at_least("forward: bandwidth of logits.sum()", share, asked[1], times)
        copies = times["ours, backward"] / times["fresh copy"]
        bench.at_most("backward, in fresh copies", copies, asked[2], times)


def test_token_log_probs_of_a_real_batch(bench: Bench) -> None:
    """Prompts and padding are masked: rows that need not be read."""
    rows, columns, vocab = bench.size(8, 128, 32000)
    mask = response_mask(rows, columns).flatten()
    logits, tokens = token_inputs(rows * columns, vocab)
    functions = contenders()
    functions.pop("TRL", None)  # its mask is not a boolean's
    bench.times(
        f"token_log_probs fp32, {rows} x {columns} x {vocab}, {mask.float().mean():.0%} valid",
        {
            name: lambda function=function: all_of(function, logits, tokens, mask)
            for name, function in functions.items()
        },
    )
    valid = mask.sum().item() * vocab * logits.element_size()
    bench.bandwidth(2 * valid + logits.numel() * logits.element_size(), *functions)
