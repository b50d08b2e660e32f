"""grpo_kernels.group_subset against its definition and against enumeration."""

import itertools
import math
import random
import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_kernels import backends
from grpo_kernels.group_subset import RULES, eager, group_subset, group_subsets

BACKENDS = [
    "eager",
    pytest.param(
        "cpu",
        marks=pytest.mark.skipif(backends.cpp_problem is not None, reason="no C++ extension"),
    ),
]
needs_cpp = pytest.mark.skipif(backends.cpp_problem is not None, reason="no C++ extension")


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


def score(values, indices, bounds):
    """Smaller is better: deviation from the middle, then spread, then order."""
    chosen = [values[index] for index in indices]
    deviation = abs(eager.mean(values, indices) - 0.5 * (bounds[0] + bounds[1]))
    return deviation, -(max(chosen) - min(chosen)), indices


LEVELS = st.sampled_from(
    [
        st.floats(0, 1),
        st.floats(0, 1, width=32),
        st.sampled_from([0.0, 1.0]),
        st.integers(0, 5).map(lambda level: level / 5),
        st.integers(0, 15).map(lambda level: level / 15),
        st.integers(-3, 3).map(lambda level: level * 0.1),
        st.sampled_from([0.0, -0.0, 5e-324, -5e-324, 1e-310]),
        st.sampled_from([1e308, -1e308, 1.7e308, 1.0]),
        st.floats(allow_nan=False, allow_infinity=False),
    ]
)


@st.composite
def groups(draw, most=10):
    values = draw(st.lists(draw(LEVELS), min_size=1, max_size=most))
    k = draw(st.integers(1, len(values)))
    ends = st.one_of(
        st.floats(-1, 2),
        st.sampled_from(values),
        st.sampled_from([0.1, 0.9, -math.inf, math.inf]),
    )
    low, high = sorted([draw(ends), draw(ends)])
    if not low < high:
        low, high = -1.0, 1.0
    return values, k, (low, high)


@needs_cpp
@settings(max_examples=600, deadline=None)
@given(groups())
def test_balanced_is_the_enumerated_one_wherever_it_is_proved(group):
    values, k, bounds = group
    if k == len(values):
        expected, _ = eager.group_subset(
            torch.tensor(values, dtype=torch.float64), k, "first", *bounds, 0, 0
        )
    else:
        expected = eager.balanced(values, k, *bounds)
    enumerable = group_subset(values, k, bounds=bounds, backend="cpu")
    assert enumerable == (expected, True, True)
    # Without leave to enumerate, the other searches have to do it or say that they could not.
    searched = group_subset(values, k, bounds=bounds, enumeration_limit=1, backend="cpu")
    if searched.proved:
        assert searched.indices == expected
    if searched.indices is not None:
        assert bounds[0] < eager.mean(values, searched.indices) < bounds[1]


@needs_cpp
@settings(max_examples=300, deadline=None)
@given(groups(), st.sampled_from(["uniform", "first", "max_variance"]), st.booleans())
def test_the_other_rules_are_as_defined(group, rule, bounded):
    values, k, bounds = group
    bounds = bounds if bounded else None
    found = group_subset(values, k, bounds=bounds, rule=rule, backend="cpu")
    defined = group_subset(values, k, bounds=bounds, rule=rule, backend="eager")
    if rule != "max_variance" or max(values) - min(values) < 1e300:
        assert found.proved == defined.proved
    if rule != "max_variance":
        assert found == defined


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(-6, 6).map(float), min_size=1, max_size=9), st.data())
def test_max_variance_is_exceeded_by_no_subset(values, data):
    k = data.draw(st.integers(1, len(values)))

    def variance(indices):
        chosen = [values[index] for index in indices]
        return k * sum(value * value for value in chosen) - sum(chosen) ** 2  # exact integers

    largest = max(map(variance, itertools.combinations(range(len(values)), k)))
    found = [group_subset(values, k, rule="max_variance", backend=name) for name in available()]
    for subset in found:
        assert variance(subset.indices) == largest
        assert len(set(subset.indices)) == k
    assert all(subset == found[0] for subset in found)


