"""A whole optimisation step through TransformersWrapper: model, loss, backward, optimiser."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torchrl.objectives.llm as torchrl_losses
from tensordict import TensorDict, lazy_stack
from torch import nn
from torchrl.modules.llm import TransformersWrapper

import grpo
from bench.bench_losses import total
from bench.conftest import Bench
from bench.device import DEVICE
from bench.inputs import generator
from grpo.tiny import tiny_llama, tiny_tokenizer

LIBRARIES = {"ours": grpo, "ours, fused_lm_head": grpo, "TorchRL": torchrl_losses}


def batch(rows: int, columns: int, prompt: int, vocab: int) -> TensorDict:
    """Responses of one length, so that what is compared is the same work for all."""
    source = generator(1)
    rollouts = []
    for _ in range(rows):
        tokens = torch.randint(3, vocab, (columns,), generator=source, device=DEVICE)
        near = 0.1 * torch.randn(columns, generator=source, device=DEVICE) - math.log(vocab)
        advantage = torch.randn(1, 1, generator=source, device=DEVICE)
        rollouts.append(
            TensorDict(
                tokens={"full": tokens, "prompt": tokens[:prompt], "response": tokens[prompt:]},
                masks={
                    "all_attention_mask": torch.ones(columns, dtype=torch.bool, device=DEVICE),
                    "all_assistant_mask": torch.arange(columns, device=DEVICE) >= prompt,
                },
                log_probs={"full": near},
                advantage=advantage.expand(columns, 1).clone(),
            )
        )
    return lazy_stack(rollouts)


def step(
    name: str, model: nn.Module, tensordict: TensorDict, entropy_bonus: bool
) -> Callable[[], None]:
    """One optimisation step of GRPO as a function of nothing."""
    actor = TransformersWrapper(
        model, tokenizer=tiny_tokenizer(), input_mode="tokens", generate=False
    )
    options = {"fused_lm_head": True} if "fused" in name else {}
    loss = LIBRARIES[name].GRPOLoss(actor, entropy_bonus=entropy_bonus, **options)
    optimiser = torch.optim.SGD(model.parameters(), lr=1e-6)

    def run() -> None:
        total(loss(tensordict)).backward()
        optimiser.step()
        optimiser.zero_grad()

    return run


def model_alone(model: nn.Module, tensordict: TensorDict) -> Callable[[], None]:
    """Forward and backward of all but the logits: what the model itself needs of memory."""
    tokens = tensordict.get(("tokens", "full"), as_padded_tensor=True)

    def run() -> None:
        hidden = model.model(tokens, use_cache=False).last_hidden_state
        model.lm_head.weight.grad = torch.ones_like(model.lm_head.weight)
        hidden.sum().backward()

    return run


def model_of(vocab: int) -> nn.Module:
    return tiny_llama(vocab).to(DEVICE)


def prepare(name: str, rows: int, columns: int, prompt: int, vocab: int) -> Callable[[], None]:
    """A step, after one of a smaller model that loads what it needs."""
    small = batch(2, 8, 4, 64)
    warm = tiny_llama(64, hidden=32, layers=1).to(DEVICE)
    run = model_alone(warm, small) if name == "model" else step(name, warm, small, True)
    run()
    model, tensordict = model_of(vocab), batch(rows, columns, prompt, vocab)
    if name == "model":
        return model_alone(model, tensordict)
    return step(name, model, tensordict, True)


@pytest.mark.parametrize("kind", ["entropy", "no entropy"])
@pytest.mark.parametrize("vocab", [32000, 151_936])
def test_optimisation_step(bench: Bench, vocab: int, kind: str) -> None:
    """A 2-layer, hidden 128 model, B=4 T=256, prompt 64."""
    prompt = 20 if bench.quick else 64
    rows, columns, vocab = bench.size(4, 256, vocab)
    shape = rows, columns, prompt, vocab
    model, tensordict = model_of(vocab), batch(*shape)
    with_entropy = kind == "entropy"
    bench.times(
        f"optimisation step, {kind}, V={vocab}",
        {name: step(name, model, tensordict, with_entropy) for name in LIBRARIES},
        rounds=3 if vocab > 100_000 else 5,
    )
    bench.faster_than("TorchRL", 6 if with_entropy else 4)
    if vocab == 32000 or not with_entropy:
        return
    peaks = bench.peak(prepare, {name: (name, *shape) for name in ("model", *LIBRARIES)})
    alone = bench.case.peak_mib.pop("model")
    logits_mib = rows * columns * vocab * 4 / 2**20
    for name, asked in (("ours", 1.5), ("ours, fused_lm_head", 0.35)):
        claim = f"{name}: memory above the model's, of fp32 logits"
        bench.at_most(claim, (peaks[name] - alone) / logits_mib, asked, peaks)
