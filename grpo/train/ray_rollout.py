"""Responses sampled in a Ray actor, which is sent the policy's weights after each iteration.

The actor has a copy of the model and a rollout of its own on it. Problems, rewards and advantages
stay with the trainer, as without Ray.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import ray
import torch
from torch import nn
from torchrl.checkpoint import GlobalRNGState

from .rollout import Responses, Rollout

# A share of a core: the actor works by turns with the trainer.
CPUS = 0.5


class Sampler:
    """What runs in the actor."""

    def start(
        self, model: nn.Module, device: str, make_rollout: Callable, seed: int, threads: int
    ) -> dict[str, Any]:
        """The state of the random numbers. Not in `__init__`, of which Ray hides the errors."""
        torch.manual_seed(seed)
        torch.set_num_threads(threads)
        self.model = model.to(device)
        self.rollout, self.sender = make_rollout(self.model)
        return GlobalRNGState().state_dict()

    def sample(self, prompts: list[list[int]], samples: int) -> tuple[Responses, dict[str, Any]]:
        """Responses, and the state of the random numbers after them."""
        return self.rollout(prompts, samples), GlobalRNGState().state_dict()

    def load_weights(self, weights: dict[str, torch.Tensor]) -> None:
        """Into the model, and on to its rollout's engine if that has one."""
        self.model.load_state_dict(weights)
        if self.sender is not None:
            self.sender.update_weights()

    def load_random_state(self, state: dict[str, Any]) -> None:
        """What `sample` returned."""
        GlobalRNGState().load_state_dict(state)


class RayRollout:
    """A rollout in an actor; also the trainer's weight sender, and in its checkpoints.

    Raises what the rollout raises; a `ray.exceptions.RayError` if the actor is lost.
    """

    def __init__(
        self,
        model: nn.Module,
        make_rollout: Callable[[nn.Module], tuple[Rollout, Any]],
        *,
        seed: int,
        threads: int,
    ) -> None:
        if not ray.is_initialized():
            ray.init(include_dashboard=False, log_to_driver=False, logging_level="warning")
        self.model = model
        device = next(model.parameters()).device.type
        self._actor = ray.remote(num_cpus=CPUS, num_gpus=int(device == "cuda"))(Sampler).remote()
        # As of the last responses, so that a checkpoint can be saved when the actor is gone.
        self._random_state = self._call(
            "start", copy.deepcopy(model).cpu(), device, make_rollout, seed, threads
        )

    def __call__(self, prompts: list[list[int]], samples: int) -> Responses:
        """`samples` responses to each prompt."""
        responses, self._random_state = self._call("sample", prompts, samples)
        return responses

    def update_weights(self) -> None:
        """Send the policy's weights to the actor."""
        weights = {name: value.cpu() for name, value in self.model.state_dict().items()}
        self._call("load_weights", weights)

    def state_dict(self) -> dict[str, Any]:
        """The state of the actor's random numbers."""
        return self._random_state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._call("load_random_state", state)
        self._random_state = state

    def _call(self, method: str, *arguments: Any) -> Any:
        try:
            return ray.get(getattr(self._actor, method).remote(*arguments))
        except ray.exceptions.RayTaskError as error:
            raise error.cause from error
