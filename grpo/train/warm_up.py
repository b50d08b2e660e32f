"""Supervised steps before the reinforcement: the model learns the form of an answer."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from .collector import draw_prompts
from .errors import InputError
from .rollout import pad_left, positions
from .tasks import Task

IGNORED = -100


def warm_up(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    *,
    steps: int,
    rows: int,
    prompt_length: int,
    max_new_tokens: int,
    learning_rate: float,
    seed: int,
    after_step: Callable[[float], None],
) -> None:
    """`steps` AdamW steps on `rows` right answers each; `after_step(loss)` after every one.

    Prompts longer than `prompt_length` tokens are left out, as in training, and an answer ends
    where a response would.
    """
    rng = random.Random(f"warm-up {seed}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    device = next(model.parameters()).device
    for _ in range(steps):
        problems, prompts, _ = draw_prompts(task, rng, tokenizer, rows, prompt_length)
        texts, targets = [], []
        for problem, prompt in zip(problems, prompts, strict=True):
            if problem.answer is None:
                raise InputError(
                    f"{problem.source}: no answer to learn from; pass --warm-up-steps 0"
                )
            answer = tokenizer(problem.answer, add_special_tokens=False)["input_ids"]
            answer = [*answer, tokenizer.eos_token_id][:max_new_tokens]
            texts.append(prompt + answer)
            targets.append([IGNORED] * len(prompt) + answer)
        tokens, mask = pad_left(texts, tokenizer.pad_token_id, device)
        labels, _ = pad_left(targets, IGNORED, device)
        logits = model(
            tokens, attention_mask=mask, position_ids=positions(mask), use_cache=False
        ).logits[:, :-1]
        loss = nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=IGNORED
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        after_step(loss.item())
