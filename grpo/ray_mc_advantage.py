"""MCAdvantage with its queues and counters in a Ray actor."""

from __future__ import annotations

import contextlib

from tensordict import NestedKey

from .group_ledger import GroupLedger, HandedOut
from .mc_advantage import MCAdvantage


class RayMCAdvantage(MCAdvantage):
    """`MCAdvantage` for writers all over a Ray cluster that share groups.

    Takes the place of `torchrl.objectives.llm.RayMCAdvantage`. The writers compute advantages; a
    Ray actor holds queues and counters. With a `RayReplayBuffer`, whose actor runs its transform,
    pass `transform_factory=MCAdvantage` to it instead.

    Args:
        grpo_size, prompt_key, rewards_key, advantage_key, done_key, verbose: see `MCAdvantage`.

    Keyword Args:
        ray_init_config: arguments of `ray.init`, where Ray is not initialised yet.
        remote_config: arguments of `ray.remote` for the actor. Default `{"num_cpus": 1}`.
        actor_name: name of the actor. One that exists under this name is used as it is, with the
            rules it was made with. It lives as long as the transform that made it, or, with
            `{"lifetime": "detached"}` in `remote_config`, until it is killed.
        others: see `MCAdvantage`.

    Raises:
        RuntimeError: Ray is not installed.
    """

    def __init__(
        self,
        grpo_size: int,
        prompt_key: NestedKey = "query",
        rewards_key: NestedKey = ("next", "reward"),
        advantage_key: NestedKey = "advantage",
        done_key: NestedKey = ("next", "done"),
        verbose: bool = False,
        *,
        ray_init_config: dict | None = None,
        remote_config: dict | None = None,
        actor_name: str | None = None,
        **kwargs,
    ) -> None:
        super().__init__(
            grpo_size, prompt_key, rewards_key, advantage_key, done_key, verbose, **kwargs
        )
        ray = _import_ray()
        if not ray.is_initialized():
            ray.init(**(ray_init_config or {}))
        actor_class = ray.remote(**({"num_cpus": 1} if remote_config is None else remote_config))(
            _LedgerActor
        )
        self._owns_actor = actor_name is None
        if actor_name is None:
            actor = actor_class.remote(self._ledger)
        else:
            actor = actor_class.options(name=actor_name, get_if_exists=True).remote(self._ledger)
        self._ledger = _RayLedger(actor)

    @property
    def is_shared(self) -> bool:
        """Whether queues and counters are in a process that several writers share."""
        return True

    def share_memory_(self) -> RayMCAdvantage:
        """Returns self: the state is shared already."""
        return self

    def close(self) -> None:
        """Let go of the actor; end it unless others may use it by its name."""
        if self._ledger is not None and self._owns_actor:
            with contextlib.suppress(RuntimeError, ValueError):
                _import_ray().kill(self._ledger.actor)
        self._ledger = None

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, actor={self._ledger and self._ledger.actor})"


class _LedgerActor:
    def __init__(self, ledger: GroupLedger) -> None:
        self._ledger = ledger

    def call(self, method: str, *args):
        return getattr(self._ledger, method)(*args)


class _RayLedger:
    """A GroupLedger in an actor as the writers see it."""

    def __init__(self, actor) -> None:
        self.actor = actor

    def add(self, *arguments) -> HandedOut:
        return self.call("add", *arguments)

    def settle(self, *arguments) -> None:
        self.call("settle", *arguments)

    def call(self, method: str, *args):
        return _import_ray().get(self.actor.call.remote(method, *args))


def _import_ray():
    try:
        import ray
    except ImportError as error:
        raise RuntimeError(
            "RayMCAdvantage requires ray, but ray is not installed. Install it with "
            "`pip install ray`."
        ) from error
    return ray
