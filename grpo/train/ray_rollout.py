"""Rollouts in Ray actors: a RayLLMCollector samples, a RayReplayBuffer makes the advantages.

The first actor has the environment and a copy of the model, which is sent the trainer's weights
after each iteration; it writes to the second through `buffer.client()`. What a checkpoint needs of
the actors is kept on the trainer's side, as of the last batch, so that one can be saved when an
actor is gone.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import nn
from torchrl._utils import timeit
from torchrl.checkpoint import GlobalRNGState
from torchrl.collectors.llm import RayLLMCollector
from torchrl.data import (
    Bounded,
    Composite,
    RayReplayBuffer,
    SamplerWithoutReplacement,
    Unbounded,
)
from torchrl.envs import EnvBase
from torchrl.envs.transforms import Compose
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .collector import (
    GROUP,
    BatchStorage,
    GroupBuffer,
    draw_prompts,
    metrics_of,
    padded_batch,
    put_on_trainers_terms,
    restore_draws,
    rewards_of,
)
from .errors import InputError
from .rollout import Rollout, pad_left
from .tasks import Task

FULL, PROMPT = ("tokens", "full"), ("tokens", "prompt")
ATTENTION, PROMPT_MASK = ("masks", "all_attention_mask"), ("masks", "prompt_mask")
LOG_PROBS = ("log_probs", "full")
KEPT = (FULL, PROMPT, ATTENTION, LOG_PROBS, GROUP, ("next", "reward"), ("next", "done"))
KEPT += ("importance", "rollout_log_probs")  # where there is an importance cap

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
    ) -> None:
        rows = prompts * samples
        super().__init__(batch_size=[rows])
        self.task = task
        self.tokenizer = tokenizer
        self.prompts = prompts
        self.samples = samples
        self.prompt_length = prompt_length
        self.rng: random.Random | None = None
        self.groups = 0
        self.problems = []
        self.metrics: dict[str, float] = {}
        vocab, width = len(tokenizer), 1  # each batch is as wide as its own longest prompt
        self.observation_spec = Composite(
            tokens=Composite(
                prompt=Bounded(0, vocab, (rows, width), dtype=torch.int64), shape=(rows,)
            ),
            masks=Composite(prompt_mask=Unbounded((rows, width), dtype=torch.bool), shape=(rows,)),
            **{GROUP: Unbounded((rows,), dtype=torch.int64)},
            shape=(rows,),
        )
        self.action_spec = Composite(
            tokens=Composite(
                full=Bounded(0, vocab, (rows, width + max_new_tokens), dtype=torch.int64),
                shape=(rows,),
            ),
            shape=(rows,),
        )
        self.reward_spec = Unbounded((rows, 1, 1))

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs) -> TensorDictBase:
        # The collector resets before each batch; also when it is made and after each step
        # (with a tensordict), where a draw would be of no use.
        if self.rng is None or tensordict is not None:
            return self.observation_spec.zero()
        self.problems, prompts, too_long = draw_prompts(
            self.task, self.rng, self.tokenizer, self.prompts, self.prompt_length
        )
        self.metrics = {"prompts_too_long": too_long}
        tokens, mask = pad_left(prompts, self.tokenizer.pad_token_id)
        groups = torch.arange(self.groups, self.groups + self.prompts)
        self.groups += self.prompts
        return TensorDict(
            {
                PROMPT: tokens.repeat_interleave(self.samples, 0),
                PROMPT_MASK: mask.bool().repeat_interleave(self.samples, 0),
                GROUP: groups.repeat_interleave(self.samples),
            },
            batch_size=self.batch_size,
        )

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        width = tensordict[PROMPT].shape[1]
        responses = [
            row[mask].tolist()
            for row, mask in zip(
                tensordict[FULL][:, width:], tensordict[ATTENTION][:, width:], strict=True
            )
        ]
        with timeit("reward"):
            rewards = torch.tensor(rewards_of(self.problems, responses, self.tokenizer))
        self.metrics |= metrics_of(rewards, responses, self.tokenizer)
        return TensorDict(
            {
                **{key: tensordict[key] for key in (PROMPT, PROMPT_MASK, GROUP)},
                "reward": rewards.reshape(-1, 1, 1),
                "done": torch.ones(*self.batch_size, 1, dtype=torch.bool),
            },
            batch_size=self.batch_size,
        )

    def _set_seed(self, seed: int | None) -> None:
        torch.manual_seed(seed)  # the policy samples in the same process
        self.rng = random.Random(seed)

    def get_extra_state(self) -> dict[str, Any]:
        """What the next batch depends on, besides the weights."""
        return {
            "rng": self.rng.getstate(),
            "groups": self.groups,
            "process": GlobalRNGState().state_dict(),
        }

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restore what `get_extra_state` returned."""
        restore_draws(self.rng, state["rng"])
        self.groups = state["groups"]
        GlobalRNGState().load_state_dict(state["process"])

    @property
    def after_batch(self) -> tuple[dict[str, float], dict[str, float], dict[str, Any]]:
        """The metrics of the last batch, its seconds by timer, and the state after it."""
        spent = timeit.todict(percall=False)
        timeit.erase()
        seconds = {timer: spent[timer] for timer in ("reward", "rescore") if timer in spent}
        return self.metrics, seconds, self.state_dict()


