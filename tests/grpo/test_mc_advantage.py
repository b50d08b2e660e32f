"""MCAdvantage against TorchRL's, and where TorchRL raises or gives NaN, against the formula."""

import copy
import math
import re
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict, lazy_stack
from torchrl.data import LazyStackStorage, LazyTensorStorage, ReplayBuffer
from torchrl.objectives.llm import MCAdvantage as TorchRLMCAdvantage
from torchrl.objectives.llm import MCAdvantageSelector as TorchRLSelector

from grpo import MCAdvantage, MCAdvantageSelector
from grpo.group_ledger import group_advantages


def trajectory(group, rewards, identity=0, dtype=torch.float32, done=True):
    steps = len(rewards)
    return TensorDict(
        {
            "query": group if isinstance(group, str) else torch.full((steps,), group),
            "identity": torch.full((steps,), identity),
            "next": TensorDict(
                {
                    "reward": torch.tensor(rewards, dtype=dtype).reshape(steps, 1),
                    "done": torch.tensor([False] * (steps - 1) + [done]).reshape(steps, 1),
                },
                [steps],
            ),
        },
        [steps],
    )


def with_tokens(trajectory, lengths):
    """As LLM collectors give it: a lazy stack of steps with ragged tokens."""
    steps = [step.clone() for step in trajectory.unbind(0)]
    for step, length in zip(steps, lengths, strict=False):
        step["tokens"] = torch.arange(length)
    return lazy_stack(steps, 0)


def write_all(transform, returns, group=0, dtype=torch.float64):
    """One-step trajectories one by one; what is written."""
    out = [transform.inv(trajectory(group, [r], i, dtype)) for i, r in enumerate(returns)]
    return [td for td in out if td is not None]


def assert_same(ours, theirs):
    assert (ours is None) == (theirs is None)
    if ours is None:
        return
    assert type(ours) is type(theirs)
    assert ours.batch_size == theirs.batch_size
    assert set(ours.keys(True, True)) == set(theirs.keys(True, True))
    for a, b in zip(ours.unbind(0), theirs.unbind(0), strict=True):
        for key in b.keys(True, True):
            x, y = a[key], b[key]
            if isinstance(y, torch.Tensor):
                assert x.dtype == y.dtype
                # Of a group of equal rewards TorchRL divides the rounding, up to 2^-24, by 1e-6.
                rounding = 0.2 if key == "advantage" and (x == 0).all() else 1e-5
                torch.testing.assert_close(x, y, rtol=2e-4, atol=rounding)
            else:
                assert x == y


@st.composite
def settings_of_both(draw):
    size = draw(st.integers(2, 4))
    reduction = draw(st.sampled_from([None, "sum", "max", "mean"]))
    if reduction is None:
        return size, {}, "balanced"
    most = size + draw(st.integers(0, 4))
    arguments = {"trajectory_return": reduction, "candidate_group_size": most}
    if draw(st.booleans()):
        arguments["candidate_selection_min_size"] = draw(st.integers(size, most))
    if draw(st.booleans()):
        arguments["keep_return_bounds"] = (0.1, 0.9)
    return size, arguments, draw(st.sampled_from(["balanced", "uniform", "first"]))


@pytest.mark.filterwarnings("ignore:candidate_group_size")
@settings(max_examples=60, deadline=None)
@given(settings_of_both(), st.data())
def test_writes_and_counts_what_torchrl_does(made, data):
    size, arguments, strategy = made
    ours = MCAdvantage(size, candidate_selector=MCAdvantageSelector(strategy), **arguments)
    theirs = TorchRLMCAdvantage(size, candidate_selector=TorchRLSelector(strategy), **arguments)
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
    kind = data.draw(st.sampled_from(["plain", "prompt", "lazy", "ragged"]))
    levels = data.draw(st.sampled_from([[0.0, 1.0], [0.0, 0.25, 0.5, 1.0], [0.1, 0.7, 0.9]]))
    for identity in range(data.draw(st.integers(1, 12))):
        several = kind == "plain" and data.draw(st.booleans())
        batch = []
        for _ in range(3 if several else 1):
            group = data.draw(st.integers(0, 1))
            rewards = data.draw(st.lists(st.sampled_from(levels), min_size=1, max_size=3))
            made = trajectory(
                f"prompt {group}" if kind == "prompt" else group, rewards, identity, dtype
            )
            if kind in ("lazy", "ragged"):
                made = with_tokens(made, [4, 4, 4] if kind == "lazy" else [2, 5, 3])
            batch.append(made)
        given = torch.cat(batch, 0) if several else batch[0]
        assert_same(ours.inv(given), theirs.inv(given))
        stats = ours.get_stats()
        for name, expected in theirs.get_stats().items():
            assert stats[name] == pytest.approx(expected, rel=1e-5), name
            assert getattr(ours, name) == stats[name]


