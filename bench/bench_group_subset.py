"""MCAdvantageSelector and MCAdvantage beside TorchRL's, and how selection grows with the group."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
import torchrl.objectives.llm as torchrl_groups
from tensordict import TensorDict
from torch import Tensor

import grpo
from bench.conftest import Bench
from grpo_kernels.group_subset import group_subset

BOUNDS = (0.1, 0.9)
LIBRARIES = {"ours": grpo, "TorchRL": torchrl_groups}


def random_floats(count: int, seed: int = 0) -> Tensor:
    """Returns of which no two are equal."""
    return torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sixteen_levels(count: int, seed: int = 0) -> Tensor:
    """Returns like the share of 16 tests that passed."""
    return torch.randint(0, 16, (count,), generator=torch.Generator().manual_seed(seed)) / 16


def selection(
    library, values: Tensor, size: int, repeats: int = 1, **options
) -> Callable[[], None]:
    """`select` on a tensordict of candidates, `repeats` times."""
    selector = library.MCAdvantageSelector(**options)
    candidates = TensorDict({"return": values}, [len(values)])

    def run() -> None:
        for _ in range(repeats):
            selector.select(candidates, group_size=size, keep_return_bounds=BOUNDS)

    return run


def one_step(group: int, reward: float) -> TensorDict:
    """A trajectory of one step."""
    return TensorDict(
        {
            "query": torch.tensor([group]),
            "next": TensorDict(
                {"reward": torch.tensor([[reward]]), "done": torch.ones(1, 1, dtype=torch.bool)},
                [1],
            ),
        },
        [1],
    )


def growing_group_of_zeros(library) -> Callable[[], None]:
    """16 candidates of return 0, the last 9 of which each make for a selection of 8."""
    transform = library.MCAdvantage(
        8, trajectory_return="sum", keep_return_bounds=BOUNDS, candidate_group_size=16
    )
    trajectory = one_step(0, 0.0)

    def run() -> None:
        for _ in range(16):
            transform.inv(trajectory)

    return run


def groups_of(library, size: int) -> Callable[[], None]:
    """64 trajectories, one by one."""
    transform = library.MCAdvantage(size, trajectory_return="sum")
    trajectories = [one_step(index // size, float(index % 3)) for index in range(64)]

    def run() -> None:
        for trajectory in trajectories:
            transform.inv(trajectory)

    return run


def solvable_groups(count: int) -> Iterator[Tensor]:
    """20 normal returns for 10 places, with a mean within the bounds that exists."""
    for seed in range(count):
        generator = torch.Generator().manual_seed(seed)
        values = 2 * torch.randn(20, generator=generator, dtype=torch.float64) + 0.5
        if group_subset(values, 10, bounds=(0.45, 0.55)).indices is not None:
            yield values


def missed(library, groups: list[Tensor]) -> int:
    """How many of the groups get None."""
    selector = library.MCAdvantageSelector()
    return sum(
        selector.select(
            TensorDict({"return": values}, [20]), group_size=10, keep_return_bounds=(0.45, 0.55)
        )
        is None
        for values in groups
    )


@pytest.mark.parametrize("count", [8, 12, 18])
def test_select_half_of_a_group(bench: Bench, count: int) -> None:
    """Random floats; 18 is the largest group that TorchRL enumerates."""
    (count,) = bench.size(count)
    values = random_floats(count)
    assert group_subset(values, count // 2, bounds=BOUNDS).proved
    repeats = 20  # milliseconds, where ours takes microseconds
    calls = {
        "ours": selection(grpo, values, count // 2, repeats),
        "TorchRL": selection(torchrl_groups, values, count // 2),
    }
    bench.times(f"select, random floats, {count} choose {count // 2}", calls, 15, repeats)
    if count == 18:
        bench.faster_than("TorchRL", 300)


@pytest.mark.parametrize(
    ("kind", "count", "size", "asked"),
    [
        (random_floats, 24, 12, 5),
        (random_floats, 40, 20, 1000),
        (sixteen_levels, 64, 16, None),
        (sixteen_levels, 256, 64, 2),
    ],
    ids=["24", "40", "levels-64", "levels-256"],
)
def test_select_beyond_enumeration(
    bench: Bench, kind: Callable, count: int, size: int, asked: float | None
) -> None:
    """TorchRL guesses here by default; at 24 it can still be told to enumerate."""
    values = kind(count)
    assert group_subset(values, size, bounds=BOUNDS).proved
    calls = {"ours": selection(grpo, values, size)}
    if count == 24 and not bench.quick:
        limit = math.comb(24, 12)
        calls["TorchRL, enumerating"] = selection(
            torchrl_groups, values, size, max_combinations=limit
        )
    name = f"select, {kind.__name__.replace('_', ' ')}, {count} choose {size}"
    times = bench.times(name, calls, rounds=3)
    bench.at_most("ms, proved", times["ours"], asked, times)


def test_every_solvable_group_is_solved(bench: Bench) -> None:
    """20 normal returns for 10 places and a narrow target for their mean."""
    groups = list(solvable_groups(20 if bench.quick else 400))
    calls = {
        name: lambda library=library: missed(library, groups) for name, library in LIBRARIES.items()
    }
    bench.times(f"select, 20 choose 10, {len(groups)} solvable groups", calls, rounds=1)
    detail = {name: missed(library, groups) for name, library in LIBRARIES.items()}
    bench.at_most("not solved", detail["ours"], 0, detail)


def test_growing_group_of_zeros(bench: Bench) -> None:
    calls = {name: growing_group_of_zeros(library) for name, library in LIBRARIES.items()}
    bench.times("MCAdvantage, zeros from 8 to 16 candidates", calls, rounds=15)
    bench.faster_than("TorchRL", 5)


@pytest.mark.parametrize("size", [8, 64])
def test_trajectory_of_one_step(bench: Bench, size: int) -> None:
    """Groups without oversampling, trajectory by trajectory."""
    calls = {name: groups_of(library, size) for name, library in LIBRARIES.items()}
    bench.times(f"MCAdvantage, 64 trajectories of one step, groups of {size}", calls, rounds=15)
    bench.faster_than("TorchRL", 1.5 if size == 8 else None)


def test_growth(bench: Bench) -> None:
    """Half of n candidates, by n; every selection proved optimal."""

    def call_of(library, values: Callable[[int], Tensor], n: int, **options) -> Callable[[], None]:
        return selection(library, values(n), n // 2, **options)

    enumerating = partial(
        call_of, torchrl_groups, random_floats, max_combinations=math.comb(20, 10)
    )
    for name, call, sizes in (
        ("TorchRL, its limit raised", enumerating, range(4, 21, 2)),
        ("ours, random floats", partial(call_of, grpo, random_floats), range(4, 43, 2)),
        ("ours, 16 levels", partial(call_of, grpo, sixteen_levels), [2**n for n in range(2, 11)]),
    ):
        bench.curves("group_subset", sizes, {name: call})
