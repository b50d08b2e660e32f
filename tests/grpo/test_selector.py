"""MCAdvantageSelector against TorchRL's."""

import math
import pickle
import warnings
from math import comb

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torchrl.objectives.llm import MCAdvantageSelector as TorchRLSelector

from grpo import MCAdvantageSelector


def candidates(values, dtype=torch.float64):
    return TensorDict({"return": torch.tensor(values, dtype=dtype)}, [len(values)])


RETURNS = st.sampled_from(
    [
        st.floats(0, 1, width=32),
        st.sampled_from([0.0, 1.0]),
        st.integers(0, 10).map(lambda level: level / 10),
        st.sampled_from([0.0, 0.5, 1.0, math.inf, -math.inf, math.nan]),
        st.floats(-100, 100),
    ]
)


@settings(max_examples=600, deadline=None)
@given(st.data())
def test_selects_what_torchrl_enumerates(data):
    returns = data.draw(RETURNS)
    values = data.draw(st.lists(returns, min_size=1, max_size=11))
    size = data.draw(st.integers(1, len(values)))
    bounds = data.draw(
        st.sampled_from([(0.1, 0.9), (0.0, 1.0), (0.29999, 0.30001), (0.5, math.inf), (-5, -1)])
    )
    arguments = {"group_size": size, "keep_return_bounds": bounds}
    expected = TorchRLSelector().select(candidates(values), **arguments)
    assert MCAdvantageSelector().select(candidates(values), **arguments) == expected


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_uniform_and_first_are_torchrls(data):
    values = data.draw(st.lists(st.floats(-3, 3, width=32), min_size=1, max_size=40))
    size = data.draw(st.integers(1, len(values)))
    bounds = data.draw(st.sampled_from([None, (0.1, 0.9), (-1.0, 1.0)]))
    for strategy in ("uniform", "first"):
        arguments = {"group_size": size, "keep_return_bounds": bounds}
        expected = TorchRLSelector(strategy).select(candidates(values), **arguments)
        assert MCAdvantageSelector(strategy).select(candidates(values), **arguments) == expected


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(-3, 3), min_size=1, max_size=40), st.data())
def test_balanced_without_bounds_is_uniform_as_in_torchrl(values, data):
    size = data.draw(st.integers(1, len(values)))
    expected = TorchRLSelector().select(candidates(values), group_size=size)
    assert MCAdvantageSelector().select(candidates(values), group_size=size) == expected


@pytest.mark.parametrize("seed", range(8))
def test_selects_what_torchrl_enumerates_at_its_limit(seed):
    # 18 choose 9 is the largest half that TorchRL enumerates.
    generator = torch.Generator().manual_seed(seed)
    if seed % 2:
        values = torch.rand(18, generator=generator)
    else:
        values = torch.randint(0, 11, (18,), generator=generator) / 10
    given = TensorDict({"return": values}, [18])
    arguments = {"group_size": 9, "keep_return_bounds": (0.1, 0.83)}
    assert comb(18, 9) <= 100_000
    expected = TorchRLSelector().select(given, **arguments)
    assert MCAdvantageSelector().select(given, **arguments) == expected


@pytest.mark.slow
@pytest.mark.parametrize("levels", [None, 10, 15])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_selects_what_torchrl_enumerates_with_its_limit_raised(levels, dtype):
    generator = torch.Generator().manual_seed(3)
    values = torch.rand(22, dtype=dtype, generator=generator)
    if levels is not None:
        values = (values * levels).round() / levels
    given = TensorDict({"return": values}, [22])
    arguments = {"group_size": 11, "keep_return_bounds": (0.2, 0.7)}
    limit = comb(22, 11)
    expected = TorchRLSelector(max_combinations=limit).select(given, **arguments)
    assert MCAdvantageSelector(max_combinations=limit).select(given, **arguments) == expected