def test_batches_of_trajectories_by_time():
    ours, theirs = MCAdvantage(2), TorchRLMCAdvantage(2)
    rows = torch.stack([trajectory(g, [float(g), 1.0], g) for g in (0, 1, 0, 1)])
    assert_same(ours.inv(rows), theirs.inv(rows))
    nested = rows.reshape(2, 2, 2)
    assert_same(ours.inv(nested), theirs.inv(nested))


def test_the_input_is_left_alone():
    given = trajectory(0, [0.5])
    transform = MCAdvantage(1)
    assert "advantage" in transform.inv(given)
    assert "advantage" not in given


# vector 25
def test_equal_rewards_have_advantages_of_exactly_zero():
    for arguments in ({}, {"trajectory_return": "sum"}):
        (out,) = write_all(MCAdvantage(8, **arguments), [0.35] * 8, dtype=torch.float32)
        assert (out["advantage"] == 0).all()


@pytest.mark.parametrize("arguments", [{}, {"trajectory_return": "sum"}])
def test_rewards_close_together_far_from_zero_keep_their_advantages(arguments):
    (out,) = write_all(MCAdvantage(2, **arguments), [100.00001, 100.0])
    expected = torch.tensor([[1.0], [-1.0]], dtype=torch.float64) / math.sqrt(2)
    torch.testing.assert_close(out["advantage"], expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("arguments", [{}, {"trajectory_return": "sum"}])
def test_one_reward_apart_from_equal_ones(arguments):
    (out,) = write_all(MCAdvantage(8, **arguments), [0.0] + [0.95] * 7, dtype=torch.float32)
    advantages = out["advantage"].flatten()
    torch.testing.assert_close(advantages[0].item(), -7 / math.sqrt(8), rtol=1e-6, atol=0)
    torch.testing.assert_close(advantages[1:], torch.full((7,), 1 / math.sqrt(8)))


# vector 26
def test_a_group_of_one_step_has_advantage_zero():
    (out,) = write_all(MCAdvantage(1), [3.0])
    assert out["advantage"].tolist() == [[0.0]]


@pytest.mark.parametrize("reduction", [None, "sum", "max", "mean"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_trajectory_with_a_reward_that_is_not_finite_is_reported_and_dropped(reduction, bad):
    transform = MCAdvantage(4, trajectory_return=reduction)
    with pytest.warns(UserWarning, match=r"drops a trajectory of group 0: .* not finite"):
        (out,) = write_all(transform, [0.0, bad, 1.0, 1.0])
    assert out["identity"].tolist() == [0, 2, 3]
    expected = torch.tensor([[-2.0], [1.0], [1.0]], dtype=torch.float64) / math.sqrt(3)
    torch.testing.assert_close(out["advantage"], expected)
    stats = transform.get_stats()
    assert stats["nonfinite_trajectories"] == 1
    assert stats["completed_trajectories"] == 4
    assert stats["queued_groups"] == 0
    if reduction is not None:
        assert stats["trajectory_return_sum"] == 2.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write_all(transform, [bad, bad, bad, bad])
    assert transform.get_stats()["dropped_groups"] == 1


def test_oversampling_goes_on_past_a_trajectory_that_is_not_finite():
    transform = MCAdvantage(
        2, trajectory_return="sum", keep_return_bounds=(0.1, 0.9), candidate_group_size=4
    )
    with pytest.warns(UserWarning, match="not finite"):
        (out,) = write_all(transform, [0.0, math.nan, 0.0, 1.0])
    assert out["identity"].tolist() == [0, 3]


@pytest.mark.parametrize("reduction", [None, "sum", "max", "mean"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool])
def test_integer_rewards(reduction, dtype):
    (out,) = write_all(MCAdvantage(2, trajectory_return=reduction), [0, 1], dtype=dtype)
    expected = torch.tensor([[-1.0], [1.0]]) / math.sqrt(2)
    torch.testing.assert_close(out["advantage"], expected)


def test_half_precision_rewards_keep_their_dtype_and_are_summed_in_fp32():
    transform = MCAdvantage(2, trajectory_return="sum")
    transform.inv(trajectory(0, [1.0] * 300, dtype=torch.bfloat16))
    out = transform.inv(trajectory(0, [1.0] * 301, dtype=torch.bfloat16))
    assert out["advantage"].dtype == torch.bfloat16
    assert transform.trajectory_return_sum == 601


def test_an_unfinished_tail_of_a_flat_batch_is_counted_and_dropped():
    transform = MCAdvantage(2, trajectory_return="sum")
    tail = trajectory(5, [1.0, 1.0], done=False)
    out = transform.inv(torch.cat([trajectory(0, [0.0]), trajectory(0, [0.0, 1.0]), tail]))
    assert out.shape == (3,)
    assert transform.unfinished_trajectories == 1
    assert transform.queued_groups == 0


@pytest.mark.parametrize("make", [MCAdvantage, TorchRLMCAdvantage])
def test_a_batch_without_a_finished_trajectory_raises(make):
    with pytest.raises(RuntimeError, match=r"Expected the trajectory to be done\."):
        make(2).inv(trajectory(0, [0.0, 1.0], done=False))


@pytest.mark.parametrize("make", [MCAdvantage, TorchRLMCAdvantage])
def test_a_group_identifier_that_is_none_raises(make):
    given = trajectory(0, [0.0]).set_non_tensor("query", 1.5)
    with pytest.raises(TypeError, match="Expected a string or tensor as group identifier"):
        make(2).inv(given)


@pytest.mark.parametrize("key", ["query", ("next", "reward"), ("next", "done")])
def test_missing_entries_raise(key):
    given = trajectory(0, [0.0])
    del given[key]
    for reduction in (None, "sum"):
        with pytest.raises(KeyError):
            MCAdvantage(2, trajectory_return=reduction).inv(given)


def test_groups_by_value_of_a_tensor():
    transform = MCAdvantage(2, trajectory_return="sum")
    for rewards in ([0.0], [1.0, 1.0]):
        steps = len(rewards)
        given = trajectory(0, rewards).set("query", torch.tensor([[1, 2]]).expand(steps, 2))
        out = transform.inv(given)
    assert out is not None


CONSTRUCTOR_ERRORS = [
    {"trajectory_return": "median"},
    {"trajectory_return": "sum", "grpo_size": 1},
    {"trajectory_return": "sum", "candidate_group_size": 1},
    {"candidate_group_size": 4},
    {"trajectory_return": "sum", "candidate_selection_min_size": 1},
    {"trajectory_return": "sum", "candidate_selection_min_size": 5, "candidate_group_size": 4},
    {"keep_return_bounds": (0.1, 0.9)},
    {"trajectory_return": "sum", "keep_return_bounds": (0.9, 0.1)},
    {"trajectory_return": "sum", "keep_return_bounds": (0.1, math.nan)},
    {"trajectory_return": "sum", "keep_return_bounds": (0.1, 0.5, 0.9)},
]


@pytest.mark.parametrize("arguments", CONSTRUCTOR_ERRORS)
def test_constructor_errors_are_torchrls(arguments):
    arguments = {"grpo_size": 2} | arguments
    with pytest.raises(ValueError, match="e") as theirs:
        TorchRLMCAdvantage(**arguments)
    with pytest.raises(ValueError, match=re.escape(str(theirs.value))):
        MCAdvantage(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"statistics": "some"}, "statistics must be 'subset' or 'all', got 'some'"),
        ({"advantage": "rank"}, "advantage must be one of .* got 'rank'"),
        ({"advantage": "leave_one_out"}, "set trajectory_return"),
        ({"max_pending_groups": 0}, "max_pending_groups must be at least 1, got 0"),
        ({"max_group_age": 0.0}, "max_group_age must be positive seconds, got 0.0"),
        ({"grpo_size": 0}, "grpo_size must be at least 1, got 0"),
        ({"grpo_size": 2.5}, "grpo_size must be an integer, got 2.5"),
        (
            {"trajectory_return": "sum", "candidate_group_size": 2.5},
            "candidate_group_size must be an integer, got 2.5",
        ),
        ({"max_pending_groups": 1.5}, "max_pending_groups must be an integer, got 1.5"),
    ],
)
def test_constructor_errors_of_our_own(arguments, message):
    with pytest.raises(ValueError, match=message):
        MCAdvantage(**({"grpo_size": 2} | arguments))


