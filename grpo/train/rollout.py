"""Responses sampled from the model in this process, with their log-probs.

Sampling is at temperature 1 over the whole vocabulary, so that the log-probs are the policy's. Each
prompt is read once, whatever the number of responses; a step then scores one token a response.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .errors import InputError


class Responses(NamedTuple):
    """Sampled tokens, a row each, the responses to one prompt next to one another."""

    tokens: list[list[int]]  # the end of turn included
    log_probs: list[list[float]]


# `rollout(prompts, samples)`: that many responses to each prompt, given as its tokens.
Rollout = Callable[[list[list[int]], int], Responses]


class TransformersRollout:
    """Samples from a Hugging Face causal language model."""

    def __init__(
        self, model: nn.Module, *, max_new_tokens: int, end_id: int, pad_id: int, dtype: torch.dtype
    ) -> None:
        self.model = model
        self.max_new_tokens = max_new_tokens
        self.end_id = end_id
        self.pad_id = pad_id
        self.dtype = dtype
        # transformers 5 renamed the argument.
        renamed = "cache" in inspect.signature(model.forward).parameters
        self.cache_argument = "cache" if renamed else "past_key_values"

    @torch.no_grad()
    def __call__(self, prompts: list[list[int]], samples: int) -> Responses:
        """`samples` responses to each prompt."""
        device = next(self.model.parameters()).device
        with torch.amp.autocast(device.type, self.dtype, enabled=self.dtype != torch.float32):
            tokens, log_probs = self._sample(*pad_left(prompts, self.pad_id, device), samples)
        ends = tokens == self.end_id
        lengths = torch.where(ends.any(1), ends.int().argmax(1) + 1, tokens.shape[1]).tolist()
        return Responses(
            [row[:n] for row, n in zip(tokens.tolist(), lengths, strict=True)],
            [row[:n] for row, n in zip(log_probs.tolist(), lengths, strict=True)],
        )

    def _sample(self, prompts: Tensor, mask: Tensor, samples: int) -> tuple[Tensor, Tensor]:
        output = self.model(
            prompts, attention_mask=mask, position_ids=positions(mask), use_cache=True
        )
        cache = getattr(output, self.cache_argument)
        cache.batch_repeat_interleave(samples)
        logits = output.logits[:, -1].repeat_interleave(samples, 0)
        mask = mask.repeat_interleave(samples, 0)
        position = mask.sum(1, keepdim=True)
        tokens, log_probs = [], []
        done = torch.zeros(len(mask), dtype=torch.bool, device=mask.device)
        while True:
            distribution = logits.float().log_softmax(-1)
            # A NaN or an infinity among the logits makes the whole row NaN.
            if bool(distribution[:, 0].isnan().any()):
                raise InputError(
                    "the policy's probabilities are not finite: it has diverged; a lower "
                    "--learning-rate may help"
                )
            token = torch.multinomial(distribution.exp(), 1)
            tokens.append(token)
            log_probs.append(distribution.gather(1, token))
            done = done | (token[:, 0] == self.end_id)
            if len(tokens) == self.max_new_tokens or bool(done.all()):
                return torch.cat(tokens, 1), torch.cat(log_probs, 1)
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
            output = self.model(
                token,
                attention_mask=mask,
                position_ids=position,
                use_cache=True,
                **{self.cache_argument: cache},
            )
            logits = output.logits[:, -1]
            position = position + 1


def pad_left(
    rows: list[list[int]], pad_id: int, device: torch.device | None = None
) -> tuple[Tensor, Tensor]:
    """[B, T] tokens and their attention mask."""
    width = max(map(len, rows))
    tokens = torch.tensor([[pad_id] * (width - len(row)) + row for row in rows], device=device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
    return tokens, mask


def positions(mask: Tensor) -> Tensor:
    """Position of each token in its row, padding not counted."""
    return (mask.cumsum(-1) - 1).clamp_min(0)


@torch.no_grad()
def score(model: nn.Module, tokens: Tensor, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, T] fp32 log-probs of `tokens` given those before them; 0 for the first."""
    with torch.amp.autocast(tokens.device.type, dtype, enabled=dtype != torch.float32):
        logits = model(
            tokens, attention_mask=mask, position_ids=positions(mask), use_cache=False
        ).logits
    log_probs = [
        -nn.functional.cross_entropy(row[:-1].float(), target[1:], reduction="none")
        for row, target in zip(logits, tokens, strict=True)  # row by row: fp32 logits are large
    ]
    return nn.functional.pad(torch.stack(log_probs), (1, 0))


def context_length(model: PreTrainedModel) -> int | None:
    """The longest sequence that the model takes, in tokens; None where it does not say."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)
