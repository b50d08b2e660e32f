"""The trajectories of incomplete groups, the counters, and the decision when a group is complete.

A `GroupLedger` is all of MCAdvantage's state. It lives in one process: that of the transform, a
multiprocessing manager's (`SharedLedger`), or a Ray actor. Every method is one transition under one
lock inside that process. Writers hold no lock, so one that is killed blocks nobody and leaves no
transition half done.
"""

from __future__ import annotations

import math
import operator
import threading
import time
from collections.abc import Collection, Sequence
from multiprocessing.managers import BaseManager, BaseProxy
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torchrl._utils import logger

from .by_value import from_bytes
from .selector import MCAdvantageSelector

COUNTERS = {
    "completed_trajectories": 0,
    "completed_decisions": 0,
    "trajectory_return_sum": 0.0,
    "trajectory_return_max": float("-inf"),
    "successful_trajectories": 0,
    "completed_groups": 0,
    "written_groups": 0,
    "dropped_groups": 0,
    "rescued_groups": 0,
    "selected_trajectories": 0,
    "unselected_trajectories": 0,
    # Not in TorchRL.
    "nonfinite_trajectories": 0,
    "unfinished_trajectories": 0,
    "failed_groups": 0,
    "evicted_groups": 0,
    "evicted_trajectories": 0,
    "unproved_selections": 0,
    "gave_up_selections": 0,
}


class Trajectory(NamedTuple):
    """A finished trajectory on its way into a ledger."""

    group: str | float | tuple
    payload: TensorDictBase | bytes  # bytes: by_value.to_bytes of it
    steps: int
    total_reward: float | None  # None: no trajectory-level return is asked for
    trajectory_return: float | None  # what candidates are selected by
    return_dtype: torch.dtype | None
    finite: bool  # whether its rewards are finite numbers


class FinishedGroup(NamedTuple):
    """A group to write."""

    group: str | float | tuple
    trajectories: list[TensorDictBase | bytes]
    returns: list[float] | None = None
    reference: list[float] | None = None  # the returns of all candidates
    rescued: bool = False  # the first candidates would not have been accepted


class HandedOut(NamedTuple):
    """What a call of `add` gives a writer, who then tells `settle` what became of it."""

    receipt: int
    groups: list[FinishedGroup]
    error: RuntimeError | None  # of the selector


class GroupRules(NamedTuple):
    """When a group is complete, and which of its trajectories are written."""

    grpo_size: int
    candidate_group_size: int
    candidate_selection_min_size: int
    candidate_selector: MCAdvantageSelector
    keep_return_bounds: tuple[float, float] | None
    max_pending_groups: int | None
    max_group_age: float | None
    selects: bool  # by trajectory-level returns
    verbose: bool


class _Pending:
    """An incomplete group. Trajectories that aren't finite numbers count as arrived."""

    __slots__ = ("arrived", "since", "trajectories")

    def __init__(self) -> None:
        self.trajectories: list[Trajectory] = []
        self.arrived = 0
        self.since = time.monotonic()