# vector 27
def test_oversampling_without_effect_is_warned_of():
    with pytest.warns(UserWarning, match="candidate_group_size=8 has no effect"):
        transform = MCAdvantage(2, trajectory_return="sum", candidate_group_size=8)
    written = write_all(transform, [0.0, 0.0, 0.0, 1.0, 1.0])
    assert written[0]["identity"].tolist() == [0, 1]  # as in TorchRL
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        both = {"trajectory_return": "sum", "candidate_group_size": 8}
        MCAdvantage(2, keep_return_bounds=(0.1, 0.9), **both)
        MCAdvantage(2, candidate_selection_min_size=8, **both)
        MCAdvantage(2, candidate_selector=LastTwo(), **both)


# vector 28
def test_what_is_selected_is_written():
    values = [0.8444218635559082, 0.7579544186592102, 0.42057159543037415]
    transform = MCAdvantage(
        3, trajectory_return="sum", keep_return_bounds=(0.6743159294128418, 2.0)
    )
    selected = transform.candidate_selector.select(
        TensorDict({"return": torch.tensor(values)}, [3]),
        group_size=3,
        keep_return_bounds=transform.keep_return_bounds,
    )
    assert len(write_all(transform, values, dtype=torch.float32)) == (selected is not None)
    stats = transform.get_stats()
    assert stats["selected_trajectories"] == 3 * stats["written_groups"]


