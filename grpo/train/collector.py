"""Draws problems, has them answered and rewarded, and makes the batch that the loss reads."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torchrl._utils import timeit
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.envs.transforms import Transform
from transformers import PreTrainedTokenizerBase

from .errors import InputError, blamed_on, quoted
from .rollout import Responses, Rollout, pad_left, score
from .tasks import Problem, Task, reward_of

GROUP = "group"  # one number for all responses to one prompt

# Draws in a row that may be too long before the task is given up.
MOST_UNUSABLE_DRAWS = 1000


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    """Tokens of a prompt, as the user's turn where the tokenizer has a chat template."""
    if tokenizer.chat_template is None:
        tokens = tokenizer(prompt)["input_ids"]
    else:
        turns = [{"role": "user", "content": prompt}]
        tokens = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=True)
        tokens = tokens if isinstance(tokens, list) else tokens["input_ids"]
    if not tokens:
        raise ValueError("it has no tokens")
    return tokens


def prompt_tokens(tokenizer: PreTrainedTokenizerBase, problem: Problem) -> list[int]:
    """`encode_prompt`; what fails in it is an InputError that names the problem."""
    with blamed_on(f"{problem.source}: the prompt {quoted(problem.prompt)}"):
        return encode_prompt(tokenizer, problem.prompt)


def draw_prompts(
    task: Task, rng: random.Random, tokenizer: PreTrainedTokenizerBase, count: int, longest: int
) -> tuple[list[Problem], list[list[int]], int]:
    """`count` problems, their prompts' tokens, and how many were left out as too long."""
    problems, prompts, too_long, in_a_row = [], [], 0, 0
    while len(prompts) < count:
        problem = task(rng)
        prompt = prompt_tokens(tokenizer, problem)
        if len(prompt) <= longest:
            problems.append(problem)
            prompts.append(prompt)
            in_a_row = 0
            continue
        too_long += 1
        in_a_row += 1
        if in_a_row == MOST_UNUSABLE_DRAWS:
            raise InputError(
                f"{problem.source}: {in_a_row} prompts in a row are longer than {longest} tokens, "
                "which is all that --max-new-tokens leaves of the model's context"
            )
    return problems, prompts, too_long


def decode_responses(tokenizer: PreTrainedTokenizerBase, responses: list[list[int]]) -> list[str]:
    """The texts that are rewarded."""
    return tokenizer.batch_decode(responses, skip_special_tokens=True)