class GroupLedger:
    """See the module."""

    def __init__(self, rules: GroupRules) -> None:
        self._rules = rules
        self._pending: dict[Any, _Pending] = {}
        self._handed_out: dict[int, list[FinishedGroup]] = {}
        self._given_back: list[FinishedGroup] = []
        self._receipts = 0
        self._counters = dict(COUNTERS)
        self._lock = threading.RLock()

    def __getstate__(self) -> dict:
        with self._lock:
            state = self.__dict__.copy()
        del state["_lock"]
        return state

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self._lock = threading.RLock()

    def add(self, arrivals: list[Trajectory], unfinished: int = 0) -> HandedOut:
        """Take in trajectories; the groups that were given back and those that are now complete."""
        with self._lock:
            self._counters["unfinished_trajectories"] += unfinished
            if self._rules.max_group_age is not None:
                self._evict_old()
            groups, self._given_back = self._given_back, []
            errors: list[RuntimeError] = []
            for trajectory in arrivals:
                group = self._add(trajectory, errors)
                if group is not None:
                    groups.append(group)
            self._receipts += 1
            if groups:
                self._handed_out[self._receipts] = groups
            return HandedOut(self._receipts, groups, errors[0] if errors else None)

    def settle(
        self, receipt: int, written: Collection[int] = (), failed: Collection[int] = ()
    ) -> None:
        """Which of a receipt's groups are written and which cannot be; the others are given back.

        What is given back goes to the next call of `add`.
        """
        with self._lock:
            for index, group in enumerate(self._handed_out.pop(receipt, ())):
                if index in written:
                    self._count_written(group)
                elif index in failed:
                    self._counters["dropped_groups"] += 1
                    self._counters["failed_groups"] += 1
                else:
                    self._given_back.append(group)

    def set_rules(self, rules: GroupRules) -> None:
        """From the next trajectory on."""
        with self._lock:
            self._rules = rules

    def counter(self, name: str) -> float:
        with self._lock:
            return self._counters[name]

    def set_counter(self, name: str, value: float) -> None:
        with self._lock:
            self._counters[name] = value

    def reset_counters(self) -> None:
        with self._lock:
            self._counters = dict(COUNTERS)

    def stats(self) -> dict[str, float]:
        """The counters and the sizes of the queues."""
        with self._lock:
            sizes = [len(pending.trajectories) for pending in self._pending.values()]
            return {
                **self._counters,
                "queued_groups": len(sizes),
                "queued_trajectories": sum(sizes),
                "max_queued_trajectories_per_group": max(sizes, default=0),
            }

    def groups(self) -> list:
        with self._lock:
            return list(self._pending)

    def payloads(self, group) -> list[TensorDictBase | bytes]:
        """What is queued for a group. KeyError if nothing is."""
        with self._lock:
            return [trajectory.payload for trajectory in self._pending[group].trajectories]

    def all_payloads(self) -> dict[Any, list[TensorDictBase | bytes]]:
        with self._lock:
            return {group: self.payloads(group) for group in self._pending}

    def delete(self, group) -> None:
        with self._lock:
            del self._pending[group]

    def clear(self) -> None:
        with self._lock:
            self._pending.clear()

    def replace_payloads(self, convert) -> None:
        """Apply `convert` to every queued payload."""
        for pending in self._pending.values():
            pending.trajectories = [
                trajectory._replace(payload=convert(trajectory.payload))
                for trajectory in pending.trajectories
            ]
        self._given_back = [
            group._replace(trajectories=[convert(payload) for payload in group.trajectories])
            for group in self._given_back
        ]

    def _add(self, trajectory: Trajectory, errors: list[RuntimeError]) -> FinishedGroup | None:
        rules, counters = self._rules, self._counters
        counters["completed_trajectories"] += 1
        counters["completed_decisions"] += trajectory.steps
        pending = self._pending.get(trajectory.group)
        if pending is None:
            pending = self._pending[trajectory.group] = _Pending()
        pending.arrived += 1
        if trajectory.finite:
            if trajectory.total_reward is not None:
                counters["trajectory_return_sum"] += trajectory.total_reward
                counters["trajectory_return_max"] = max(
                    counters["trajectory_return_max"], trajectory.total_reward
                )
                counters["successful_trajectories"] += trajectory.total_reward > 0.0
            pending.trajectories.append(trajectory)
        else:
            counters["nonfinite_trajectories"] += 1
        full = pending.arrived >= rules.candidate_group_size
        finished = None
        if full or (
            rules.selects and len(pending.trajectories) >= rules.candidate_selection_min_size
        ):
            try:
                finished = self._finish(trajectory.group, pending.trajectories)
            except Exception as cause:  # of the selector
                counters["failed_groups"] += full
                errors.append(
                    failure(trajectory.group, "select from", "dropped" if full else "kept", cause)
                )
        if finished is not None or full:
            del self._pending[trajectory.group]
            counters["completed_groups"] += 1
            counters["dropped_groups"] += finished is None
        elif rules.max_pending_groups is not None:
            while len(self._pending) > rules.max_pending_groups:
                self._evict(next(iter(self._pending)))
        return finished

    def _finish(self, group, candidates: list[Trajectory]) -> FinishedGroup | None:
        rules = self._rules
        if not candidates:
            return None
        if not rules.selects:
            return FinishedGroup(group, [candidate.payload for candidate in candidates])
        if rules.verbose:
            logger.info(
                f"Trying trajectory-level advantage for {group} with "
                f"{len(candidates)}/{rules.candidate_group_size} candidate trajectories."
            )
        # Fewer only where some were not finite: the rest is trained on.
        size = min(rules.grpo_size, len(candidates))
        returns = [candidate.trajectory_return for candidate in candidates]
        chosen = self._select(candidates, returns, size)
        if chosen is None:
            if rules.keep_return_bounds is not None and rules.verbose:
                logger.info(
                    f"No {size} of {len(candidates)} trajectories of {group} have a mean return "
                    f"inside {rules.keep_return_bounds}."
                )
            return None
        selected = [returns[index] for index in chosen]
        # The built-in strategies accept by this same arithmetic; a selector of the user's may not.
        if not self._accepts(selected):
            return None
        return FinishedGroup(
            group,
            [candidates[index].payload for index in chosen],
            selected,
            returns,
            rescued=len(candidates) > size and not self._accepts(returns[:size]),
        )

    def _count_written(self, group: FinishedGroup) -> None:
        self._counters["written_groups"] += 1
        if group.returns is not None:
            selected = len(group.returns)
            self._counters["selected_trajectories"] += selected
            self._counters["unselected_trajectories"] += len(group.reference) - selected
            self._counters["rescued_groups"] += group.rescued

    def _accepts(self, returns: list[float]) -> bool:
        if self._rules.keep_return_bounds is None:
            return True
        low, high = self._rules.keep_return_bounds
        total = 0.0
        for value in returns:
            total += value
        return low < total / len(returns) < high

    def _select(
        self, candidates: list[Trajectory], returns: list[float], size: int
    ) -> list[int] | None:
        selector, bounds = self._rules.candidate_selector, self._rules.keep_return_bounds
        if type(selector) is MCAdvantageSelector and selector.in_keys == ["return"]:
            unproved, gave_up = selector.unproved_selections, selector.gave_up_selections
            chosen = selector.select_values(
                torch.tensor(returns, dtype=torch.float64), size, bounds
            )
            self._counters["unproved_selections"] += selector.unproved_selections - unproved
            self._counters["gave_up_selections"] += selector.gave_up_selections - gave_up
            return chosen
        dtype = candidates[0].return_dtype
        entries: dict[str, Any] = {"return": torch.tensor(returns, dtype=dtype)}
        in_keys = getattr(selector, "in_keys", ["return"])
        if in_keys != ["return"]:
            entries["trajectories"] = lazy_stack(
                [
                    from_bytes(candidate.payload, to_device=False)
                    if isinstance(candidate.payload, bytes)
                    else candidate.payload
                    for candidate in candidates
                ],
                0,
            )
        chosen = selector.select(
            TensorDict(entries, [len(candidates)]).select(*in_keys, strict=True),
            group_size=size,
            keep_return_bounds=bounds,
        )
        return None if chosen is None else _indices(chosen, len(candidates))

    def _evict_old(self) -> None:
        # In order of first arrival.
        oldest_allowed = time.monotonic() - self._rules.max_group_age
        while self._pending:
            group, pending = next(iter(self._pending.items()))
            if pending.since >= oldest_allowed:
                return
            self._evict(group)

    def _evict(self, group) -> None:
        pending = self._pending.pop(group)
        if self._counters["evicted_groups"] == 0:
            logger.warning(
                f"MCAdvantage: group {group!r} was incomplete beyond max_pending_groups or "
                "max_group_age and is dropped. Further ones are counted in evicted_groups."
            )
        self._counters["evicted_groups"] += 1
        self._counters["evicted_trajectories"] += len(pending.trajectories)