def with_extra_entry(trajectory):
    return trajectory.set("extra", torch.zeros(len(trajectory)))


@pytest.mark.parametrize("reduction", [None, "sum"])
def test_a_group_that_cannot_be_written_costs_only_itself(reduction):
    transform = MCAdvantage(2, trajectory_return=reduction)
    for group in (0, 1, 2):
        first = trajectory(group, [0.0], 2 * group)
        transform.inv(with_extra_entry(first) if group == 1 else first)
    batch = torch.cat([trajectory(group, [1.0], 2 * group + 1) for group in (0, 1, 2)])
    with pytest.raises(RuntimeError, match=r"could not write group 1, .* dropped: KeyError") as e:
        transform.inv(batch)
    assert isinstance(e.value.__cause__, KeyError)
    stats = transform.get_stats()
    assert (stats["completed_groups"], stats["dropped_groups"], stats["failed_groups"]) == (3, 1, 1)
    assert stats["written_groups"] == 0  # nobody has them yet
    out = transform.inv(trajectory(3, [0.0]))
    assert out["identity"].tolist() == [0, 1, 4, 5]
    assert torch.equal(out["advantage"][:2], out["advantage"][2:])
    stats = transform.get_stats()
    assert stats["written_groups"] == 2
    assert stats["selected_trajectories"] == (0 if reduction is None else 4)
    assert transform.inv(trajectory(3, [1.0])).shape == (2,)


def test_groups_of_different_entries_come_one_with_each_call():
    transform = MCAdvantage(2, trajectory_return="sum")
    for group in (0, 1):
        transform.inv(trajectory(group, [0.0]))
        if group == 1:
            transform.queues[1][0].set("extra", torch.zeros(1))
    rows = [trajectory(0, [1.0]), with_extra_entry(trajectory(1, [1.0]))]
    out = transform.inv(lazy_stack([row[0] for row in rows], 0))
    assert "extra" not in out
    assert transform.written_groups == 1
    out = transform.inv(trajectory(0, [1.0])[:0])
    assert "extra" in out
    assert transform.written_groups == 2