def test_finds_what_torchrls_greedy_walk_misses():
    # 25 choose 12 is beyond TorchRL's enumeration, and its walk gives None.
    values = [2.0] * 22 + [1.0, 3.0, 0.0]
    arguments = {"group_size": 2, "keep_return_bounds": (0.5, 1.1)}
    assert TorchRLSelector(max_combinations=1).select(candidates(values), **arguments) is None
    assert MCAdvantageSelector(max_combinations=1).select(candidates(values), **arguments) == [
        0,
        24,
    ]
    values = [2.0, 2.0, 1.0, 3.0, 0.0]
    assert MCAdvantageSelector().select(candidates(values), **arguments) == [0, 4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_any_dtype(dtype):
    selected = MCAdvantageSelector().select(
        candidates([0, 0, 0, 1], dtype), group_size=2, keep_return_bounds=(0.1, 0.9)
    )
    assert selected == [0, 3]


def test_max_variance_takes_both_ends():
    selector = MCAdvantageSelector("max_variance")
    values = [0.5, 0.9, 0.4, 0.0, 0.6, 1.0]
    assert selector.select(candidates(values), group_size=4) == [1, 2, 3, 5]
    assert selector.select(candidates(values), group_size=2) == [3, 5]
    outside = selector.select(candidates(values), group_size=2, keep_return_bounds=(0.6, 0.7))
    assert outside is None


def test_reads_the_first_of_in_keys():
    selector = MCAdvantageSelector(in_keys=[("info", "score")])
    given = TensorDict({"info": {"score": torch.tensor([[0.0], [0.0], [1.0]])}}, [3])
    assert selector.select(given, group_size=2, keep_return_bounds=(0.1, 0.9)) == [0, 2]
    with pytest.raises(KeyError):
        selector.select(candidates([0.0, 1.0]), group_size=1)


@pytest.mark.parametrize("make", [TorchRLSelector, MCAdvantageSelector])
def test_constructor_errors(make):
    with pytest.raises(ValueError, match=r"strategy must be one of 'first', 'uniform'.*got 'best'"):
        make("best")
    with pytest.raises(ValueError, match=r"max_combinations must be strictly positive, got 0\."):
        make(max_combinations=0)
    with pytest.raises(ValueError, match=r"in_keys must contain at least one key\."):
        make(in_keys=[])


@pytest.mark.parametrize("make", [TorchRLSelector, MCAdvantageSelector])
def test_selection_errors(make):
    with pytest.raises(ValueError, match=r"Need at least 3 candidates, got 2\."):
        make().select(candidates([0.0, 1.0]), group_size=3)
    two_each = TensorDict({"return": torch.zeros(3, 2)}, [3])
    with pytest.raises(ValueError, match="expect one scalar value per candidate under 'return'"):
        make().select(two_each, group_size=2)


def test_errors_that_torchrl_does_not_raise():
    with pytest.raises(ValueError, match="group_size must be at least 1, got 0"):
        MCAdvantageSelector().select(candidates([0.0]), group_size=0)
    with pytest.raises(ValueError, match="bounds must be an increasing"):
        MCAdvantageSelector().select(
            candidates([0.0, 1.0]), group_size=1, keep_return_bounds=(0.5, 0.5)
        )
    with pytest.raises(ValueError, match="values must be finite"):
        MCAdvantageSelector("uniform").select(candidates([0.0, math.nan, 1.0]), group_size=2)


def test_a_search_without_a_proof_is_counted_and_reported(monkeypatch):
    import grpo.selector as module

    search = module.group_subset
    monkeypatch.setattr(
        module, "group_subset", lambda *args, **kwargs: search(*args, **kwargs, budget=1)
    )
    values = torch.rand(64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    given = TensorDict({"return": values}, [64])
    selector = MCAdvantageSelector()
    assert selector.select(given, group_size=32, keep_return_bounds=(0.1, 0.9)) is not None
    assert (selector.unproved_selections, selector.gave_up_selections) == (1, 0)
    narrow = (0.5, math.nextafter(0.5, 1.0) + 1e-15)
    with pytest.warns(UserWarning, match="before the search's budget ran out"):
        assert selector.select(given, group_size=32, keep_return_bounds=narrow) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        selector.select(given, group_size=32, keep_return_bounds=narrow)
    assert selector.gave_up_selections == 2


def test_it_is_a_torchrl_selector_and_pickles():
    selector = pickle.loads(pickle.dumps(MCAdvantageSelector("uniform", max_combinations=7)))
    assert isinstance(selector, TorchRLSelector)
    assert (selector.strategy, selector.max_combinations) == ("uniform", 7)


def test_any_limit_on_combinations_is_accepted():
    selector = MCAdvantageSelector(max_combinations=10**30)
    candidates = TensorDict({"return": torch.tensor([0.0, 0.0, 1.0])}, [3])
    chosen = selector.select(candidates, group_size=2, keep_return_bounds=(0.1, 0.9))
    assert chosen == [0, 2]
