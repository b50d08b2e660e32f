"""One optimisation step of GRPO, DAPO and CISPO: ours beside TorchRL's, on a small model's samples.

python -m grpo.compare
"""

from __future__ import annotations

import copy
import time
import warnings

import torch
import torchrl.objectives.llm as torchrl_losses
from rich.console import Console
from rich.table import Table
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import Tensor, nn
from torchrl.modules.llm import TransformersWrapper

import grpo
from grpo.tiny import tiny_llama, tiny_tokenizer

VOCAB, PROMPTS, GROUP, PROMPT_LENGTH, RESPONSE_LENGTH = 8000, 4, 4, 16, 48
OPTIONS = {"kl_to_ref_coeff": 0.1, "kl_to_inference_coeff": 0.05}
LOSSES = ("loss_objective", "loss_entropy", "loss_kl_to_ref", "loss_kl_to_inference")
METRICS = ("clip_fraction", "kl_approx", "ESS", "entropy", "kl_to_ref", "kl_to_inference")


def wrap(model: nn.Module) -> TransformersWrapper:
    """The model as TorchRL's losses take it."""
    return TransformersWrapper(
        model, tokenizer=tiny_tokenizer(), input_mode="tokens", generate=False
    )


def sample(model: nn.Module, reference: nn.Module) -> TensorDictBase:
    """Groups of responses sampled from `model`, with its log-probs, the reference's, advantages."""
    prompts = torch.randint(3, VOCAB, (PROMPTS, PROMPT_LENGTH)).repeat_interleave(GROUP, 0)
    with torch.no_grad():
        tokens = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=True,
            max_new_tokens=RESPONSE_LENGTH,
            pad_token_id=0,
            eos_token_id=None,
        )
    # A made-up reward: the share of even tokens. Advantages are normalised within each group.
    rewards = (tokens[:, PROMPT_LENGTH:] % 2 == 0).float().mean(-1).view(PROMPTS, GROUP)
    advantages = (rewards - rewards.mean(-1, keepdim=True)) / rewards.std(-1, keepdim=True)
    batch = lazy_stack(
        [
            TensorDict(
                tokens={"full": row, "prompt": row[:PROMPT_LENGTH]},
                masks={"all_attention_mask": torch.ones_like(row, dtype=torch.bool)},
                advantage=advantage.expand(len(row), 1).clone(),
            )
            for row, advantage in zip(tokens, advantages.flatten())
        ]
    )
    for key, scored_by in (("log_probs", model), (("next", "ref_log_probs"), reference)):
        with torch.no_grad():
            scores = wrap(scored_by)(batch.copy()).get(("log_probs", "full"), as_list=True)
        for row, score in zip(batch.tensordicts, scores):
            row.set((key, "full") if isinstance(key, str) else (*key, "full"), score)
    return batch


def moved(model: nn.Module, by: float) -> nn.Module:
    """A policy a little further on: the model with noise on its weights."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += by * parameter.std() * torch.randn_like(parameter)
    return model


def optimisation_step(
    loss_class: type[nn.Module], model: nn.Module, batch: TensorDictBase
) -> tuple[dict[str, Tensor], float]:
    """What one step shows, with the gradient norm, and its seconds; the model is left as it was."""
    model = copy.deepcopy(model)
    loss = loss_class(wrap(model), **OPTIONS)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-5)
    start = time.perf_counter()
    output = loss(batch.copy())
    torch.stack([getattr(output, name) for name in LOSSES]).sum().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step()
    seconds = time.perf_counter() - start
    shown = {name: getattr(output, name).detach() for name in (*LOSSES, *METRICS)}
    return {**shown, "gradient norm": norm}, seconds


def main() -> None:
    """Print the table."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    console = Console()
    sampler = tiny_llama(VOCAB, hidden=64)
    batch = sample(sampler, reference=moved(sampler, 0.05))
    policy = moved(sampler, 0.5)
    rows = f"{PROMPTS * GROUP} responses of {RESPONSE_LENGTH} tokens, vocabulary {VOCAB}"
    for name in ("GRPOLoss", "DAPO", "CISPOLoss"):
        classes = {"ours": getattr(grpo, name), "TorchRL": getattr(torchrl_losses, name)}
        for loss_class in classes.values():
            optimisation_step(loss_class, policy, batch)  # first calls load and compile
        (ours, our_time), (theirs, their_time) = (
            optimisation_step(loss_class, policy, batch) for loss_class in classes.values()
        )
        table = Table(title=f"{name}: {rows}", title_justify="left")
        for column in ("", "ours", "TorchRL", "difference"):
            table.add_column(column, justify="left" if not column else "right")
        for key in ours:
            difference = (ours[key] - theirs[key]).item()
            table.add_row(key, f"{ours[key]:.6f}", f"{theirs[key]:.6f}", f"{difference:.1e}")
        speed = f"{their_time / our_time:.1f}x"
        table.add_row("step, ms", f"{our_time * 1e3:.0f}", f"{their_time * 1e3:.0f}", speed)
        console.print(table)


if __name__ == "__main__":
    main()