class Returns:
    """A selector that returns what it is told to."""

    in_keys = ("return",)

    def __init__(self, answer):
        self.answer = answer

    def select(self, candidates, *, group_size, keep_return_bounds=None):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([], "ValueError: select must return one or more different indices from 0 to 1, got []"),
        ([0, 2], "from 0 to 1, got [0, 2]"),
        ([-1, 0], "from 0 to 1, got [-1, 0]"),
        ([1, 1], "from 0 to 1, got [1, 1]"),
        ([0.0, 1.0], "TypeError: select must return a list of integers or None, got [0.0, 1.0]"),
        (torch.tensor([True, False]), "TypeError: select must return a list of integers"),
        (3, "TypeError: select must return a list of integers or None, got 3"),
        (ZeroDivisionError("no"), "ZeroDivisionError: no"),
    ],
)
def test_a_selection_that_cannot_be_used_costs_only_its_group(answer, message):
    selector = Returns(answer)
    transform = MCAdvantage(2, trajectory_return="sum", candidate_selector=selector)
    for group in (0, 1):
        transform.inv(trajectory(group, [0.0], 2 * group))
    with pytest.raises(RuntimeError, match=re.escape(message)):
        transform.inv(trajectory(0, [1.0], 1))
    assert transform.queued_groups == 1
    assert transform.failed_groups == transform.dropped_groups == transform.completed_groups == 1
    selector.answer = [1, 0]
    assert transform.inv(trajectory(1, [1.0], 3))["identity"].tolist() == [3, 2]
    assert transform.written_groups == 1


def test_a_selection_that_fails_before_the_group_is_full_is_tried_again():
    selector = Returns([])
    transform = MCAdvantage(
        2, trajectory_return="sum", candidate_group_size=3, candidate_selector=selector
    )
    transform.inv(trajectory(0, [0.0], 0))
    with pytest.raises(RuntimeError, match=r"could not select from group 0, which is kept"):
        transform.inv(trajectory(0, [0.0], 1))
    selector.answer = [2, 0]
    assert transform.inv(trajectory(0, [1.0], 2))["identity"].tolist() == [2, 0]
    assert transform.failed_groups == 0


@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0), (0, 2, 3)])
def test_a_batch_without_steps_completes_nothing(shape):
    rows = trajectory(0, [0.0]).expand(*shape[:-1], 1)
    empty = rows[..., :0] if shape[-1] == 0 else rows.expand(*shape)
    transform = MCAdvantage(2)
    assert transform.inv(empty) is None
    assert transform.queued_groups == 0


@pytest.mark.parametrize(
    ("reduction", "advantage"), [(None, "none"), ("sum", "none"), ("sum", "leave_one_out")]
)
def test_advantages_stay_within_the_range_of_the_rewards_dtype(reduction, advantage):
    transform = MCAdvantage(3, trajectory_return=reduction, advantage=advantage)
    (out,) = write_all(transform, [-6.5e4, 6.5e4, 6.5e4], dtype=torch.float16)
    assert out["advantage"].dtype == torch.float16
    assert out["advantage"].flatten().tolist()[0] == -65504.0
    assert out["advantage"].isfinite().all()


class LastTwo:
    """A selector without TorchRL's private methods."""

    in_keys = ("return", "trajectories")

    def select(self, candidates, *, group_size, keep_return_bounds=None):
        assert candidates["trajectories"].shape[0] == candidates.numel()
        count = candidates.numel()
        return None if count < 4 else torch.tensor([count - 2, count - 1])


def test_any_object_with_select_is_a_selector():
    transform = MCAdvantage(
        2, trajectory_return="sum", candidate_group_size=5, candidate_selector=LastTwo()
    )
    (out,) = write_all(transform, [0.0, 0.0, 0.0, 1.0])
    assert out["identity"].tolist() == [2, 3]


def test_a_selection_outside_the_bounds_is_not_written():
    transform = MCAdvantage(
        2,
        trajectory_return="sum",
        candidate_group_size=4,
        keep_return_bounds=(0.1, 0.9),
        candidate_selector=LastTwo(),
    )
    assert write_all(transform, [0.0, 0.0, 1.0, 1.0]) == []
    assert transform.selected_trajectories == 0
    assert transform.dropped_groups == 1


