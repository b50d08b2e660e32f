"""Which k of n candidate returns to train on.

A group of n trajectories is sampled for one prompt and k of them are kept. The rules:

* `balanced`: the mean closest to the middle of the bounds; of those the largest spread (largest
  minus smallest value); of those the first index list in lexicographic order;
* `uniform`: evenly spaced places of the sorted values, in that order;
* `first`: the first k;
* `max_variance`: the i largest and k - i smallest for the i of the largest variance (the smallest
  such i), which no other k exceed. PODS, arXiv 2504.13818.

A mean is the sum left to right in index-list order, in double, divided by k. `balanced` is decided
in exactly this arithmetic, however the search went about it.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch

from .. import backends
from . import cpu, eager

__all__ = ["RULES", "Rule", "Subset", "Subsets", "group_subset", "group_subsets"]

Rule = Literal["balanced", "uniform", "first", "max_variance"]
RULES = ("balanced", "uniform", "first", "max_variance")
INT64_MAX = 2**63 - 1
DEFAULT_BUDGET = 50_000_000
_CPU = torch.device("cpu")


class Subset(NamedTuple):
    """The chosen indices, or None where no subset was found, and what is proved of them.

    `proved`: no subset is better by the rule; with `indices=None`, no subset is within the bounds.
    `mean_proved`: no subset has a mean closer to the middle by more than the rounding of its sum
    (some k 2^-52 times the sum of the largest magnitudes); ties may not have been decided.
    Where one is False the search spent its budget.
    """

    indices: list[int] | None
    proved: bool
    mean_proved: bool


class Subsets(NamedTuple):
    """`Subset` for many groups: `indices` `[groups, k]` int64, -1 where not `found`; the others
    bool `[groups]`.
    """

    indices: torch.Tensor
    found: torch.Tensor
    proved: torch.Tensor
    mean_proved: torch.Tensor


def group_subset(
    values: torch.Tensor | Sequence[float],
    k: int,
    *,
    bounds: tuple[float, float] | None = None,
    rule: Rule = "balanced",
    enumeration_limit: int = 100_000,
    budget: int = DEFAULT_BUDGET,
    backend: Literal["auto", "cpu", "eager"] = "auto",
) -> Subset:
    """Choose `k` of the candidates `values`.

    Args:
        values: n finite numbers, one a candidate; a tensor of any real dtype and shape, or a
            sequence.
        k: how many to choose, 1 <= k <= n.
        bounds: the mean of the chosen must lie strictly between these two; either may be infinite.
            `balanced` needs bounds.
        rule: see the module.
        enumeration_limit: with at most this many subsets, n choose k, the answer of `balanced` is
            proved whatever it costs (for k up to 10 000).
        budget: elementary steps of the search, some 2 to 10 ns each, wherever else. Spent
            deterministically: the same call gives the same answer on every machine.
        backend: "cpu" is C++ and releases the GIL; "eager" is the Python definition, which
            enumerates up to `enumeration_limit` subsets and proves little beyond.

    Raises:
        ValueError: for a value that is NaN, infinite or complex, k that is no integer or out of
            range, bounds that are NaN or enclose nothing, a negative or non-integer
            enumeration_limit or budget, an unknown rule or backend.
    """
    if not isinstance(values, torch.Tensor):
        try:
            values = torch.as_tensor(values, dtype=torch.float64)
        except (TypeError, ValueError) as error:
            raise ValueError(f"values must be real numbers: {error}.") from None
    if values.is_complex():
        raise ValueError(f"values must be real numbers, got {values.dtype}.")
    n = values.numel()
    k, low, high = _check(n, k, bounds, rule)
    enumeration_limit = _count("enumeration_limit", enumeration_limit)
    budget = _count("budget", budget)
    run = cpu if _runs_cpp(backend) else eager
    found = run.group_subset(values, k, rule, low, high, enumeration_limit, budget)
    if found is None:
        bad = next((i, v) for i, v in enumerate(values.reshape(-1).tolist()) if v - v != 0)
        raise ValueError(f"values must be finite, got {bad[1]} at index {bad[0]}.")
    indices, proof = found
    return Subset(indices, proof == 2, proof >= 1)


def group_subsets(
    values: torch.Tensor,
    k: int,
    *,
    lengths: torch.Tensor | None = None,
    bounds: tuple[float, float] | None = None,
    rule: Rule = "balanced",
    enumeration_limit: int = 100_000,
    budget: int = DEFAULT_BUDGET,
    backend: Literal["auto", "cpu", "eager"] = "auto",
) -> Subsets:
    """`group_subset` for many groups at once, on `torch.get_num_threads()` threads.

    Args:
        values: `[groups, n]`, one row a group.
        k: how many to choose from every group.
        lengths: int `[groups]`; row g has its candidates in `values[g, :lengths[g]]` and anything
            after. Default n.
        bounds, rule, enumeration_limit, budget, backend: as in `group_subset`; the budget is for
            one group.

    Raises:
        ValueError: as `group_subset`, and for shapes that don't fit.
    """
    if values.ndim != 2:
        raise ValueError(f"values must be [groups, n], got shape {list(values.shape)}.")
    if values.is_complex():
        raise ValueError(f"values must be real numbers, got {values.dtype}.")
    groups, n = values.shape
    if lengths is None:
        lengths = torch.full((groups,), n, dtype=torch.int64)
    elif lengths.shape != (groups,):
        raise ValueError(f"lengths must be [{groups}], got shape {list(lengths.shape)}.")
    elif lengths.is_floating_point() or lengths.is_complex() or lengths.dtype == torch.bool:
        raise ValueError(f"lengths must be integers, got {lengths.dtype}.")
    lengths = lengths.to(_CPU, torch.int64).contiguous()
    shortest, longest = (int(x) for x in lengths.aminmax()) if groups else (n, n)
    if longest > n:
        raise ValueError(f"lengths must be at most n = {n}, got {longest}.")
    k, low, high = _check(shortest, k, bounds, rule)
    enumeration_limit = _count("enumeration_limit", enumeration_limit)
    budget = _count("budget", budget)
    values = values.detach().to(_CPU, torch.float64).contiguous()
    bad = ~values.isfinite() & (torch.arange(n) < lengths[:, None])
    if bad.any():
        group, index = bad.nonzero()[0].tolist()
        raise ValueError(
            f"values must be finite, got {values[group, index].item()} at [{group}, {index}]."
        )
    run = cpu if _runs_cpp(backend) else eager
    indices, proofs = run.group_subsets(
        values,
        lengths,
        k,
        rule,
        low,
        high,
        enumeration_limit,
        budget,
    )
    return Subsets(indices, indices[:, 0] >= 0, proofs == 2, proofs >= 1)


def _check(
    n: int, k: int, bounds: tuple[float, float] | None, rule: str
) -> tuple[int, float | None, float | None]:
    if rule not in RULES:
        raise ValueError(f"rule must be one of {RULES}, got {rule!r}.")
    k = _integer("k", k)
    if not 1 <= k <= n:
        raise ValueError(f"k must be between 1 and the number of candidates {n}, got {k}.")
    if bounds is None:
        if rule == "balanced":
            raise ValueError(
                "rule='balanced' needs bounds=(low, high); without bounds choose one of "
                f"{RULES[1:]}."
            )
        return k, None, None
    low, high = bounds
    if not low < high:
        raise ValueError(f"bounds must be an increasing (low, high) pair, got {bounds}.")
    return k, float(low), float(high)


def _integer(name: str, value: int) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be an integer, got {value!r}.") from None


def _count(name: str, value: int) -> int:
    """As the search takes it: at most 2^63 - 1."""
    value = _integer(name, value)
    if value < 0:
        raise ValueError(f"{name} must not be negative, got {value}.")
    return min(value, INT64_MAX)


def _runs_cpp(backend: str) -> bool:
    if backend == "auto":
        # There is no GPU version: where another operation would use one, this one uses C++.
        wanted = backends.resolve_backend("auto", _CPU)
        return wanted != "eager" and backends.cpp_problem is None
    if backend not in ("cpu", "eager"):
        raise ValueError(f"backend must be 'auto', 'cpu' or 'eager', got {backend!r}.")
    return backends.resolve_backend(backend, _CPU) == "cpu"