class RolloutPolicy(TensorDictModuleBase):
    """A model and the rollout that samples from it."""

    in_keys = [PROMPT, PROMPT_MASK]  # noqa: RUF012
    out_keys = [FULL, ATTENTION, LOG_PROBS]  # noqa: RUF012

    def __init__(
        self,
        model: PreTrainedModel,
        make_rollout: Callable[[PreTrainedModel], tuple[Rollout, Any]],
        *,
        samples: int,
        max_new_tokens: int,
        pad_id: int,
        importance_cap: float | None,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.model = model
        self.samples = samples
        self.max_new_tokens = max_new_tokens
        self.pad_id = pad_id
        self.importance_cap = importance_cap
        self.dtype = dtype
        self.rollout, self.sender = make_rollout(model)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Add a response to each row."""
        if self.sender is not None:  # the model has new weights for each batch
            self.sender.update_weights()
        tokens, mask = tensordict[PROMPT], tensordict[PROMPT_MASK]
        prompts = [
            row[kept].tolist()
            for row, kept in zip(tokens[:: self.samples], mask[:: self.samples], strict=True)
        ]
        responses = self.rollout(prompts, self.samples)
        batch = padded_batch(tokens, mask, responses, self.max_new_tokens, self.pad_id)
        if self.importance_cap is not None:
            with timeit("rescore"):
                put_on_trainers_terms(batch, self.model, self.importance_cap, self.dtype)
        return tensordict.update(batch)


def make_policy(
    model: PreTrainedModel, make_rollout: Callable, device: str, threads: int, **options: Any
) -> RolloutPolicy:
    """The actor's policy, in the actor."""
    torch.set_num_threads(threads)
    return RolloutPolicy(model.to(device), make_rollout, **options)


def select_kept(tensordict: TensorDictBase) -> TensorDictBase:
    """What the loss and the advantages need of a collected batch, as plain tensors."""
    return tensordict.select(*KEPT, strict=False).contiguous()


class RayCollector(RayLLMCollector):
    """Collects one batch after another in an actor; also the trainer's weight sender.

    What happened in the last batch is in `metrics`; `within_rollout` has the seconds of its other
    phases, by timer, which "rollout" includes. Raises what the task, the reward or the rollout
    raises; a `ray.exceptions.RayError` if an actor is lost.
    """

    def __init__(self, make_env: Callable, *, model: PreTrainedModel, seed: int, **options) -> None:
        super().__init__(
            make_env,
            # Without an end it would have no length, and Ray, which asks for the truth of an actor
            # that raises, would lose the error and the actor.
            total_dialog_turns=sys.maxsize,
            # So that the state after a batch determines the next one.
            reset_at_each_iter=True,
            postproc=select_kept,
            **options,
        )
        self.model = model
        try:
            self._call("set_seed", seed)
        except ray.exceptions.ActorDiedError as error:
            # Of a constructor's error Ray keeps only the text, and as it also asks for the truth of
            # an actor that is not there yet, an error of its own after it.
            text, _, _ = str(error).partition("\n\nDuring handling of the above exception")
            cause = text.strip().splitlines()[-1]
            raise InputError(f"--ray: the actor did not start: {cause}") from error
        self._look()

    def _look(self) -> None:
        self.metrics, self.within_rollout, self._state = self._call("getattr_env", "after_batch")

    def next(self) -> None:
        """Have a batch collected and written to the buffer."""
        with timeit("rollout"):
            self._call("next")
        self._look()

    def update_weights(self) -> None:
        """Send the policy's weights to the actor."""
        weights = TensorDict.from_module(nn.ModuleDict({"model": self.model})).data.cpu()
        self._call("update_policy_weights_", weights)

    def state_dict(self) -> dict[str, Any]:
        """The state of the actor's draws and random numbers, after the last batch."""
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._call(
            "load_state_dict", {"env_state_dict": state, "frames": 0, "iter": 0}, strict=False
        )
        self._state = state

    def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        try:
            return ray.get(getattr(self._collector, method).remote(*args, **kwargs))
        except ray.exceptions.RayTaskError as error:
            raise error.cause from error


class ActorBuffer(GroupBuffer):
    """What runs in the buffer's actor."""

    _received = 0

    def extend(self, data: TensorDictBase, **kwargs) -> Any:
        """Write the groups that `data` completes."""
        self._received += len(data)
        return super().extend(data, **kwargs)

    @property
    def write_count(self) -> int:
        """All responses, also those of dropped groups: the trainer counts and saves by it."""
        return self._received

    def state(self) -> dict[str, Any]:
        """What is left of the buffer between iterations, where it is empty."""
        return {"received": self._received, "rng": self._rng.get_state()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        self._received = state["received"]
        self._rng.set_state(state["rng"])


class RayBuffer(RayReplayBuffer):
    """An `ActorBuffer` as the trainer sees it."""

    def __init__(self, *, generator: torch.Generator, **options) -> None:
        super().__init__(replay_buffer_cls=ActorBuffer, generator=generator, **options)
        self._state = {"received": 0, "rng": generator.get_state()}

    def end_iteration(self) -> dict[str, float]:
        """The iteration's metrics; the next one starts."""
        metrics = self.client().end_iteration()
        self._state = self.client().state()
        return metrics

    def dumps(self, path: str | Path) -> None:
        """Save as of the last iteration's end, on this side: the actor's disk may be another."""
        Path(path).mkdir(exist_ok=True)
        torch.save(self._state, Path(path) / "state.pt")

    def loads(self, path: str | Path) -> None:
        """Restore what `dumps` saved."""
        self._state = torch.load(Path(path) / "state.pt")
        self.client().load_state(self._state)


def start_actors(
    *,
    model: PreTrainedModel,
    make_rollout: Callable[[PreTrainedModel], tuple[Rollout, Any]],
    make_env: Callable[[], ProblemEnv],
    make_transforms: Callable[[], Compose],
    rows: int,
    mini_batch: int,
    seed: int,
    **policy_options: Any,
) -> tuple[RayCollector, RayBuffer]:
    """The collector and the buffer that it writes to."""
    if not ray.is_initialized():
        ray.init(
            runtime_env={"env_vars": {"LIST_TO_STACK": "1"}},
            include_dashboard=False,
            log_to_driver=False,
            logging_level="warning",
        )
        # Else Ray prints a paragraph for each worker that dies, whatever log_to_driver says.
        ray._private.worker._worker_logs_enabled = False
    buffer = RayBuffer(
        storage=partial(BatchStorage, rows),
        sampler=SamplerWithoutReplacement,
        batch_size=mini_batch,
        transform_factory=make_transforms,
        generator=torch.Generator().manual_seed(seed),
        remote_config={"num_cpus": BUFFER_CPUS},
    )
    device = next(model.parameters()).device.type
    collector = RayCollector(
        make_env,
        model=model,
        seed=seed,
        policy_factory=partial(
            make_policy, copy.deepcopy(model).cpu(), make_rollout, device, **policy_options
        ),
        dialog_turns_per_batch=rows,
        replay_buffer=buffer.client(),
        remote_config={"num_cpus": COLLECTOR_CPUS, "num_gpus": int(device == "cuda")},
    )
    return collector, buffer