class SharedLedger:
    """A ledger in a manager's process, for many writers.

    A group is handed to the writer that completed it and kept until that writer has written it. If
    the writer is killed before, its connection ends, and with it the thread that serves it; then
    the group goes to the next writer that asks. A writer that has settled has the group and nobody
    else gets it.
    """

    def __init__(self, ledger: GroupLedger) -> None:
        self._ledger = ledger
        self._holders: dict[int, threading.Thread] = {}
        self._lock = threading.Lock()

    def add(self, arrivals: list[Trajectory], unfinished: int = 0) -> HandedOut:
        with self._lock:
            for receipt, thread in list(self._holders.items()):
                if not thread.is_alive():
                    self._settle(receipt)
            handed_out = self._ledger.add(arrivals, unfinished)
            if handed_out.groups:
                self._holders[handed_out.receipt] = threading.current_thread()
            return handed_out

    def settle(self, *arguments) -> None:
        with self._lock:
            self._settle(*arguments)

    def _settle(self, receipt: int, *outcome: Collection[int]) -> None:
        del self._holders[receipt]
        self._ledger.settle(receipt, *outcome)

    def call(self, method: str, *args):
        """Any other method of the ledger."""
        return getattr(self._ledger, method)(*args)


class SharedLedgerProxy(BaseProxy):
    """A `SharedLedger` as the writers see it; pickles into child processes."""

    _exposed_ = ("add", "settle", "call")

    def add(self, *arguments) -> HandedOut:
        return self._callmethod("add", arguments)

    def settle(self, *arguments) -> None:
        self._callmethod("settle", arguments)

    def call(self, method: str, *args):
        return self._callmethod("call", (method, *args))