@pytest.mark.parametrize("theirs", [TorchRLSelector("uniform"), MCAdvantageSelector("uniform")])
def test_torchrls_selectors_work_here_and_ours_there(theirs):
    for make in (MCAdvantage, TorchRLMCAdvantage):
        transform = make(
            2,
            trajectory_return="sum",
            candidate_group_size=4,
            candidate_selection_min_size=4,
            candidate_selector=theirs,
        )
        (out,) = write_all(transform, [0.5, 0.0, 1.0, 0.5])
        assert out["identity"].tolist() == [1, 2]


def oversampled(**arguments):
    return MCAdvantage(
        2,
        trajectory_return="sum",
        candidate_group_size=4,
        candidate_selection_min_size=4,
        **arguments,
    )


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, [-1 / math.sqrt(2), 1 / math.sqrt(2)]),
        ({"advantage": "none"}, [-2.0, 2.0]),
        ({"advantage": "leave_one_out"}, [-4.0, 4.0]),
        ({"statistics": "all"}, [-2.0 / math.sqrt(10 / 3), 2.0 / math.sqrt(10 / 3)]),
        ({"statistics": "all", "advantage": "none"}, [-2.0, 2.0]),
        ({"statistics": "all", "advantage": "leave_one_out"}, [-8 / 3, 8 / 3]),
    ],
)
def test_statistics_and_advantage(arguments, expected):
    selector = MCAdvantageSelector("max_variance")
    transform = oversampled(candidate_selector=selector, **arguments)
    (out,) = write_all(transform, [1.0, 4.0, 0.0, 3.0])  # selects 4 and 0; all: mean 2, var 10/3
    assert out["identity"].tolist() == [1, 2]
    expected = torch.tensor(expected, dtype=torch.float64).flip(0)[:, None]
    torch.testing.assert_close(out["advantage"], expected)


def test_advantages_that_are_only_centred_without_trajectory_returns():
    (out,) = write_all(MCAdvantage(2, advantage="none"), [1.0, 4.0])
    assert out["advantage"].flatten().tolist() == [-1.5, 1.5]


def test_the_oldest_groups_beyond_max_pending_groups_are_dropped_and_counted():
    transform = MCAdvantage(2, trajectory_return="sum", max_pending_groups=3)
    for group in range(5):
        transform.inv(trajectory(group, [0.0]))
    assert list(transform.queues) == [2, 3, 4]
    assert (transform.evicted_groups, transform.evicted_trajectories) == (2, 2)
    assert transform.inv(trajectory(2, [1.0])) is not None
    stats = transform.get_stats()
    gone = 2 * stats["completed_groups"] + stats["evicted_trajectories"]
    assert stats["completed_trajectories"] == stats["queued_trajectories"] + gone


def test_groups_older_than_max_group_age_are_dropped_and_counted(monkeypatch):
    import grpo.group_ledger as module

    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    transform = MCAdvantage(2, trajectory_return="sum", max_group_age=10.0)
    transform.inv(trajectory(0, [0.0]))
    now[0] = 6.0
    transform.inv(trajectory(1, [0.0]))
    now[0] = 12.0
    assert transform.inv(trajectory(1, [1.0])) is not None
    assert transform.queued_groups == 0
    assert transform.evicted_groups == 1


def test_queues_are_a_mapping_of_groups_to_trajectories():
    transform = MCAdvantage(3, trajectory_return="sum")
    transform.inv(trajectory(0, [0.0], 7))
    transform.inv(trajectory(0, [0.0], 8))
    transform.inv(trajectory("a", [0.0], 9))
    queues = transform.queues
    assert len(queues) == 2
    assert queues
    assert set(queues.keys()) == {0, "a"}
    assert "a" in queues
    assert [td["identity"].item() for td in queues[0]] == [7, 8]
    assert [len(queue) for queue in queues.values()] == [2, 1]
    assert [(group, len(queue)) for group, queue in queues.items()] == [(0, 2), ("a", 1)]
    del queues["a"]
    assert transform.queued_groups == 1
    assert transform.max_queued_trajectories_per_group == 2
    queues.clear()
    assert not transform.queues