def rewards_of(
    problems: list[Problem], responses: list[list[int]], tokenizer: PreTrainedTokenizerBase
) -> list[float]:
    """The reward of each response; the responses to one problem stand together."""
    samples = len(responses) // len(problems)
    texts = decode_responses(tokenizer, responses)
    return [reward_of(problems[index // samples], text) for index, text in enumerate(texts)]


def padded_batch(
    prompts: Tensor, prompt_mask: Tensor, responses: Responses, max_new_tokens: int, pad_id: int
) -> TensorDict:
    """Prompts (padded on the left, a row a response) and responses (on the right), [B, P + T]."""
    rows, prompt_length = prompts.shape
    full = torch.full((rows, prompt_length + max_new_tokens), pad_id)
    log_probs = torch.zeros(full.shape)
    attention = torch.zeros(full.shape, dtype=torch.bool)
    full[:, :prompt_length] = prompts
    attention[:, :prompt_length] = prompt_mask.bool()
    for row, (response, scores) in enumerate(zip(*responses, strict=True)):
        span = slice(prompt_length, prompt_length + len(response))
        full[row, span] = torch.tensor(response)
        log_probs[row, span] = torch.tensor(scores)
        attention[row, span] = True
    return TensorDict(
        {
            "tokens": {"full": full, "prompt": prompts},
            "masks": {"all_attention_mask": attention},
            "log_probs": {"full": log_probs},
        },
        batch_size=[rows],
    )


def response_mask(batch: TensorDictBase) -> Tensor:
    """[B, P + T]: the tokens of the response."""
    mask = batch["masks", "all_attention_mask"].clone()
    mask[:, : batch["tokens", "prompt"].shape[1]] = False
    return mask


def metrics_of(
    rewards: Tensor, responses: list[list[int]], tokenizer: PreTrainedTokenizerBase
) -> dict[str, float]:
    """What a batch says of the policy."""
    return {
        "solved": float((rewards >= 1).float().mean()),
        "nonfinite_rewards": int((~rewards.isfinite()).sum()),
        "empty_responses": sum(
            all(token == tokenizer.eos_token_id for token in row) for row in responses
        ),
    }


def put_on_trainers_terms(
    batch: TensorDictBase, policy: nn.Module, importance_cap: float, dtype: torch.dtype
) -> None:
    """The trainer's log-probs as the old ones; how likelier each token was to the trainer."""
    device = next(policy.parameters()).device
    ours = score(
        policy,
        batch["tokens", "full"].to(device),
        batch["masks", "all_attention_mask"].to(device).long(),
        dtype,
    ).cpu()
    response = response_mask(batch)
    log_ratio = torch.where(response, ours - batch["log_probs", "full"], 0.0)
    batch["importance"] = log_ratio.exp().clamp_max(importance_cap)
    batch["rollout_log_probs"] = batch["log_probs", "full"]
    batch["log_probs", "full"] = torch.where(response, ours, 0.0)


def restore_draws(rng: random.Random, state: list) -> None:
    """What `rng.getstate()` returned, and a checkpoint has kept as lists."""
    version, words, gauss = state
    rng.setstate((version, tuple(words), gauss))


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
        prompts: int,
        samples: int,
        prompt_length: int,  # the longest that is taken
        max_new_tokens: int,
        importance_cap: float | None,
        dtype: torch.dtype,
        seed: int,
    ) -> None:
        self.task = task
        self.tokenizer = tokenizer
        self.rollout = rollout
        self.policy = policy
        self.prompts = prompts
        self.samples = samples
        self.prompt_length = prompt_length
        self.max_new_tokens = max_new_tokens
        self.importance_cap = importance_cap
        self.dtype = dtype
        self.rng = random.Random(seed)
        self.groups = 0
        self.metrics: dict[str, float] = {}
        self.within_rollout: dict[str, float] = {}  # each phase is timed here, by itself

    def __iter__(self) -> Iterator[TensorDictBase]:
        while True:
            before = self.state_dict()
            try:
                batch = self.collect()
            except Exception:
                self.load_state_dict(before)  # a resumed run draws the same problems
                raise
            yield batch

    def collect(self) -> TensorDictBase:
        """One batch: [prompts * samples]."""
        problems, prompts, too_long = draw_prompts(
            self.task, self.rng, self.tokenizer, self.prompts, self.prompt_length
        )
        with timeit("rollout"):
            responses = self.rollout(prompts, self.samples)
        with timeit("reward"):
            rewards = torch.tensor(rewards_of(problems, responses.tokens, self.tokenizer))
        self.metrics = metrics_of(rewards, responses.tokens, self.tokenizer)
        self.metrics["prompts_too_long"] = too_long
        pad_id = self.tokenizer.pad_token_id
        tokens, mask = pad_left(prompts, pad_id)
        batch = padded_batch(
            tokens.repeat_interleave(self.samples, 0),
            mask.repeat_interleave(self.samples, 0),
            responses,
            self.max_new_tokens,
            pad_id,
        )
        groups = torch.arange(self.groups, self.groups + self.prompts)
        self.groups += self.prompts
        batch[GROUP] = groups.repeat_interleave(self.samples)
        batch["next", "reward"] = rewards.reshape(-1, 1, 1)
        batch["next", "done"] = torch.ones(len(rewards), 1, dtype=torch.bool)
        if self.importance_cap is not None:
            with timeit("rescore"):
                put_on_trainers_terms(batch, self.policy, self.importance_cap, self.dtype)
        return batch

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
        restore_draws(self.rng, state["rng"])
        self.groups = state["groups"]

    def update_policy_weights_(self, *args: Any, **kwargs: Any) -> None:
        """The rollout shares the policy's weights, or is sent them by the trainer's sender."""

    def shutdown(self) -> None:
        """Nothing to stop."""


class BatchStorage(LazyTensorStorage):
    """Holds one batch at a time, each as wide as its own longest prompt.

    A fixed width would have to be that of the model's context, whatever the prompts need of it.
    """

    def _empty(self) -> None:
        super()._empty()
        # As before the first batch, to the structure of which torchrl's storage holds on.
        self.initialized = False
        self._storage = self._storage_keys = self._total_shape_value = None


def trim(batch: TensorDictBase) -> TensorDictBase:
    """The batch without the columns that are padding in all rows, left and right."""
    used = batch["masks", "all_attention_mask"].any(0).nonzero()
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


class GroupBuffer(ReplayBuffer):
    """The groups of an iteration. The first of its transforms is an MCAdvantage."""

    def end_iteration(self) -> dict[str, float]:
        """The iteration's metrics; the next one starts."""
        advantages = self.transform[0]
        metrics = {"dropped_groups": advantages.dropped_groups}
        advantages.reset_stats()
        return metrics


class TrainerScores:
    """What only the trainer can say of a micro-batch, before the loss sees it.

    Adds the reference model's log-probs, where there is one; and compares, in the first
    micro-batch of an iteration, the rollout's log-probs with those of the policy that it sampled
    from.
    """

    def __init__(self, policy: nn.Module, reference: nn.Module | None, dtype: torch.dtype) -> None:
        self.policy = policy
        self.reference = reference
        self.dtype = dtype
        self.metrics: dict[str, float] = {}
        self._tokens: list[Tensor] = []

    def __call__(self, batch: TensorDictBase) -> TensorDictBase:
        tokens, attention = batch["tokens", "full"], batch["masks", "all_attention_mask"].long()
        response = response_mask(batch)
        first_of_iteration = not self._tokens
        self._tokens.append(response.sum())
        with timeit("rescore"):
            if first_of_iteration:
                sampled = batch.get("rollout_log_probs", batch["log_probs", "full"])
                difference = sampled - score(self.policy, tokens, attention, self.dtype)
                difference = torch.where(response, difference, 0.0).abs()
                self.metrics["rollout_difference"] = float(difference.sum() / response.sum())
                self.metrics["rollout_difference_max"] = float(difference.max())
            if self.reference is not None:
                batch["next", "ref_log_probs", "full"] = score(
                    self.reference, tokens, attention, self.dtype
                )
        return batch

    def end_iteration(self, epochs: int) -> dict[str, float]:
        """The iteration's metrics; the next one starts."""
        tokens = float(sum(self._tokens)) / epochs
        self._tokens = []
        return {**self.metrics, "response_tokens": tokens}