def available():
    return ["eager"] if backends.cpp_problem is not None else ["eager", "cpu"]


@pytest.mark.parametrize(
    ("values", "k", "bounds", "expected"),
    [
        ([0, 0, 0, 1], 2, (0.1, 0.9), [0, 3]),
        ([0, 0, 1, 1], 2, (0.1, 0.9), [0, 2]),
        ([2, 2, 1, 3, 0], 2, (0.5, 1.1), [0, 4]),
        ([0, 0, 0, 0], 2, (0.1, 0.9), None),
        ([0.0, 1.0], 1, (0.1, 0.9), None),
        ([0.0, 1.0, 2.0], 3, (0.9, 1.1), [0, 1, 2]),
        ([0.0, 1.0, 2.0], 3, (1.0, 1.1), None),  # bounds are exclusive
        ([0.1, 0.2, 0.3], 1, (0.0, math.inf), [0]),  # all equally far from an infinite middle
        ([0.1, 0.2, 0.3], 2, (0.0, math.inf), [0, 2]),
        ([0.1, 0.2, 0.3], 2, (-math.inf, math.inf), [0, 1]),
    ],
)
def test_known_groups(backend, values, k, bounds, expected):
    found = group_subset(values, k, bounds=bounds, backend=backend)
    assert found == (expected, True, True)


@needs_cpp
@pytest.mark.parametrize("seed", range(6))
def test_what_enumeration_cannot_reach_is_no_worse_than_dynamic_programming(seed):
    # 256 candidates with 16 levels: the best sum and spread from a table of all reachable sums.
    draw = random.Random(seed)
    values = [draw.randrange(16) / 16 for _ in range(256)]
    k, bounds = 64, [(0.1, 0.9), (0.2, 0.613), (0.93, 0.96)][seed % 3]
    reachable = [set() for _ in range(k + 1)]
    reachable[0] = {0}
    for value in values:
        for count in range(k, 0, -1):
            reachable[count] |= {total + int(value * 16) for total in reachable[count - 1]}
    middle = 0.5 * (bounds[0] + bounds[1])
    means = [total / 16 / k for total in reachable[k]]
    means = [mean for mean in means if bounds[0] < mean < bounds[1]]
    found = group_subset(values, k, bounds=bounds, backend="cpu")
    assert found.proved
    if not means:
        assert found.indices is None
        return
    deviation, spread, indices = score(values, found.indices, bounds)
    assert deviation == min(abs(mean - middle) for mean in means)
    if seed % 3 < 2:
        assert -spread == max(values) - min(values)
    assert indices == sorted(set(indices))


@needs_cpp
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("n", "k"), [(20, 10), (22, 11), (24, 8)])
def test_meeting_in_the_middle_agrees_with_ordered_search(n, k, dtype):
    values = torch.rand(n, dtype=dtype, generator=torch.Generator().manual_seed(n))
    found = group_subset(values, k, bounds=(0.1, 0.9), enumeration_limit=1, backend="cpu")
    assert found.proved
    listed = values.double().tolist()
    best = score(listed, found.indices, (0.1, 0.9))
    # No exchange of one or two members improves on it.
    outside = [index for index in range(n) if index not in found.indices]
    for count in (1, 2):
        for removed in itertools.combinations(found.indices, count):
            for added in itertools.combinations(outside, count):
                indices = sorted(set(found.indices) - set(removed) | set(added))
                assert score(listed, indices, (0.1, 0.9)) >= best


