"""First derivatives by finite differences, no second ones, and nothing else changed."""

import math

import pytest
import torch
from policy_loss_reference import FULL, make_batch

from grpo_kernels import policy_loss

NAMES = ("log_probs", "ref_log_probs", "entropy")


@pytest.mark.parametrize("aggregation", ["token_mean", "prompt_mean", "none"])
@pytest.mark.parametrize("semantics", ["torchrl", "corrected"])
def test_gradients_are_finite_differences(backend, semantics, aggregation):
    batch = make_batch(1, 5, dtype=torch.float64)
    log_ratio = batch["log_probs"] - batch["old_log_probs"]
    bounds = torch.tensor([0.8, 1.2]).double().log()
    assert ((log_ratio[..., None] - bounds).abs() > 1e-3).all()  # smooth where it is tested
    leaves = [batch[name].requires_grad_() for name in NAMES]

    def losses(log_probs, ref_log_probs, entropy):
        changed = {"log_probs": log_probs, "ref_log_probs": ref_log_probs, "entropy": entropy}
        output = policy_loss(
            **{**batch, **changed},
            semantics=semantics,
            aggregation=aggregation,
            backend=backend,
            **FULL,
        )
        return output[:4]

    torch.autograd.gradcheck(losses, leaves, fast_mode=True)


def test_cispo_weights_the_log_likelihood_gradient_when_corrected(backend):
    """-sg(clip(r)) A l is linear in l while the stopped weight is held."""
    batch = make_batch(2, 9, dtype=torch.float64, masked=False, ref=False, entropy=False)
    log_probs = batch.pop("log_probs").requires_grad_()
    loss = policy_loss(
        log_probs,
        **batch,
        objective="cispo",
        semantics="corrected",
        aggregation="none",
        backend=backend,
    ).loss_objective
    (gradient,) = torch.autograd.grad(loss.sum(), log_probs)
    torch.testing.assert_close(gradient * log_probs, loss)


@pytest.mark.parametrize("through", ["a leaf", "a computed log-prob"])
def test_a_second_derivative_raises(backend, through):
    leaf = torch.randn(2, 3, requires_grad=True)
    log_probs = leaf**3 if through == "a computed log-prob" else leaf
    loss = policy_loss(log_probs, torch.zeros(2, 3), torch.ones(2), backend=backend).loss_objective
    (gradient,) = torch.autograd.grad(loss, leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="policy_loss: double backward"):
        gradient.sum().backward()


def test_bounds_that_move_before_the_backward_do_not_change_the_gradient(backend):
    log_probs = torch.tensor([[0.3, -0.1]], requires_grad=True)
    low, high = torch.tensor(0.2), torch.tensor(0.2)
    old, advantages = torch.zeros(1, 2), torch.ones(1)
    loss = policy_loss(
        log_probs, old, advantages, clip_low=low, clip_high=high, backend=backend
    ).loss_objective
    high.fill_(5.0)
    loss.backward()
    torch.testing.assert_close(log_probs.grad, torch.tensor([[0.0, -0.5 * math.exp(-0.1)]]))


def test_a_bound_that_is_no_number_shows_in_loss_and_gradient(backend):
    log_probs = torch.tensor([[0.3, -0.1]], requires_grad=True)
    nan = torch.tensor(math.nan)
    out = policy_loss(log_probs, torch.zeros(1, 2), torch.ones(1), clip_high=nan, backend=backend)
    out.loss_objective.backward()
    assert out.loss_objective.isnan()
    assert log_probs.grad.isnan().all()


def test_metrics_are_not_differentiable(backend):
    batch = make_batch(2, 5)
    for name in NAMES:
        batch[name].requires_grad_()
    output = policy_loss(**batch, **FULL, backend=backend)
    assert all(loss.requires_grad for loss in output[:4])
    assert not any(metric.requires_grad for metric in output[4:])


def test_losses_may_be_changed_in_place(backend):
    batch = make_batch(2, 5)
    log_probs = batch["log_probs"].requires_grad_()
    output = policy_loss(**batch, **FULL, backend=backend)
    loss = output.loss_objective
    loss += output.loss_kl_to_inference
    (in_place,) = torch.autograd.grad(loss, log_probs)
    output = policy_loss(**batch, **FULL, backend=backend)
    loss = output.loss_objective + output.loss_kl_to_inference
    (out_of_place,) = torch.autograd.grad(loss, log_probs)
    torch.testing.assert_close(in_place, out_of_place, rtol=0, atol=0)


def test_no_input_is_changed(backend):
    batch = make_batch(2, 40)
    copies = {name: tensor.clone() for name, tensor in batch.items()}
    batch["log_probs"].requires_grad_()
    policy_loss(**batch, **FULL, backend=backend).loss_objective.backward()
    for name, tensor in copies.items():
        torch.testing.assert_close(batch[name].detach(), tensor, rtol=0, atol=0)


def test_nothing_is_recorded_without_a_gradient(backend):
    batch = make_batch(2, 5)
    assert not policy_loss(**batch, backend=backend).loss_objective.requires_grad
    batch["log_probs"].requires_grad_()
    with torch.no_grad():
        assert not policy_loss(**batch, backend=backend).loss_objective.requires_grad


def test_a_backward_may_be_repeated(backend):
    batch = make_batch(2, 5)
    log_probs = batch["log_probs"].requires_grad_()
    loss = policy_loss(**batch, backend=backend).loss_objective
    (first,) = torch.autograd.grad(loss, log_probs, retain_graph=True)
    (second,) = torch.autograd.grad(loss, log_probs)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
