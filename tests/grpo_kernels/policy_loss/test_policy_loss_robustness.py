"""What stands in a masked slot changes nothing; what is wrong at a valid token shows."""

import itertools
import math

import pytest
import torch
from policy_loss_reference import (
    FULL,
    LOSSES,
    assert_equal_outputs,
    evaluate,
    make_batch,
    naive_policy_loss,
)

from grpo_kernels import policy_loss

GARBAGE = [math.nan, math.inf, -math.inf, 1e38]


def assert_bitwise_equal(actual, expected):
    for name, want in expected.items():
        if want is not None:
            torch.testing.assert_close(actual[name], want, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize(("objective", "semantics"), [("grpo", "torchrl"), ("cispo", "corrected")])
def test_garbage_in_masked_slots_changes_nothing(backend, objective, semantics, garbage):
    options = {
        "objective": objective,
        "semantics": semantics,
        "aggregation": "none" if objective == "cispo" else "prompt_mean",
        "kl_mask_threshold": 0.5,
        "backend": backend,
        **FULL,
    }
    batch = make_batch(2, 41)
    batch["mask"][1, :20] = False
    filled = {
        name: tensor if name == "mask" else torch.where(batch["mask"], tensor, garbage)
        for name, tensor in batch.items()
    }
    assert_bitwise_equal(
        evaluate(policy_loss, filled, options), evaluate(policy_loss, batch, options)
    )


@pytest.mark.parametrize("missing", [math.nan, math.inf])
def test_garbage_beside_a_missing_old_log_prob_changes_nothing(backend, missing):
    batch = make_batch(2, 41, entropy=False)
    there = torch.rand(2, 41) < 0.6
    masked = {**batch, "mask": batch["mask"] & there}
    old = torch.where(there, batch["old_log_probs"], missing)
    missing_too = {**batch, "old_log_probs": old}
    for name in ("log_probs", "ref_log_probs", "advantages"):
        missing_too[name] = torch.where(there, batch[name], math.nan)
    options = {"backend": backend, "semantics": "corrected", **FULL, "entropy_coeff": None}
    assert_bitwise_equal(
        evaluate(policy_loss, missing_too, options), evaluate(policy_loss, masked, options)
    )


def test_an_fp64_old_log_prob_beyond_fp32_is_not_finite_beside_fp32_log_probs(backend):
    old = torch.tensor([[1e300, 0.0]], dtype=torch.float64)
    output = policy_loss(torch.zeros(1, 2), old, torch.ones(1), backend=backend)
    assert output.loss_objective == -1
    assert output.ESS == 1


@pytest.mark.parametrize("garbage", [math.nan, 1e38])
@pytest.mark.parametrize(("objective", "semantics"), [("grpo", "corrected"), ("cispo", "torchrl")])
def test_garbage_in_the_advantage_of_a_kl_masked_token_changes_nothing(
    backend, objective, semantics, garbage
):
    batch = make_batch(2, 41, spread=1.0)
    dropped = 0.5 * (batch["log_probs"] - batch["old_log_probs"]) ** 2 > 0.5
    assert (dropped & batch["mask"]).any()
    filled = {**batch, "advantages": torch.where(dropped, garbage, batch["advantages"])}
    options = {
        "objective": objective,
        "semantics": semantics,
        "kl_mask_threshold": 0.5,
        "backend": backend,
        **FULL,
    }
    expected = evaluate(policy_loss, batch, options)
    assert expected["loss_objective"].isfinite()
    assert_bitwise_equal(evaluate(policy_loss, filled, options), expected)


def test_a_nan_upstream_gradient_at_a_masked_token_goes_nowhere(backend):
    batch = make_batch(2, 20)
    options = {"aggregation": "none", "semantics": "corrected", "backend": backend, **FULL}
    upstream = {name: torch.ones(2, 20) for name in LOSSES}
    expected = evaluate(policy_loss, batch, options, upstream=upstream)
    upstream = {name: torch.where(batch["mask"], 1.0, math.nan) for name in LOSSES}
    assert_bitwise_equal(evaluate(policy_loss, batch, options, upstream=upstream), expected)


@pytest.mark.parametrize(
    ("name", "terms"),
    [
        ("log_probs", ("loss_objective", "loss_kl_to_ref", "loss_kl_to_inference", "kl_approx")),
        ("advantages", ("loss_objective",)),
        ("ref_log_probs", ("loss_kl_to_ref", "kl_to_ref")),
        ("entropy", ("loss_entropy", "entropy")),
    ],
)
@pytest.mark.parametrize(("objective", "semantics"), [("grpo", "corrected"), ("cispo", "torchrl")])
def test_a_nan_at_a_valid_token_shows(backend, semantics, objective, name, terms):
    batch = make_batch(2, 20)
    batch["mask"][1, 7] = True
    batch[name][1, 7] = math.nan
    options = {"semantics": semantics, "objective": objective, "backend": backend, **FULL}
    output = evaluate(policy_loss, batch, options)
    for term in terms:
        assert output[term].isnan(), term
    if name == "log_probs":
        assert output["ESS"].isnan()


@pytest.mark.parametrize("semantics", ["torchrl", "corrected"])
def test_a_nan_log_prob_is_dropped_by_torchrls_kl_mask_only(backend, semantics):
    batch = make_batch(2, 20, masked=False)
    batch["log_probs"][1, 7] = math.nan
    output = policy_loss(**batch, kl_mask_threshold=9.0, semantics=semantics, backend=backend)
    assert output.loss_objective.isnan() == (semantics == "corrected")


@pytest.mark.parametrize("objective", ["grpo", "cispo"])
@pytest.mark.parametrize("semantics", ["torchrl", "corrected"])
@pytest.mark.parametrize("cap", [None, 20.0])
def test_log_ratios_to_100_give_the_formula(backend, objective, semantics, cap):
    """fp32 overflows beyond 88: with A > 0, or capped, the value is finite there all the same."""
    batch = make_batch(2, 50, spread=40.0, ref=False, entropy=False)
    log_ratio = batch["log_probs"] - batch["old_log_probs"]
    if cap is None:
        batch["advantages"] = torch.where(log_ratio > 80, 0.7, batch["advantages"])
    assert log_ratio.max() > 88
    options = {"objective": objective, "semantics": semantics, "log_ratio_cap": cap}
    expected = evaluate(naive_policy_loss, batch, options, double=True)
    actual = evaluate(policy_loss, batch, {**options, "backend": backend})
    # A log-ratio of 100 in fp32 is off by 4e-6, its exponential by as much, relatively.
    assert_equal_outputs(actual, expected, batch, rtol=3e-5)


def test_a_vanishing_ratio_has_a_vanishing_gradient(backend):
    log_probs = torch.tensor([[-200.0, 0.0]], requires_grad=True)
    output = policy_loss(log_probs, torch.zeros(1, 2), torch.tensor([[-1.0, 1.0]]), backend=backend)
    output.loss_objective.backward()
    torch.testing.assert_close(output.loss_objective, torch.tensor(-0.1))
    torch.testing.assert_close(log_probs.grad, torch.tensor([[0.0, -0.5]]))
    torch.testing.assert_close(output.ESS, torch.tensor(0.5))


@pytest.mark.parametrize("base", [-150.0, 150.0])
def test_the_effective_sample_size_has_no_range(backend, base):
    """Every weight over- or underflows; their shares do not."""
    log_ratio = torch.full((2, 1100), base)
    log_ratio[0, 0] += math.log(3.0)
    weights = torch.ones(2, 1100, dtype=torch.float64)
    weights[0, 0] = 3
    expected = weights.sum() ** 2 / (weights**2).sum() / weights.numel()
    ess = policy_loss(
        log_ratio, torch.zeros(2, 1100), torch.ones(2), clip_low=0.5, backend=backend
    ).ESS
    torch.testing.assert_close(ess.double(), expected, rtol=1e-5, atol=0)


def test_an_advantage_of_zero_weighs_an_impossible_token_as_zero(backend):
    log_probs = torch.tensor([[-math.inf, -1.0]], requires_grad=True)
    old, advantages = torch.tensor([[-2.0, -1.0]]), torch.tensor([[0.0, 1.0]])
    for objective, semantics in itertools.product(("grpo", "cispo"), ("torchrl", "corrected")):
        log_probs.grad = None
        out = policy_loss(
            log_probs, old, advantages, objective=objective, semantics=semantics, backend=backend
        )
        out.loss_objective.backward()
        assert out.loss_objective.isfinite()
        assert log_probs.grad.tolist() == [[0.0, -0.5]]