@needs_cpp
def test_forty_random_floats_are_proved():
    values = torch.rand(40, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = group_subset(values, 20, bounds=(0.1, 0.9))
    assert found.proved
    assert score(values.tolist(), found.indices, (0.1, 0.9))[0] < 1e-11


@needs_cpp
def test_beyond_proof_the_answer_is_close_and_says_so():
    values = torch.rand(200, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = group_subset(values, 60, bounds=(0.1, 0.9))
    assert not found.proved
    assert score(values.tolist(), found.indices, (0.1, 0.9))[0] < 1e-10
    assert found == group_subset(values, 60, bounds=(0.1, 0.9))


@needs_cpp
def test_without_budget_nothing_is_claimed():
    values = torch.rand(64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = group_subset(values, 32, bounds=(0.4999, 0.5), budget=1)
    assert not found.proved


@needs_cpp
def test_few_distinct_floats_among_many_have_the_closest_mean():
    levels = torch.rand(4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    values = levels[torch.randint(4, (200,), generator=torch.Generator().manual_seed(2))].tolist()
    counts = [values.count(level) for level in levels.tolist()]
    best = min(
        abs(
            math.fsum(c * level for c, level in zip(chosen, levels.tolist(), strict=True)) / 50
            - 0.5
        )
        for chosen in itertools.product(*(range(min(count, 50) + 1) for count in counts[:3]), [0])
        for chosen in [(*chosen[:3], 50 - sum(chosen[:3]))]
        if 0 <= chosen[3] <= counts[3]
    )
    found = group_subset(values, 50, bounds=(0.1, 0.9))
    assert found.mean_proved
    assert score(values, found.indices, (0.1, 0.9))[0] == pytest.approx(best, abs=1e-14)


def test_selecting_and_accepting_use_one_arithmetic(backend):
    values = [0.8444218635559082, 0.7579544186592102, 0.42057159543037415]
    bounds = (0.6743159294128418, 2.0)
    # The mean in fp32 is on the other side of the lower bound than in fp64.
    found = group_subset(values, 3, bounds=bounds, backend=backend)
    assert (found.indices is not None) == (bounds[0] < eager.mean(values, range(3)) < bounds[1])


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool]
)
def test_any_dtype_shape_and_layout(backend, dtype):
    values = torch.tensor([[0, 9], [0, 9], [0, 9], [1, 9]], dtype=dtype)[:, :1]
    assert not values.is_contiguous()
    found = group_subset(values, 2, bounds=(0.1, 0.9), backend=backend)
    assert found.indices == [0, 3]


def test_batched_is_group_by_group(backend):
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(0, 4, (50, 9), generator=generator) / 4
    lengths = torch.randint(4, 10, (50,), generator=generator)
    values[torch.arange(9) >= lengths[:, None]] = math.nan  # never read
    batch = group_subsets(values, 4, lengths=lengths, bounds=(0.4, 0.5), backend=backend)
    assert batch.indices.shape == (50, 4)
    for row, length, indices, found, proved in zip(
        values, lengths, batch.indices, batch.found, batch.proved, strict=True
    ):
        single = group_subset(row[:length], 4, bounds=(0.4, 0.5), backend=backend)
        assert single.indices == (indices.tolist() if found else None)
        assert single.proved == proved
    assert 0 < batch.found.sum() < 50


def test_a_batch_of_no_groups(backend):
    batch = group_subsets(torch.zeros(0, 4), 2, bounds=(0.1, 0.9), backend=backend)
    assert batch.indices.shape == (0, 2)
    assert batch.found.shape == (0,)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_raise(backend, rule, bad):
    with pytest.raises(ValueError, match=r"values must be finite, got .* at index 1"):
        group_subset([0.0, bad, 1.0], 2, bounds=(0.1, 0.9), rule=rule, backend=backend)
    with pytest.raises(ValueError, match=r"values must be finite, got .* at \[1, 2\]"):
        group_subsets(
            torch.tensor([[0.0, 0, 1], [0, 0, bad]]),
            2,
            bounds=(0.1, 0.9),
            rule=rule,
            backend=backend,
        )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"k": 4}, "k must be between 1 and the number of candidates 3, got 4"),
        ({"k": 0}, "k must be between 1"),
        ({"k": 1.5}, "k must be an integer, got 1.5"),
        ({"budget": -1}, "budget must not be negative, got -1"),
        ({"budget": 1e6}, "budget must be an integer, got 1000000.0"),
        ({"enumeration_limit": -1}, "enumeration_limit must not be negative, got -1"),
        ({"enumeration_limit": 0.5}, "enumeration_limit must be an integer, got 0.5"),
        ({"bounds": (0.5, 0.5)}, "bounds must be an increasing"),
        ({"bounds": (0.9, 0.1)}, "bounds must be an increasing"),
        ({"bounds": (math.nan, 0.1)}, "bounds must be an increasing"),
        ({"bounds": None}, "rule='balanced' needs bounds"),
        ({"rule": "best"}, "rule must be one of"),
        ({"backend": "gpu"}, "backend must be"),
    ],
)
def test_arguments_that_make_no_sense_raise(arguments, message):
    arguments = {"k": 2, "bounds": (0.1, 0.9)} | arguments
    with pytest.raises(ValueError, match=message):
        group_subset([0.0, 0.5, 1.0], **arguments)
    with pytest.raises(ValueError, match=message):
        group_subsets(torch.tensor([[0.0, 0.5, 1.0]]), **arguments)