class LedgerManager(BaseManager):
    """Starts the process that a `SharedLedger` lives in."""


LedgerManager.register("SharedLedger", SharedLedger, SharedLedgerProxy)


def failure(group, action: str, fate: str, cause: Exception) -> RuntimeError:
    """The error for a group that a writer cannot have."""
    error = RuntimeError(
        f"MCAdvantage could not {action} group {group!r}, which is {fate}: "
        f"{type(cause).__name__}: {cause}. All else in this call is kept; groups that it completed "
        "come with the next one."
    )
    error.__cause__ = cause
    return error


def _indices(chosen: Sequence[int] | torch.Tensor, count: int) -> list[int]:
    """What a selector of the user's returned, if it can be used."""
    values = chosen.tolist() if isinstance(chosen, torch.Tensor) else chosen
    try:
        if any(isinstance(value, bool) for value in values):
            raise TypeError
        indices = [operator.index(value) for value in values]
    except TypeError:
        raise TypeError(f"select must return a list of integers or None, got {chosen!r}") from None
    if (
        not indices
        or len(set(indices)) < len(indices)
        or not 0 <= min(indices) <= max(indices) < count
    ):
        raise ValueError(
            f"select must return one or more different indices from 0 to {count - 1}, got {indices}"
        )
    return indices


def group_advantages(returns: list[float], reference: list[float], advantage: str) -> list[float]:
    """The advantage of each of `returns`, by the statistics of `reference`, which contains them.

    Two passes in fp64: the mean, then the sum of squares about it. Equal returns have advantage 0
    exactly. "std": (R - mean) / max(std, 1e-6); "none": R - mean; "leave_one_out": R minus the mean
    of the others.
    """
    count = len(reference)
    if min(reference) == max(reference):
        return [0.0] * len(returns)
    largest = max(map(abs, reference))
    if largest > 1e150:  # whose square overflows: count in powers of two of it
        exponent = math.frexp(largest)[1]
        small = [
            [math.ldexp(value, -exponent) for value in values] for values in (returns, reference)
        ]
        advantages = group_advantages(*small, advantage)
        if advantage == "std":
            return advantages
        return [value * 2.0 ** (exponent - 1) * 2.0 for value in advantages]
    mean = math.fsum(reference) / count
    if advantage == "none":
        return [value - mean for value in returns]
    if advantage == "leave_one_out":
        return [(value - mean) * (count / (count - 1)) for value in returns]
    variance = math.fsum((value - mean) ** 2 for value in reference) / (count - 1)
    scale = max(math.sqrt(variance), 1e-6)
    return [(value - mean) / scale for value in returns]