def test_counters_can_be_set_and_reset():
    transform = MCAdvantage(2, trajectory_return="sum")
    transform.inv(trajectory(0, [2.0]))
    assert transform.trajectory_return_max == 2.0
    transform.completed_groups = 5
    transform.completed_groups += 1
    assert transform.get_stats()["completed_groups"] == 6
    transform.reset_stats()
    assert transform.trajectory_return_max == -math.inf
    assert transform.queued_trajectories == 1
    transform.clear_queues()
    assert transform.queued_trajectories == 0


def test_arguments_can_be_changed_afterwards():
    transform = MCAdvantage(2, trajectory_return="sum")
    transform.keep_return_bounds = (0.1, 0.9)
    assert transform.keep_return_bounds == (0.1, 0.9)
    assert write_all(transform, [0.0, 0.0]) == []
    transform.grpo_size = transform.candidate_group_size = 3
    transform.candidate_selection_min_size = 3
    (out,) = write_all(transform, [0.0, 0.0, 1.0])
    assert out.shape == (3,)


def test_inv_by_keywords_is_torchrls():
    # Transform.inv dispatches keywords to in_keys_inv, of which there are none.
    with pytest.raises(TypeError):
        MCAdvantage(2).inv(query=0)
    with pytest.raises(TypeError):
        TorchRLMCAdvantage(2).inv(query=0)


def test_a_copy_has_a_state_of_its_own():
    transform = MCAdvantage(2, trajectory_return="sum")
    transform.inv(trajectory(0, [0.0]))
    other = copy.deepcopy(transform)
    other.inv(trajectory(0, [1.0]))
    assert transform.queued_trajectories == 1
    assert other.queued_trajectories == 0


def test_verbose_writes_the_same(capfd):
    for arguments in ({}, {"trajectory_return": "sum", "keep_return_bounds": (0.1, 0.9)}):
        plain = write_all(MCAdvantage(2, **arguments), [0.0, 1.0, 0.0, 0.0])
        verbose = write_all(MCAdvantage(2, verbose=True, **arguments), [0.0, 1.0, 0.0, 0.0])
        assert len(plain) == len(verbose)
        assert_same(verbose[0], plain[0])


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyStackStorage])
def test_in_a_replay_buffer(storage):
    transform = MCAdvantage(2, trajectory_return="sum", keep_return_bounds=(0.1, 0.9))
    buffer = ReplayBuffer(storage=storage(100), transform=transform, batch_size=2)
    buffer.extend(trajectory(0, [0.0, 0.0]))
    assert len(buffer) == 0
    buffer.extend(trajectory(0, [0.0, 0.0, 1.0]))
    assert len(buffer) == 5
    buffer.extend(torch.stack([trajectory(1, [1.0]), trajectory(1, [1.0])]))
    assert len(buffer) == 5  # outside the bounds
    assert buffer.sample()["advantage"].abs().sum() > 1
    assert transform.get_stats()["written_groups"] == 1


@pytest.mark.parametrize("make", [MCAdvantage, TorchRLMCAdvantage])
def test_adding_steps_to_a_replay_buffer(make):
    # ReplayBuffer.add adds a dimension: every element is a trajectory of one step.
    buffer = ReplayBuffer(storage=LazyStackStorage(100), transform=make(2, trajectory_return="sum"))
    buffer.add(trajectory(0, [0.0])[0])
    assert len(buffer) == 0
    with pytest.raises(RuntimeError, match="Expected the trajectory to be done"):
        buffer.add(trajectory(0, [0.0, 1.0]))


def test_made_by_a_transform_factory():
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(100),
        transform_factory=lambda: MCAdvantage(2, trajectory_return="sum"),
    )
    buffer.extend(torch.stack([trajectory(1, [1.0]), trajectory(1, [0.0])]))
    assert len(buffer) == 2


def test_sampling_changes_nothing():
    given = trajectory(0, [0.0])
    assert MCAdvantage(2)(given) is given


@pytest.mark.parametrize(
    ("advantage", "expected"),
    [
        ("std", [-(0.5**0.5), 0.5**0.5]),
        ("none", [-5e199, 5e199]),
        ("leave_one_out", [-1e200, 1e200]),
    ],
)
def test_returns_whose_squares_overflow_have_finite_advantages(advantage, expected):
    assert group_advantages([0.0, 1e200], [0.0, 1e200], advantage) == pytest.approx(expected)
