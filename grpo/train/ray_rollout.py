"""Rollouts in a Ray actor: RayLLMCollector samples, a RayReplayBuffer makes the advantages.

The actor has a copy of the model, which is sent the trainer's weights after each iteration.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from functools import partial

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import nn
from torchrl.collectors.llm import RayLLMCollector
from torchrl.data import (
    Bounded,
    Composite,
    LazyTensorStorage,
    RayReplayBuffer,
    SamplerWithoutReplacement,
    Unbounded,
)
from torchrl.envs import EnvBase
from torchrl.envs.transforms import Compose
from transformers import PreTrainedTokenizerBase

from .collector import GROUP, draw_prompts, padded_batch, rewards_of
from .rollout import pad_left
from .tasks import Task

FULL, PROMPT = ("tokens", "full"), ("tokens", "prompt")
ATTENTION, LOG_PROBS = ("masks", "all_attention_mask"), ("log_probs", "full")
PROMPT_MASK = ("masks", "prompt_mask")
KEPT = (FULL, PROMPT, ATTENTION, LOG_PROBS, GROUP, ("next", "reward"), ("next", "done"))

# Shares of a core: the actors work by turns with the trainer.
COLLECTOR_CPUS = 0.5
BUFFER_CPUS = 0.3


class ProblemEnv(EnvBase):
    """One turn: a prompt is given, a response is rewarded. The rows of a group have one prompt."""

    def __init__(
        self,
        task: Task,
        tokenizer: PreTrainedTokenizerBase,
        *,
        prompts: int,
        samples: int,
        prompt_length: int,
        max_new_tokens: int,
        seed: int,
    ) -> None:
        rows = prompts * samples
        super().__init__(batch_size=[rows])
        self.task = task
        self.tokenizer = tokenizer
        self.prompts = prompts
        self.samples = samples
        self.prompt_length = prompt_length
        self.rng = random.Random(seed)
        self.problems = []
        self.groups = seed << 32  # apart from those of another actor
        vocab = len(tokenizer)
        self.observation_spec = Composite(
            tokens=Composite(
                prompt=Bounded(0, vocab, (rows, prompt_length), dtype=torch.int64), shape=(rows,)
            ),
            masks=Composite(
                prompt_mask=Unbounded((rows, prompt_length), dtype=torch.bool), shape=(rows,)
            ),
            **{GROUP: Unbounded((rows,), dtype=torch.int64)},
            shape=(rows,),
        )
        self.action_spec = Composite(
            tokens=Composite(
                full=Bounded(0, vocab, (rows, prompt_length + max_new_tokens), dtype=torch.int64),
                shape=(rows,),
            ),
            shape=(rows,),
        )
        self.reward_spec = Unbounded((rows, 1, 1))

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs) -> TensorDictBase:
        self.problems, prompts, _ = draw_prompts(
            self.task, self.rng, self.tokenizer, self.prompts, self.prompt_length
        )
        tokens, mask = pad_left(prompts, self.tokenizer.pad_token_id, width=self.prompt_length)
        groups = torch.arange(self.groups, self.groups + self.prompts)
        self.groups += self.prompts
        return TensorDict(
            {
                PROMPT: tokens.repeat_interleave(self.samples, 0),
                PROMPT_MASK: mask.bool().repeat_interleave(self.samples, 0),
                GROUP: groups.repeat_interleave(self.samples),
                "done": torch.zeros(*self.batch_size, 1, dtype=torch.bool),
            },
            batch_size=self.batch_size,
        )

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        responses = [
            row[mask].tolist()
            for row, mask in zip(
                tensordict[FULL][:, self.prompt_length :],
                tensordict[ATTENTION][:, self.prompt_length :],
                strict=True,
            )
        ]
        rewards = rewards_of(self.problems, responses, self.tokenizer)
        return TensorDict(
            {
                **{key: tensordict[key] for key in (PROMPT, PROMPT_MASK, GROUP)},
                "reward": torch.tensor(rewards).reshape(-1, 1, 1),
                "done": torch.ones(*self.batch_size, 1, dtype=torch.bool),
            },
            batch_size=self.batch_size,
        )

    def _set_seed(self, seed: int | None) -> None:
        self.rng.seed(seed)


class RolloutPolicy(TensorDictModuleBase):
    """A model and the sampler that draws from it."""

    in_keys = [PROMPT, PROMPT_MASK]  # noqa: RUF012
    out_keys = [FULL, ATTENTION, LOG_PROBS]  # noqa: RUF012

    def __init__(
        self, model: nn.Module, make_rollout: Callable, *, samples: int, max_new_tokens: int
    ) -> None:
        super().__init__()
        self.model = model
        self.samples = samples
        self.max_new_tokens = max_new_tokens
        self.rollout = make_rollout(model)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Add a response to each row."""
        tokens, mask = tensordict[PROMPT], tensordict[PROMPT_MASK]
        prompts = [
            row[kept].tolist()
            for row, kept in zip(tokens[:: self.samples], mask[:: self.samples], strict=True)
        ]
        responses = self.rollout(prompts, self.samples)
        batch = padded_batch(tokens, mask, responses, self.max_new_tokens, self.rollout.pad_id)
        return tensordict.update(batch)


class RaySender:
    """Sends the trainer's weights to the rollout actor."""

    def __init__(self, collector: RayLLMCollector, policy: RolloutPolicy) -> None:
        self.collector = collector
        self.policy = policy

    def update_weights(self) -> None:
        """Called by the trainer after each iteration."""
        weights = TensorDict.from_module(self.policy).data.cpu()
        self.collector.update_policy_weights_(weights)


def select_kept(tensordict: TensorDictBase) -> TensorDictBase:
    """What the loss and the advantages need of a collected batch, as plain tensors."""
    return tensordict.select(*KEPT).contiguous()


def make_policy(
    model: nn.Module, make_rollout: Callable, seed: int, threads: int, **sizes: int
) -> RolloutPolicy:
    """The actor's policy, in the actor."""
    torch.manual_seed(seed)
    torch.set_num_threads(threads)
    return RolloutPolicy(model, make_rollout, **sizes)


def start_rollout_actor(
    *,
    model: nn.Module,
    make_rollout: Callable[[nn.Module], Callable],
    make_env: Callable[[], ProblemEnv],
    make_transforms: Callable[[], Compose],
    rows: int,
    mini_batch: int,
    samples: int,
    max_new_tokens: int,
    seed: int,
    threads: int,
) -> tuple[RayLLMCollector, RayReplayBuffer, RaySender]:
    """The actors, and what sends them weights."""
    config = {
        "runtime_env": {"env_vars": {"LIST_TO_STACK": "1"}},
        "include_dashboard": False,
        "log_to_driver": False,
    }
    buffer = RayReplayBuffer(
        storage=partial(LazyTensorStorage, rows),
        sampler=SamplerWithoutReplacement,
        batch_size=mini_batch,
        transform_factory=make_transforms,
        ray_init_config=config,
        remote_config={"num_cpus": BUFFER_CPUS},
    )
    sizes = {"samples": samples, "max_new_tokens": max_new_tokens}
    actors_model = copy.deepcopy(model).cpu()
    collector = RayLLMCollector(
        make_env,
        policy_factory=partial(make_policy, actors_model, make_rollout, seed, threads, **sizes),
        dialog_turns_per_batch=rows,
        replay_buffer=buffer.client(),
        postproc=select_kept,
        ray_init_config=config,
        remote_config={"num_cpus": COLLECTOR_CPUS},
    )
    return collector, buffer, RaySender(collector, RolloutPolicy(model, make_rollout, **sizes))
