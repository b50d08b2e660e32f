"""The definition of the rules, in Python."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import combinations

import torch


def group_subset(
    values: torch.Tensor,
    k: int,
    rule: str,
    low: float | None,
    high: float | None,
    enumeration_limit: int,
    budget: int,
) -> tuple[list[int] | None, int] | None:
    """(indices, proof: 2 for the whole rule, 0 for none), or None for a value that isn't finite."""
    returns = [float(value) for value in values.detach().reshape(-1).tolist()]
    if not all(map(math.isfinite, returns)):
        return None
    n = len(returns)
    if n != k and rule == "balanced":
        if math.comb(n, k) <= enumeration_limit:
            return balanced(returns, k, low, high), 2
        return balanced_without_proof(returns, k, low, high)
    if n == k or rule == "first":
        indices = list(range(k))
    elif rule == "uniform":
        indices = uniform(returns, k)
    else:
        indices = max_variance(returns, k)
    accepted = low is None or low < mean(returns, indices) < high
    return indices if accepted else None, 2


def group_subsets(
    values: torch.Tensor, lengths: torch.Tensor, k: int, *arguments
) -> tuple[torch.Tensor, torch.Tensor]:
    """(indices `[groups, k]`, -1 where none; proof `[groups]`)."""
    found = [
        group_subset(row[:length], k, *arguments)
        for row, length in zip(values, lengths.tolist(), strict=True)
    ]
    indices = [indices if indices is not None else [-1] * k for indices, _ in found]
    return (
        torch.tensor(indices, dtype=torch.int64).reshape(len(found), k),
        torch.tensor([proof for _, proof in found], dtype=torch.int64),
    )


def mean(values: list[float], indices: list[int] | tuple[int, ...]) -> float:
    """Left to right. Not the built-in sum(), which compensates from Python 3.12 on."""
    total = 0.0
    for index in indices:
        total += values[index]
    return total / len(indices)


def balanced(values: list[float], k: int, low: float, high: float) -> list[int] | None:
    """The first of the widest of those with the mean closest to the middle."""
    middle = 0.5 * (low + high)
    best, best_score = None, None
    for indices in combinations(range(len(values)), k):
        average = mean(values, indices)
        if not low < average < high:
            continue
        chosen = [values[index] for index in indices]
        score = (abs(average - middle), -(max(chosen) - min(chosen)))
        if best_score is None or score < best_score:
            best, best_score = list(indices), score
    return best


def balanced_without_proof(
    values: list[float], k: int, low: float, high: float
) -> tuple[list[int] | None, int]:
    """From the k smallest to the k largest by neighbours in sorted order: the best on the way.

    Proved only if even the k largest are too small or the k smallest too large.
    """
    n = len(values)
    order = sorted(range(n), key=values.__getitem__)
    exact = [Fraction(values[index]) for index in order]
    # Far beyond what the rounding of k additions amounts to.
    margin = Fraction(k, 2**50) * max(map(abs, exact)) * k
    if math.isfinite(low) and sum(exact[n - k :]) + margin < k * Fraction(low):
        return None, 2
    if math.isfinite(high) and sum(exact[:k]) - margin > k * Fraction(high):
        return None, 2
    places = list(range(k))
    best, best_score = None, None

    def consider() -> None:
        nonlocal best, best_score
        indices = sorted(order[place] for place in places)
        average = mean(values, indices)
        if not low < average < high:
            return
        spread = exact[places[-1]] - exact[places[0]]
        score = (abs(average - 0.5 * (low + high)), -spread, indices)
        if best_score is None or score < best_score:
            best, best_score = indices, score

    consider()
    for last in reversed(range(k)):
        while places[last] < n - k + last:
            places[last] += 1
            consider()
    return best, 0


def uniform(values: list[float], k: int) -> list[int]:
    """Evenly spaced places of the sorted values."""
    order = sorted(range(len(values)), key=values.__getitem__)
    if k == 1:
        return [order[len(order) // 2]]
    return [order[round(place * (len(order) - 1) / (k - 1))] for place in range(k)]


def max_variance(values: list[float], k: int) -> list[int]:
    """The i largest and k - i smallest, for the i of the largest variance."""
    order = sorted(range(len(values)), key=values.__getitem__)

    def split(i: int) -> list[int]:
        return order[: k - i] + order[len(order) - i :]

    def variance(indices: list[int]) -> Fraction:
        chosen = [Fraction(values[index]) for index in indices]
        centre = sum(chosen) / k
        return sum((value - centre) ** 2 for value in chosen)

    best = max(range(k + 1), key=lambda i: (variance(split(i)), -i))
    return sorted(split(best))
