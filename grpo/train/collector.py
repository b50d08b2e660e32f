"""Draws problems, has them answered and rewarded, and makes the batch that the loss reads."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torchrl._utils import timeit
from torchrl.envs.transforms import Transform
from transformers import PreTrainedTokenizerBase

from .errors import InputError
from .rollout import Responses, pad_left, score
from .tasks import Problem, Task

GROUP = "group"  # one number for all responses to one prompt
Rollout = Callable[[list[list[int]], int], Responses]

# Draws in a row that may be too long for the context before the task is given up.
MOST_UNUSABLE_DRAWS = 1000


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    """Tokens of a prompt, as the user's turn where the tokenizer has a chat template."""
    if tokenizer.chat_template is None:
        return tokenizer(prompt)["input_ids"]
    turns = [{"role": "user", "content": prompt}]
    tokens = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=True)
    return tokens if isinstance(tokens, list) else tokens["input_ids"]


class RolloutCollector:
    """Yields one batch of `prompts` x `samples` responses after another.

    What happened in the last one is in `metrics`.
    """

    init_random_frames = 0

    def __init__(
        self,
        *,
        task: Task,
        tokenizer: PreTrainedTokenizerBase,
        rollout: Rollout,
        policy: nn.Module,
        reference: nn.Module | None,
        prompts: int,
        samples: int,
        prompt_length: int,
        max_new_tokens: int,
        importance_cap: float | None,
        dtype: torch.dtype,
        seed: int,
    ) -> None:
        self.task = task
        self.tokenizer = tokenizer
        self.rollout = rollout
        self.policy = policy
        self.reference = reference
        self.prompts = prompts
        self.samples = samples
        self.prompt_length = prompt_length
        self.max_new_tokens = max_new_tokens
        self.importance_cap = importance_cap
        self.dtype = dtype
        self.rng = random.Random(seed)
        self.groups = 0
        self.metrics: dict[str, float] = {}

    def __iter__(self) -> Iterator[TensorDictBase]:
        while True:
            yield self.collect()

    def collect(self) -> TensorDictBase:
        """One batch: [prompts * samples]."""
        problems, prompts, too_long = self._draw()
        with timeit("rollout"):
            responses = self.rollout(prompts, self.samples)
        with timeit("reward"):
            rewards = self._reward(problems, responses)
        batch = self._batch(prompts, responses, rewards)
        lengths = [len(row) for row in responses.tokens]
        self.metrics = {
            "response_tokens": sum(lengths),
            "response_length": sum(lengths) / len(lengths),
            "solved": sum(reward >= 1 for reward in rewards) / len(rewards),
            "nonfinite_rewards": sum(not math.isfinite(reward) for reward in rewards),
            "empty_responses": sum(
                all(token == self.tokenizer.eos_token_id for token in row)
                for row in responses.tokens
            ),
            "prompts_too_long": too_long,
        }
        with timeit("rescore"):
            self._compare_with_trainer(batch)
        return batch

    def _draw(self) -> tuple[list[Problem], list[list[int]], int]:
        problems, prompts, too_long = [], [], 0
        while len(prompts) < self.prompts:
            problem = self.task(self.rng)
            prompt = encode_prompt(self.tokenizer, problem.prompt)
            if len(prompt) > self.prompt_length:
                too_long += 1
                if too_long == MOST_UNUSABLE_DRAWS:
                    raise InputError(
                        f"{too_long} prompts in a row are longer than {self.prompt_length} tokens, "
                        f"which is all that the model's context has room for"
                    )
                continue
            problems.append(problem)
            prompts.append(prompt)
        return problems, prompts, too_long

    def _reward(self, problems: list[Problem], responses: Responses) -> list[float]:
        texts = self.tokenizer.batch_decode(responses.tokens, skip_special_tokens=True)
        rewards = []
        for index, text in enumerate(texts):
            problem = problems[index // self.samples]
            try:
                rewards.append(float(problem.reward(text)))
            except Exception as error:
                raise InputError(
                    f"the reward of {problem.source} failed on the response {text!r}: "
                    f"{type(error).__name__}: {error}"
                ) from error
        return rewards

    def _batch(
        self, prompts: list[list[int]], responses: Responses, rewards: list[float]
    ) -> TensorDict:
        rows = len(responses.tokens)
        tokens, mask = pad_left(prompts, self.tokenizer.pad_token_id, width=self.prompt_length)
        tokens, mask = (t.repeat_interleave(self.samples, 0) for t in (tokens, mask))
        full = torch.full(
            (rows, self.prompt_length + self.max_new_tokens), self.tokenizer.pad_token_id
        )
        full[:, : self.prompt_length] = tokens
        log_probs = torch.zeros(full.shape)
        attention = torch.zeros(full.shape, dtype=torch.bool)
        attention[:, : self.prompt_length] = mask.bool()
        for row, (response, scores) in enumerate(zip(*responses, strict=True)):
            span = slice(self.prompt_length, self.prompt_length + len(response))
            full[row, span] = torch.tensor(response)
            log_probs[row, span] = torch.tensor(scores)
            attention[row, span] = True
        groups = torch.arange(self.groups, self.groups + len(prompts))
        self.groups += len(prompts)
        return TensorDict(
            {
                "tokens": {"full": full, "prompt": tokens},
                "masks": {"all_attention_mask": attention},
                "log_probs": {"full": log_probs},
                GROUP: groups.repeat_interleave(self.samples),
                "next": {
                    "reward": torch.tensor(rewards).reshape(rows, 1, 1),
                    "done": torch.ones(rows, 1, dtype=torch.bool),
                },
            },
            batch_size=[rows],
        )

    def _compare_with_trainer(self, batch: TensorDict) -> None:
        """How far the rollout's log-probs are from the trainer's, and what follows from it."""
        wanted = slice(None)
        if self.reference is None and self.importance_cap is None:
            wanted = slice(0, max(1, len(batch) // 4))  # a sample of rows is enough to watch
        rows = trim(batch[wanted])
        width = rows["tokens", "full"].shape[1]
        left = batch["tokens", "prompt"].shape[1] - rows["tokens", "prompt"].shape[1]

        def full_width(values: Tensor) -> Tensor:
            right = batch["tokens", "full"].shape[1] - left - width
            return nn.functional.pad(values.cpu(), (left, right))

        device = next(self.policy.parameters()).device
        inputs = [rows[key].to(device) for key in (("tokens", "full"), ("masks", ATTENTION))]
        inputs[1] = inputs[1].long()
        response = rows["masks", ATTENTION].clone()
        response[:, : rows["tokens", "prompt"].shape[1]] = False
        ours = score(self.policy, *inputs, self.dtype).cpu()
        difference = torch.where(response, rows["log_probs", "full"] - ours, 0.0)
        self.metrics["rollout_difference"] = float(difference.abs().sum() / response.sum())
        self.metrics["rollout_difference_max"] = float(difference.abs().max())
        if self.reference is not None:
            theirs = score(self.reference, *inputs, self.dtype)
            batch["next", "ref_log_probs", "full"] = full_width(theirs)
        if self.importance_cap is not None:
            batch["importance"] = full_width((-difference).exp().clamp_max(self.importance_cap))
            batch["log_probs", "full"] = full_width(torch.where(response, ours, 0.0))

    # What Trainer asks of a collector

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed the draws of problems."""
        self.rng.seed(seed)
        return seed

    def state_dict(self) -> dict[str, Any]:
        """The state of the draws."""
        return {"rng": self.rng.getstate(), "groups": self.groups}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        version, words, gauss = state["rng"]
        self.rng.setstate((version, tuple(words), gauss))
        self.groups = state["groups"]

    def update_policy_weights_(self, *args: Any, **kwargs: Any) -> None:
        """The rollout shares the policy's weights, or is sent them by the trainer's sender."""

    def shutdown(self) -> None:
        """Nothing to stop."""


ATTENTION = "all_attention_mask"


def trim(batch: TensorDictBase) -> TensorDictBase:
    """The batch without the columns that are padding in all rows, left and right."""
    used = batch["masks", ATTENTION].any(0).nonzero()
    first, last = (int(used[0]), int(used[-1]) + 1) if len(used) else (0, 1)
    width = batch["tokens", "full"].shape[1]
    trimmed = batch.copy()
    for key in batch.keys(True, True):
        value = batch[key]
        if key == ("tokens", "prompt"):
            trimmed[key] = value[:, first:]
        elif value.ndim == 2 and value.shape[1] == width:
            trimmed[key] = value[:, first:last]
    return trimmed


class TrimAndWeigh(Transform):
    """On sampling: drop padding columns; weigh the advantage by the importance ratio, if any."""

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """A micro-batch as the loss reads it."""
        batch = trim(tensordict)
        if "importance" in batch:
            batch["advantage"] = batch["advantage"] * batch.pop("importance").unsqueeze(-1)
        return batch