def test_values_that_are_not_real_numbers_raise():
    for values in ([1j, 0.0, 1.0], ["a", 0.0, 1.0], torch.tensor([1j, 0.0, 1.0])):
        with pytest.raises(ValueError, match="values must be real numbers"):
            group_subset(values, 2, rule="uniform")
    with pytest.raises(ValueError, match=r"values must be real .* torch\.complex64"):
        group_subsets(torch.zeros(2, 3, dtype=torch.complex64), 2, rule="uniform")


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.bool])
def test_lengths_that_are_not_integers_raise(dtype):
    with pytest.raises(ValueError, match=f"lengths must be integers, got {dtype}"):
        group_subsets(torch.zeros(2, 3), 2, lengths=torch.tensor([3, 3]).to(dtype), rule="uniform")


def test_shapes_that_do_not_fit_raise():
    with pytest.raises(ValueError, match=r"values must be \[groups, n\]"):
        group_subsets(torch.zeros(3), 2, bounds=(0.1, 0.9))
    with pytest.raises(ValueError, match=r"lengths must be \[2\]"):
        group_subsets(torch.zeros(2, 3), 2, lengths=torch.ones(3, dtype=int), bounds=(0.1, 0.9))
    with pytest.raises(ValueError, match="lengths must be at most n = 3, got 4"):
        group_subsets(torch.zeros(2, 3), 2, lengths=torch.tensor([3, 4]), bounds=(0.1, 0.9))


def test_a_preferred_gpu_backend_does_not_stop_it():
    with backends.use_backend("eager"):
        assert group_subset([0.0, 1.0, 1.0], 2, bounds=(0.1, 0.9)).indices == [0, 1]


def test_the_definition_runs_where_nothing_is_built(monkeypatch):
    monkeypatch.setattr(backends, "cpp_problem", "not built")
    assert group_subset([0.0, 0.0, 1.0], 2, bounds=(0.1, 0.9)) == ([0, 2], True, True)
    values = torch.rand(64, generator=torch.Generator().manual_seed(0))
    found = group_subset(values, 32, bounds=(0.4, 0.6))
    assert not found.proved
    assert 0.4 < values[found.indices].mean() < 0.6
    assert group_subset(values, 32, bounds=(0.9, 1.0)) == (None, True, True)
    with pytest.raises(RuntimeError, match="backend='cpu' cannot run: not built"):
        group_subset([0.0, 1.0], 1, bounds=(0.1, 0.9), backend="cpu")


@needs_cpp
def test_other_threads_run_during_a_search():
    values = torch.rand(40, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    started, done, ticks = threading.Event(), threading.Event(), []

    def tick():
        started.set()
        while not done.wait(0.001):
            ticks.append(time.perf_counter())

    thread = threading.Thread(target=tick)
    thread.start()
    started.wait()
    begin = time.perf_counter()
    group_subset(values, 20, bounds=(0.1, 0.9))
    end = time.perf_counter()
    done.set()
    thread.join()
    # Under the interpreter's lock there would be one at most, before the search has begun.
    assert sum(begin < at < end for at in ticks) >= 3
