"""Which candidates of an oversampled group are trained on."""

from __future__ import annotations

import warnings
from typing import Literal

import torch
from tensordict import NestedKey, TensorDictBase
from torchrl.objectives.llm import MCAdvantageSelector as TorchRLSelector

from grpo_kernels.group_subset import Subset, group_subset

STRATEGIES = ("first", "uniform", "balanced", "max_variance")


class MCAdvantageSelector(TorchRLSelector):
    """Choose `group_size` of the candidate trajectories of a group by their returns.

    Takes the place of `torchrl.objectives.llm.MCAdvantageSelector`. With as many subsets as TorchRL
    would enumerate or fewer it selects what TorchRL selects; with more, where TorchRL guesses, the
    selection is exact as far as `grpo_kernels.group_subset` proves it.

    Args:
        strategy: `"first"`: the first `group_size`. `"uniform"`: evenly spaced in the sorted
            returns. `"balanced"`: the mean return closest to the middle of the bounds, then the
            largest spread, then the first index list in lexicographic order; `"uniform"` where
            there are no bounds. `"max_variance"`: the largest variance of the returns (PODS, arXiv
            2504.13818).
        max_combinations: up to this many subsets the answer of `"balanced"` is proved whatever it
            costs; beyond, within the search's budget.
        in_keys: entries of the candidates that `select` reads; the built-in strategies read one
            number a candidate from the first. A subclass that overrides `select` may ask for
            `"trajectories"`, the lazily stacked trajectories.

    Attributes:
        unproved_selections: how many selections were returned without a proof.
        gave_up_selections: how many times None was returned without a proof that no subset is
            within the bounds.
    """

    def __init__(
        self,
        strategy: Literal["first", "uniform", "balanced", "max_variance"] = "balanced",
        *,
        max_combinations: int = 100_000,
        in_keys: list[NestedKey] | None = None,
    ) -> None:
        if strategy not in STRATEGIES:
            raise ValueError(
                "strategy must be one of 'first', 'uniform', 'balanced' or 'max_variance', "
                f"got {strategy!r}."
            )
        if max_combinations < 1:
            raise ValueError(f"max_combinations must be strictly positive, got {max_combinations}.")
        if in_keys is None:
            in_keys = ["return"]
        elif not in_keys:
            raise ValueError("in_keys must contain at least one key.")
        self.strategy = strategy
        self.max_combinations = int(max_combinations)
        self.in_keys = list(in_keys)
        self.unproved_selections = 0
        self.gave_up_selections = 0

    def select(
        self,
        candidates: TensorDictBase,
        *,
        group_size: int,
        keep_return_bounds: tuple[float, float] | None = None,
    ) -> list[int] | None:
        """The indices to train on, or None.

        None means that no subset of `group_size` has its mean strictly within the bounds, or that
        the search ran out of budget, which is counted in `gave_up_selections` and warned of once.

        Args:
            candidates: one entry a candidate; the first of `in_keys` holds one number each.
                `"balanced"` never selects a candidate whose number is NaN or infinite.
            group_size: how many to select.
            keep_return_bounds: exclusive bounds on the mean.

        Raises:
            ValueError: for fewer candidates than `group_size`, `group_size` < 1, not one number a
                candidate, bounds that enclose nothing, and, in the strategies other than
                `"balanced"`, numbers that are not finite.
        """
        key = self.in_keys[0]
        values = candidates.get(key, None)
        if values is None:
            values = candidates.select(key, strict=True).get(key)
        if values.numel() != candidates.numel():
            raise ValueError(
                "The built-in MCAdvantageSelector strategies expect one scalar value per candidate "
                f"under {key!r}, got {values.shape=} for {candidates.batch_size=}."
            )
        return self.select_values(values, group_size, keep_return_bounds)

    def select_values(
        self,
        values: torch.Tensor,
        group_size: int,
        keep_return_bounds: tuple[float, float] | None = None,
    ) -> list[int] | None:
        """`select` for the numbers themselves."""
        count = values.numel()
        if group_size < 1:
            raise ValueError(f"group_size must be at least 1, got {group_size}.")
        if count < group_size:
            raise ValueError(f"Need at least {group_size} candidates, got {count}.")
        if keep_return_bounds is None and (count == group_size or self.strategy == "first"):
            return list(range(group_size))
        rule = self.strategy
        if rule == "balanced" and keep_return_bounds is None:
            rule = "uniform"
        try:
            subset = self._search(values, group_size, keep_return_bounds, rule)
        except ValueError:
            finite = values.isfinite()
            if rule != "balanced" or finite.all():
                raise
            return self._select_of_finite(
                values, finite.reshape(-1), group_size, keep_return_bounds
            )
        if not subset.proved:
            self._count_unproved(subset, count, group_size)
        return subset.indices

    def _search(self, values, group_size, bounds, rule) -> Subset:
        return group_subset(
            values,
            group_size,
            bounds=bounds,
            rule=rule,
            enumeration_limit=self.max_combinations,
        )

    def _select_of_finite(self, values, finite, group_size, bounds) -> list[int] | None:
        """A mean with a number in it that isn't finite is never within bounds."""
        kept = finite.nonzero().reshape(-1)
        if len(kept) < group_size:
            return None
        chosen = self.select_values(values.reshape(-1)[kept], group_size, bounds)
        return None if chosen is None else kept[chosen].tolist()

    def _count_unproved(self, subset: Subset, count: int, group_size: int) -> None:
        if subset.indices is not None:
            self.unproved_selections += 1
            return
        if self.gave_up_selections == 0:
            warnings.warn(
                f"No subset of {group_size} of {count} candidates within the bounds was found "
                "before the search's budget ran out; there may be one. Further cases are counted "
                "in gave_up_selections.",
                stacklevel=3,
            )
        self.gave_up_selections += 1
