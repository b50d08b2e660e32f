"""Group-relative Monte-Carlo advantages, computed as trajectories enter a replay buffer."""

from __future__ import annotations

import operator
import os
import warnings
from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from tensordict import (
    NestedKey,
    TensorDict,
    TensorDictBase,
    is_leaf_nontensor,
    is_tensor_collection,
    lazy_stack,
)
from torchrl._utils import logger
from torchrl.envs.transforms.transforms import Transform
from torchrl.objectives.llm import MCAdvantageSelector as TorchRLSelector

from .by_value import from_bytes, to_bytes
from .group_ledger import (
    COUNTERS,
    FinishedGroup,
    GroupLedger,
    GroupRules,
    LedgerManager,
    SharedLedgerProxy,
    Trajectory,
    failure,
    group_advantages,
)
from .selector import MCAdvantageSelector

LOCAL_QUEUES_VARIABLE = "TORCHRL_MC_ADVANTAGE_LOCAL_QUEUES"


class MCAdvantage(Transform):
    """Collects trajectories by group and writes each complete group with its advantages.

    Takes the place of `torchrl.objectives.llm.MCAdvantage`. On writing to a replay buffer, finished
    trajectories wait in a queue for their group (the prompt, or an identifier stamped by the
    collector). A complete group is written whole:

    * `trajectory_return=None`: rewards are normalised over all steps of all `grpo_size`
      trajectories;
    * `trajectory_return="sum" | "max" | "mean"`: each trajectory has one return R, and all its
      steps the advantage (R - mean) / std over the group.

    With trajectory-level returns, `candidate_group_size > grpo_size` oversamples: from
    `candidate_selection_min_size` candidates on, every arrival is a chance for `candidate_selector`
    to find `grpo_size` whose mean return lies strictly within `keep_return_bounds`; they are
    written, and a full group without such a selection is dropped.

    Statistics are two-pass, centred and in fp64; a group of equal returns has advantages of exactly
    0. A trajectory with a reward that is NaN or infinite is dropped, warned of once and counted in
    `nonfinite_trajectories`; it counts as arrived, so that the rest of its group is not held back.
    Steps after the last finished trajectory of a flat batch are dropped and counted in
    `unfinished_trajectories`. Batches of `[..., time]` are flattened.

    A group that cannot be written (its trajectories have different entries, or the selector raises
    or does not return different indices of candidates) raises a RuntimeError and costs only itself:
    it is dropped and counted in `failed_groups`, and groups completed in the same call come with
    the next one. Where a selector fails before the group is full, the group is kept and tried again
    when its next trajectory arrives.

    Args:
        grpo_size: trajectories written for a group.
        prompt_key: the group: a string, or a tensor, grouped by value.
        rewards_key: rewards, per step.
        advantage_key: where advantages are written, shaped and typed like the rewards (float32 for
            integer rewards), held to that type's finite range.
        done_key: whether the trajectory is done, per step.
        verbose: log what happens.

    Keyword Args:
        trajectory_return: how a trajectory's rewards become its return.
        keep_return_bounds: exclusive bounds on the mean return of what is written.
        candidate_group_size: candidates after which a group is dropped. Default `grpo_size`.
        candidate_selection_min_size: candidates from which on selection is tried. Default
            `grpo_size`.
        candidate_selector: an `MCAdvantageSelector`, or any object with `select` and `in_keys`.
        statistics: whether mean and std are over the `"subset"` that is written or over `"all"`
            candidates.
        advantage: `"std"`: (R - mean) / max(std, 1e-6). `"none"`: R - mean (arXiv 2503.20783).
            `"leave_one_out"`: R minus the mean of the others (arXiv 2402.14740).
        max_pending_groups: with more incomplete groups, the oldest are dropped and counted in
            `evicted_groups` and `evicted_trajectories`.
        max_group_age: seconds after its first trajectory until an incomplete group is dropped, when
            the next trajectory arrives.

    Across processes: `share_memory_`, which `ReplayBuffer.share` calls, moves queues and counters
    to a process of their own. Any number of writers can share one logical group. A writer that is
    killed while it adds a trajectory or puts together a group that it completed costs nothing: the
    group goes to the next writer. With TORCHRL_MC_ADVANTAGE_LOCAL_QUEUES=1
    `share_memory_` does nothing: right for one writer, or where each group has all its trajectories
    from one.

    Raises:
        ValueError: for an argument out of its range or not of its type.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> def trajectory(group, reward):
        ...     return TensorDict(
        ...         query=torch.tensor([group]),
        ...         next=TensorDict(
        ...             reward=torch.tensor([[reward]]), done=torch.ones(1, 1, dtype=torch.bool)
        ...         ).auto_batch_size_(1),
        ...     ).auto_batch_size_(1)
        >>> transform = MCAdvantage(grpo_size=2, trajectory_return="sum")
        >>> transform.inv(trajectory(7, 0.0)) is None
        True
        >>> transform.inv(trajectory(7, 1.0))["advantage"].flatten()
        tensor([-0.7071,  0.7071])
    """

    requires_shared_write_state = True

    def __init__(
        self,
        grpo_size: int,
        prompt_key: NestedKey = "query",
        rewards_key: NestedKey = ("next", "reward"),
        advantage_key: NestedKey = "advantage",
        done_key: NestedKey = ("next", "done"),
        verbose: bool = False,
        *,
        trajectory_return: Literal["sum", "max", "mean"] | None = None,
        keep_return_bounds: tuple[float, float] | None = None,
        candidate_group_size: int | None = None,
        candidate_selection_min_size: int | None = None,
        candidate_selector: TorchRLSelector | None = None,
        statistics: Literal["subset", "all"] = "subset",
        advantage: Literal["std", "none", "leave_one_out"] = "std",
        max_pending_groups: int | None = None,
        max_group_age: float | None = None,
    ) -> None:
        super().__init__()
        grpo_size = _count("grpo_size", grpo_size)
        if trajectory_return not in (None, "sum", "max", "mean"):
            raise ValueError(
                "trajectory_return must be one of 'sum', 'max', 'mean' or None, "
                f"got {trajectory_return!r}."
            )
        if trajectory_return is not None and grpo_size < 2:
            raise ValueError(
                "trajectory_return requires grpo_size >= 2: the group-relative normalization (std "
                "over the group's returns) is undefined for a single trajectory, "
                f"got grpo_size={grpo_size}."
            )
        if grpo_size < 1:
            raise ValueError(f"grpo_size must be at least 1, got {grpo_size}.")
        candidate_group_size = (
            grpo_size
            if candidate_group_size is None
            else _count("candidate_group_size", candidate_group_size)
        )
        if candidate_group_size < grpo_size:
            raise ValueError(
                "candidate_group_size must be greater than or equal to grpo_size, "
                f"got {candidate_group_size=} and {grpo_size=}."
            )
        if candidate_group_size > grpo_size and trajectory_return is None:
            raise ValueError(
                "candidate_group_size > grpo_size requires trajectory_return so candidate "
                "trajectories can be selected by return."
            )
        candidate_selection_min_size = (
            grpo_size
            if candidate_selection_min_size is None
            else _count("candidate_selection_min_size", candidate_selection_min_size)
        )
        if candidate_selection_min_size < grpo_size:
            raise ValueError(
                "candidate_selection_min_size must be greater than or equal to grpo_size, "
                f"got {candidate_selection_min_size=} and {grpo_size=}."
            )
        if candidate_selection_min_size > candidate_group_size:
            raise ValueError(
                "candidate_selection_min_size must be less than or equal to candidate_group_size, "
                f"got {candidate_selection_min_size=} and {candidate_group_size=}."
            )
        if keep_return_bounds is not None:
            if trajectory_return is None:
                raise ValueError(
                    "keep_return_bounds (dynamic sampling) filters on trajectory-level returns: "
                    "set trajectory_return to 'sum', 'max' or 'mean'."
                )
            if len(keep_return_bounds) != 2 or not keep_return_bounds[0] < keep_return_bounds[1]:
                raise ValueError(
                    "keep_return_bounds must be an increasing (low, high) pair, "
                    f"got {keep_return_bounds}."
                )
            keep_return_bounds = float(keep_return_bounds[0]), float(keep_return_bounds[1])
        if statistics not in ("subset", "all"):
            raise ValueError(f"statistics must be 'subset' or 'all', got {statistics!r}.")
        if advantage not in ("std", "none", "leave_one_out"):
            raise ValueError(
                f"advantage must be one of 'std', 'none' or 'leave_one_out', got {advantage!r}."
            )
        if advantage == "leave_one_out" and trajectory_return is None:
            raise ValueError(
                "advantage='leave_one_out' leaves out trajectories: set trajectory_return to "
                "'sum', 'max' or 'mean'."
            )
        if max_pending_groups is not None and _count("max_pending_groups", max_pending_groups) < 1:
            raise ValueError(f"max_pending_groups must be at least 1, got {max_pending_groups}.")
        if max_group_age is not None and not max_group_age > 0:
            raise ValueError(f"max_group_age must be positive seconds, got {max_group_age}.")
        if candidate_selector is None:
            candidate_selector = MCAdvantageSelector()
        self.in_keys = [prompt_key, rewards_key, done_key]
        self.out_keys = [advantage_key]
        self.prompt_key = prompt_key
        self.rewards_key = rewards_key
        self.advantage_key = advantage_key
        self.done_key = done_key
        self.trajectory_return = trajectory_return
        self.statistics = statistics
        self.advantage = advantage
        self._rules = GroupRules(
            grpo_size=grpo_size,
            candidate_group_size=candidate_group_size,
            candidate_selection_min_size=candidate_selection_min_size,
            candidate_selector=candidate_selector,
            keep_return_bounds=keep_return_bounds,
            max_pending_groups=max_pending_groups,
            max_group_age=max_group_age,
            selects=trajectory_return is not None,
            verbose=verbose,
        )
        self._ledger = GroupLedger(self._rules)
        if self._oversampling_is_inert():
            warnings.warn(
                f"candidate_group_size={candidate_group_size} has no effect: without "
                f"keep_return_bounds the first {candidate_selection_min_size} candidates are "
                "always selected from and the group is written. Set keep_return_bounds, or "
                "candidate_selection_min_size to as many candidates as should be waited for.",
                stacklevel=2,
            )
        self._manager = None
        self._warned_of_nonfinite = False

    def _oversampling_is_inert(self) -> bool:
        built_in = (MCAdvantageSelector.select, TorchRLSelector.select)
        return (
            self.candidate_group_size > self.candidate_selection_min_size
            and self.keep_return_bounds is None
            and getattr(type(self.candidate_selector), "select", None) in built_in
        )

    # State

    @property
    def is_shared(self) -> bool:
        """Whether queues and counters are in a process that several writers share."""
        return isinstance(self._ledger, SharedLedgerProxy)

    def share_memory_(self) -> MCAdvantage:
        """Move queues and counters to a process of their own. Returns self."""
        if self.is_shared:
            return self
        if os.environ.get(LOCAL_QUEUES_VARIABLE) == "1":
            logger.info(
                f"MCAdvantage.share_memory_ does nothing because {LOCAL_QUEUES_VARIABLE}=1. A "
                "group with trajectories from several writer processes will not complete."
            )
            return self
        self._manager = LedgerManager()
        self._manager.start()
        self._ledger.replace_payloads(to_bytes)
        self._ledger = self._manager.SharedLedger(self._ledger)
        return self

    def __getstate__(self) -> dict:
        state = super().__getstate__()
        state["_manager"] = None  # its process ends with the transform that started it
        return state

    def _call(self, method: str, *args):
        if isinstance(self._ledger, GroupLedger):
            return getattr(self._ledger, method)(*args)
        return self._ledger.call(method, *args)

    @property
    def queues(self) -> PendingGroups:
        """The trajectories of incomplete groups, by group."""
        return PendingGroups(self._call)

    def clear_queues(self) -> None:
        """Forget all incomplete groups."""
        self._call("clear")

    def reset_stats(self) -> None:
        """Set all counters to their start."""
        self._call("reset_counters")

    def get_stats(self) -> dict[str, float | int]:
        """All counters and the sizes of the queues, of one moment."""
        return self._call("stats")

    @property
    def queued_groups(self) -> int:
        """Number of incomplete groups."""
        return self.get_stats()["queued_groups"]

    @property
    def queued_trajectories(self) -> int:
        """Number of trajectories in incomplete groups."""
        return self.get_stats()["queued_trajectories"]

    @property
    def max_queued_trajectories_per_group(self) -> int:
        """Number of trajectories in the incomplete group that has most."""
        return self.get_stats()["max_queued_trajectories_per_group"]

    # Writing

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Nothing happens on sampling."""
        return tensordict

    def inv(self, tensordict: TensorDictBase = None, **kwargs) -> TensorDictBase | None:
        """Take in trajectories; the complete groups with advantages, or None. The input is kept."""
        if is_tensor_collection(tensordict) and not kwargs:
            return self._inv_call(tensordict.copy())
        return super().inv(**kwargs) if tensordict is None else super().inv(tensordict, **kwargs)

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase | None:
        if self.verbose:
            logger.info(f"MCAdvantage: writing data of shape {tensordict.shape}.")
        arrivals, unfinished = [], 0
        for trajectory, done in self._trajectories(tensordict):
            if done:
                arrivals.append(self._arrival(trajectory))
            else:
                unfinished += 1
        receipt, groups, error = self._ledger.add(arrivals, unfinished)
        if error is not None and not groups:
            raise error
        return self._written(receipt, groups, error) if groups else None

    def _written(
        self, receipt: int, groups: list[FinishedGroup], error: RuntimeError | None
    ) -> TensorDictBase:
        """The groups with advantages, unless there is an error; tells the ledger which they are."""
        done: Sequence[int] = ()
        failed = []
        try:
            written = []
            for index, group in enumerate(groups):
                try:
                    written.append(self._with_advantages(group))
                except Exception as cause:
                    failed.append(index)
                    error = error or failure(group.group, "write", "dropped", cause)
            if error is not None:
                raise error
            try:
                together = written[0] if len(written) == 1 else _concatenate(written)
                done = range(len(written))
            except (KeyError, RuntimeError):  # their entries differ: one with each call
                together, done = written[0], (0,)
            return together
        finally:
            self._ledger.settle(receipt, done, failed)

    def _trajectories(self, tensordict: TensorDictBase) -> Iterator[tuple[TensorDictBase, bool]]:
        """Every trajectory of the batch and whether it is done."""
        if tensordict.ndim == 0:
            raise RuntimeError("Expected trajectories with a time dimension, got a single step.")
        if tensordict.ndim > 2:
            tensordict = tensordict.flatten(0, -2)
        if tensordict.ndim == 2:
            for row in tensordict.unbind(0):
                yield from self._trajectories(row)
            return
        steps = tensordict.shape[0]
        if steps == 0:
            return
        done = tensordict.get(self.done_key, None)
        if done is None:
            raise KeyError(f"MCAdvantage found no done state under done_key={self.done_key!r}.")
        if steps == 1 and done.numel() == 1:
            ends = [1] if done.item() else []
        else:
            ends = [
                step + 1
                for step, flag in enumerate(done.reshape(steps, -1).all(-1).tolist())
                if flag
            ]
        if not ends:
            raise RuntimeError("Expected the trajectory to be done.")
        if ends == [steps]:
            yield tensordict, True
            return
        start = 0
        for end in ends:
            yield tensordict[start:end], True
            start = end
        if start < steps:
            yield tensordict[start:], False

    def _arrival(self, trajectory: TensorDictBase) -> Trajectory:
        group = self._group_of(trajectory)
        trajectory = _concrete(trajectory)
        total = value = dtype = None
        if self.trajectory_return is None:
            rewards = trajectory.get(self.rewards_key, None, as_nested_tensor=True)
            if rewards is None:
                raise KeyError(f"MCAdvantage found no rewards under {self.rewards_key!r}.")
            rewards = rewards.values() if rewards.is_nested else rewards
            finite = bool(rewards.isfinite().all())
        else:
            rewards = trajectory.get(self.rewards_key, None)
            if rewards is None:
                raise KeyError(f"MCAdvantage found no rewards under {self.rewards_key!r}.")
            rewards = _as_real(rewards)
            if rewards.numel() == 1:
                total = value = rewards.item()
            else:
                value = getattr(rewards, self.trajectory_return)().item()
                total = value if self.trajectory_return == "sum" else rewards.sum().item()
            # The total of finite rewards may overflow, then the return is of no use either.
            finite = total - total == 0 and (
                self.trajectory_return == "sum" or bool(rewards.isfinite().all())
            )
            dtype = rewards.dtype
        if not finite and not self._warned_of_nonfinite:
            self._warned_of_nonfinite = True
            warnings.warn(
                f"MCAdvantage drops a trajectory of group {group!r}: its rewards are not finite. "
                "Further ones are counted in nonfinite_trajectories.",
                stacklevel=4,
            )
        steps = trajectory.numel()
        if not finite:
            payload = b""
        elif isinstance(self._ledger, GroupLedger):
            payload = trajectory
        else:
            payload = to_bytes(trajectory)
        return Trajectory(group, payload, steps, total, value, dtype, finite)

    def _group_of(self, trajectory: TensorDictBase):
        group = trajectory.get(self.prompt_key, None)
        if isinstance(group, torch.Tensor) and not group.is_nested:
            group = group[0]
        elif not isinstance(group, str):
            group = trajectory[0][self.prompt_key]
        if isinstance(group, torch.Tensor):
            return group.item() if group.numel() == 1 else tuple(group.reshape(-1).tolist())
        if isinstance(group, str):
            return group
        raise TypeError(
            f"Expected a string or tensor as group identifier, got type(group)={type(group)}"
        )

    def _with_advantages(self, group: FinishedGroup) -> TensorDictBase:
        trajectories = [
            from_bytes(trajectory) if isinstance(trajectory, bytes) else trajectory
            for trajectory in group.trajectories
        ]
        if group.returns is None:
            return self._with_step_advantages(trajectories)
        reference = group.returns if self.statistics == "subset" else group.reference
        advantages = group_advantages(group.returns, reference, self.advantage)
        if self.verbose:
            logger.info(f"Group returns: {group.returns}, advantages: {advantages}")
        for trajectory, advantage in zip(trajectories, advantages, strict=True):
            rewards = trajectory.get(self.rewards_key)
            dtype = _float_dtype(rewards)
            largest = torch.finfo(dtype).max
            advantage = min(max(advantage, -largest), largest)
            trajectory.set(self.advantage_key, torch.full_like(rewards, advantage, dtype=dtype))
        return _concatenate(trajectories)

    def _with_step_advantages(self, trajectories: list[TensorDictBase]) -> TensorDictBase:
        written = _concatenate(trajectories)
        rewards = written.get(self.rewards_key, as_nested_tensor=True)
        dtype = _float_dtype(rewards)
        values = (rewards.values() if rewards.is_nested else rewards).double()
        first = values.reshape(-1)[:1]
        if bool((values == first).all()):
            mean, scale = first.item(), 1.0
        else:
            mean = values.mean().item()
            scale = 1.0
            if self.advantage == "std":
                variance = (values - mean).square().sum().item() / (values.numel() - 1)
                scale = max(variance**0.5, 1e-6)
        largest = torch.finfo(dtype).max
        advantages = ((rewards.double() - mean) / scale).clamp(-largest, largest)
        written.set(self.advantage_key, advantages.to(dtype))
        if self.verbose:
            logger.info(f"Group rewards: mean {mean}, scale {scale}")
        return written


class PendingGroups:
    """The queues of incomplete groups, wherever they are: a mapping of groups to trajectories."""

    def __init__(self, call) -> None:
        self._call = call

    def __len__(self) -> int:
        return self._call("stats")["queued_groups"]

    def __iter__(self) -> Iterator:
        return iter(self._call("groups"))

    def __contains__(self, group) -> bool:
        return group in self._call("groups")

    def __getitem__(self, group) -> list[TensorDictBase]:
        return _decoded(self._call("payloads", group))

    def __delitem__(self, group) -> None:
        self._call("delete", group)

    def keys(self) -> list:
        return self._call("groups")

    def values(self) -> list[list[TensorDictBase]]:
        return [_decoded(queue) for queue in self._call("all_payloads").values()]

    def items(self) -> list[tuple]:
        return [(group, _decoded(queue)) for group, queue in self._call("all_payloads").items()]

    def clear(self) -> None:
        self._call("clear")


def _rule_property(name: str) -> property:
    def change(self, value) -> None:
        self._rules = self._rules._replace(**{name: value})
        self._call("set_rules", self._rules)

    return property(lambda self: getattr(self._rules, name), change, doc=f"The argument `{name}`.")


def _counter_property(name: str) -> property:
    return property(
        lambda self: self._call("counter", name),
        lambda self, value: self._call("set_counter", name, value),
        doc=f"The counter `{name}`.",
    )


for _name in GroupRules._fields:
    if _name != "selects":
        setattr(MCAdvantage, _name, _rule_property(_name))
for _name in COUNTERS:
    setattr(MCAdvantage, _name, _counter_property(_name))


def _count(name: str, value: int) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be an integer, got {value!r}.") from None


def _decoded(queue: list) -> list[TensorDictBase]:
    return [from_bytes(payload) if isinstance(payload, bytes) else payload for payload in queue]


def _as_real(rewards: torch.Tensor) -> torch.Tensor:
    """Rewards in a dtype whose sums and means are meant: fp32 for halves, fp64 for integers."""
    if rewards.dtype in (torch.float32, torch.float64):
        return rewards
    return rewards.float() if rewards.is_floating_point() else rewards.double()


def _float_dtype(rewards: torch.Tensor) -> torch.dtype:
    return rewards.dtype if rewards.is_floating_point() else torch.float32


def _concrete(tensordict: TensorDictBase) -> TensorDictBase:
    """Without lazy stacks, unless that is impossible (ragged entries) or loses entries."""
    if type(tensordict) is TensorDict and tensordict.is_contiguous():
        return tensordict
    try:
        concrete = tensordict.contiguous()
    except RuntimeError:
        return tensordict
    # Stacks of non-tensors, such as prompts, can come out as empty tensordicts.
    kept = set(concrete.keys(True, True, is_leaf=is_leaf_nontensor))
    if set(tensordict.keys(True, True, is_leaf=is_leaf_nontensor)) - kept:
        return tensordict
    return concrete


def _concatenate(tensordicts: list[TensorDictBase]) -> TensorDictBase:
    """Along time; a lazy stack of the steps where entries are ragged."""
    try:
        return torch.cat([_concrete(tensordict) for tensordict in tensordicts], -1)
    except RuntimeError:
        return lazy_stack([step for td in tensordicts for step in td.unbind(-1)], -1)
