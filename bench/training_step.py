"""A whole optimisation step through TransformersWrapper: model, loss, backward, optimiser.

python -m bench.training_step [--quick]
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator

import torch
import torchrl.objectives.llm as torchrl_losses
from tensordict import TensorDict, lazy_stack
from torch import nn
from torchrl.modules.llm import TransformersWrapper

import grpo
from bench.figures import Figure, at_most, ratio, show
from bench.losses import total
from bench.timing import medians_ms, peak_extra_mib
from grpo.tiny import tiny_llama, tiny_tokenizer

LIBRARIES = {"torchrl": torchrl_losses, "ours": grpo, "ours, fused_lm_head": grpo}


def batch(rows: int, columns: int, prompt: int, vocab: int) -> TensorDict:
    generator = torch.Generator().manual_seed(1)
    rollouts = []
    for _ in range(rows):
        tokens = torch.randint(3, vocab, (columns,), generator=generator)
        near = 0.1 * torch.randn(columns, generator=generator) - math.log(vocab)
        rollouts.append(
            TensorDict(
                tokens={"full": tokens, "prompt": tokens[:prompt], "response": tokens[prompt:]},
                masks={
                    "all_attention_mask": torch.ones(columns, dtype=torch.bool),
                    "all_assistant_mask": torch.arange(columns) >= prompt,
                },
                log_probs={"full": near},
                advantage=torch.randn(1, 1, generator=generator).expand(columns, 1).clone(),
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


def prepare(name: str, shape: tuple[int, int, int, int]) -> Callable[[], None]:
    torch.set_num_threads(1)
    rows, columns, prompt, vocab = shape
    small = batch(2, 8, 4, 64)
    warm = tiny_llama(64, hidden=32, layers=1)
    run = model_alone(warm, small) if name == "model" else step(name, warm, small, True)
    run()
    model, tensordict = tiny_llama(vocab), batch(rows, columns, prompt, vocab)
    if name == "model":
        return model_alone(model, tensordict)
    return step(name, model, tensordict, True)


def figures(quick: bool = False) -> Iterator[Figure]:
    """A 2-layer, hidden 128 model, B=4 T=256, prompt 64."""
    torch.set_num_threads(1)
    for vocab in [100] if quick else [32000, 151936]:
        shape = (2, 16, 4, vocab) if quick else (4, 256, 64, vocab)
        model, tensordict = tiny_llama(vocab), batch(*shape)
        for name, entropy_bonus, asked in (("entropy", True, 6), ("no entropy", False, 4)):
            times = medians_ms(
                {name: step(name, model, tensordict, entropy_bonus) for name in LIBRARIES},
                rounds=2 if quick else 3 if vocab > 100_000 else 5,
            )
            case = f"optimisation step, {name}, V={vocab}"
            yield ratio(case, "faster than TorchRL", times, "torchrl", "ours", asked)
            yield ratio(
                case, "faster, fused_lm_head", times, "torchrl", "ours, fused_lm_head", None
            )
    logits_mib = math.prod((shape[0], shape[1], vocab)) * 4 / 2**20
    alone = peak_extra_mib(prepare, "model", shape)
    shares = {
        name: (peak_extra_mib(prepare, name, shape) - alone) / logits_mib for name in LIBRARIES
    }
    for name, asked in (("ours", 1.5), ("ours, fused_lm_head", 0.35)):
        claim = "memory above the model's, of fp32 logits"
        yield at_most(f"step, {name}, V={vocab}", claim, shares[name], asked, shares)


if __name__ == "__main__":
    QUICK = "--quick" in sys.argv
    show(figures(QUICK), QUICK)
