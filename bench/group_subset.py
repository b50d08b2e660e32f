"""MCAdvantageSelector and MCAdvantage beside TorchRL's, and how selection grows with the group.

python -m bench.group_subset [--quick]
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Iterator

import torch
import torchrl.objectives.llm as torchrl_groups
from tensordict import TensorDict
from torch import Tensor

import grpo
from bench.figures import RESULTS, Figure, at_most, ratio, show
from bench.timing import medians_ms
from grpo_kernels.group_subset import group_subset

BOUNDS = (0.1, 0.9)


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


def groups_of_eight(library, groups: int) -> Callable[[], None]:
    """Groups without oversampling, trajectory by trajectory."""
    transform = library.MCAdvantage(8, trajectory_return="sum")
    trajectories = [one_step(index // 8, float(index % 3)) for index in range(8 * groups)]

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


def plot_growth() -> None:
    """Half of n candidates, by n: bench/results/group_subset.png."""
    from matplotlib import pyplot

    limit = math.comb(22, 11)
    floats = range(4, 43, 2)
    levels = [2**power for power in range(2, 11)]
    enumerated = range(4, 23, 2)
    lines = {
        "TorchRL, its limit raised, random floats": [
            (n, selection(torchrl_groups, random_floats(n), n // 2, max_combinations=limit))
            for n in enumerated
        ],
        "grpo, random floats": [(n, selection(grpo, random_floats(n), n // 2)) for n in floats],
        "grpo, 16 levels": [(n, selection(grpo, sixteen_levels(n), n // 2)) for n in levels],
    }
    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for label, calls in lines.items():
        sizes = [n for n, _ in calls]
        axes.plot(
            sizes, [medians_ms({"": call}, 3)[""] for _, call in calls], marker="o", label=label
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("candidates n, of which n / 2 are selected")
    axes.set_ylabel("ms, every selection proved optimal")
    axes.grid(alpha=0.3)
    axes.legend()
    RESULTS.mkdir(exist_ok=True)
    figure.savefig(RESULTS / "group_subset.png", dpi=120)


def figures(quick: bool = False) -> Iterator[Figure]:
    """What selection costs, what it finds, and what a trajectory costs; then the plot."""
    torch.set_num_threads(1)
    ours_and_theirs = {"ours": grpo, "torchrl": torchrl_groups}
    rounds = 3 if quick else 15
    count = 12 if quick else 18
    repeats = {"ours": 100, "torchrl": 1}  # both take milliseconds
    calls = {
        name: selection(library, random_floats(count), count // 2, repeats[name])
        for name, library in ours_and_theirs.items()
    }
    times = {name: time / repeats[name] for name, time in medians_ms(calls, rounds).items()}
    case = f"select, random floats, {count} choose {count // 2}"
    yield ratio(case, "faster than TorchRL", times, "torchrl", "ours", 300)

    limit = math.comb(24, 12)
    calls = {"ours": selection(grpo, random_floats(24), 12)}
    if not quick:
        calls["torchrl"] = selection(torchrl_groups, random_floats(24), 12, max_combinations=limit)
    times = medians_ms(calls, 3)
    yield at_most("select, random floats, 24 choose 12", "ms, proved", times["ours"], 5, times)
    for case, values, size, asked, repeats in (
        ("select, 16 levels, 256 choose 64", sixteen_levels(256), 64, 2, rounds),
        ("select, random floats, 40 choose 20", random_floats(40), 20, 1000, 2 if quick else 5),
    ):
        proved = group_subset(values, size, bounds=BOUNDS).proved
        times = medians_ms({"ours": selection(grpo, values, size)}, repeats)
        claim = "ms, proved" if proved else "ms, NOT PROVED"
        yield at_most(case, claim, times["ours"], asked, times)

    groups = list(solvable_groups(20 if quick else 400))
    detail = {name: missed(library, groups) for name, library in ours_and_theirs.items()}
    case = f"select, 20 choose 10, {len(groups)} solvable groups"
    yield at_most(case, "not solved", detail["ours"], 0, detail)

    calls = {name: growing_group_of_zeros(library) for name, library in ours_and_theirs.items()}
    times = medians_ms(calls, rounds)
    case = "MCAdvantage, zeros from 8 to 16 candidates"
    yield ratio(case, "faster than TorchRL", times, "torchrl", "ours", 5)

    calls = {name: groups_of_eight(library, 4) for name, library in ours_and_theirs.items()}
    times = {name: time / 32 for name, time in medians_ms(calls, rounds).items()}
    case = "MCAdvantage, a trajectory of one step"
    yield ratio(case, "faster than TorchRL", times, "torchrl", "ours", 1.5)
    if not quick:
        plot_growth()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    show(figures("--quick" in sys.argv), "--quick" in sys.argv)
