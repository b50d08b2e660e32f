"""Every documented difference between torchrl's numbers and the corrected ones."""

import math

import pytest
import torch
import torchrl.objectives.llm as torchrl_losses
from loss_stubs import ACTION, REF, SAMPLED, GivenActor, LogitsActor
from tensordict import TensorDict, lazy_stack
from torchrl.objectives.llm.grpo import CISPOLoss as TorchRLCISPOLoss

import grpo

SEMANTICS = pytest.mark.parametrize("semantics", ["torchrl", "corrected"])


def batch_of(old, advantages, ref=None):
    old = torch.tensor(old, dtype=torch.float32)
    batch = TensorDict(
        {
            ACTION: torch.zeros(old.shape, dtype=torch.int64),
            SAMPLED: old,
            "advantage": torch.tensor(advantages, dtype=torch.float32).unsqueeze(-1),
        },
        old.shape[:1],
    )
    if ref is not None:
        batch[REF] = torch.tensor(ref, dtype=torch.float32)
    return batch


def actor_of(log_probs, mask=None):
    log_probs = torch.tensor(log_probs, dtype=torch.float32)
    mask = torch.ones(log_probs.shape, dtype=torch.bool) if mask is None else torch.tensor(mask)
    return GivenActor(log_probs, torch.zeros_like(log_probs), mask)


def close(got, want):
    torch.testing.assert_close(
        got.detach(), torch.as_tensor(want, dtype=got.dtype), rtol=2e-4, atol=5e-5
    )


ONE_OF_FOUR = [[True, False, False, False]]


@SEMANTICS
def test_metrics_and_kl_are_means_over_positions_or_valid_tokens(semantics):
    actor = actor_of([[0.5, 0.0, 0.0, 0.0]], ONE_OF_FOUR)
    batch = batch_of([[0.0] * 4], [[1.0] * 4], [[-0.5, 0.0, 0.0, 0.0]])
    output = grpo.GRPOLoss(actor, kl_to_ref_coeff=1.0, semantics=semantics)(batch)
    torchrl = semantics == "torchrl"
    close(output.clip_fraction, 0.25 if torchrl else 1.0)
    close(output.kl_approx, -0.125 if torchrl else -0.5)
    close(output.loss_kl_to_ref, 0.0920 if torchrl else 0.3679)
    close(output.kl_to_ref, 0.0920 if torchrl else 0.3679)
    theirs = torchrl_losses.GRPOLoss(actor, kl_to_ref_coeff=1.0)(batch)
    if torchrl:
        close(output.loss_kl_to_ref, theirs.loss_kl_to_ref)


@SEMANTICS
def test_entropy_is_a_mean_over_positions_or_valid_tokens(semantics):
    logits = torch.zeros(1, 3, 4)
    actor = LogitsActor(logits, torch.tensor([[False, True, False]]))
    output = grpo.GRPOLoss(actor, semantics=semantics)(batch_of([[-1.0] * 3], [[1.0] * 3]))
    close(output.entropy, math.log(4) / 3 if semantics == "torchrl" else math.log(4))
    close(output.loss_entropy, -0.01 * math.log(4))


@SEMANTICS
def test_clip_fraction_counts_all_outside_or_where_the_clip_binds(semantics):
    output = grpo.GRPOLoss(actor_of([[1.0, -1.0]]), semantics=semantics)(
        batch_of([[0.0, 0.0]], [[-1.0, 1.0]])
    )
    close(output.clip_fraction, 1.0 if semantics == "torchrl" else 0.0)


@SEMANTICS
@pytest.mark.parametrize("aggregation", ["token_mean", "prompt_mean", "none"])
def test_kl_penalties_follow_the_aggregation_when_corrected(semantics, aggregation):
    """Rows of 1 and 3 valid tokens; only the first row is away from the reference, by k3 = 1."""
    one = 1.1461932206205825
    actor = actor_of([[0.0] * 3, [0.0] * 3], [[True, False, False], [True] * 3])
    batch = batch_of([[0.0] * 3] * 2, [[0.0] * 3] * 2, [[one, 0.0, 0.0], [0.0] * 3])
    loss = grpo.GRPOLoss(actor, kl_to_ref_coeff=1.0, aggregation=aggregation, semantics=semantics)
    got = loss(batch).loss_kl_to_ref
    if semantics == "torchrl":
        close(got, 1 / 6)
    elif aggregation == "none":
        assert got.shape == (2, 3, 1)
        close(got.sum(), 1.0)
    else:
        close(got, {"token_mean": 1 / 4, "prompt_mean": 1 / 2}[aggregation])


@SEMANTICS
def test_kl_penalties_see_kl_masked_tokens_when_corrected(semantics):
    """Token 1 is 3 nats from the sampling policy: dropped from the objective in both."""
    actor = actor_of([[0.0, 3.0]])
    batch = batch_of([[0.0, 0.0]], [[1.0, 1.0]])
    options = {"kl_mask_threshold": 1.0, "kl_to_inference_coeff": 1.0, "semantics": semantics}
    output = grpo.GRPOLoss(actor, **options)(batch)
    close(output.loss_objective, -1.0)
    k3 = math.exp(-3) - 1 + 3
    close(output.loss_kl_to_inference, 0.0 if semantics == "torchrl" else k3 / 2)


@SEMANTICS
def test_prompt_mean_counts_fully_masked_rows_or_not(semantics):
    actor = actor_of([[0.0] * 3] * 2, [[True] * 3, [False] * 3])
    loss = grpo.GRPOLoss(actor, aggregation="prompt_mean", semantics=semantics)
    got = loss(batch_of([[0.0] * 3] * 2, [[1.0] * 3] * 2)).loss_objective
    assert got.shape == ((1,) if semantics == "torchrl" else ())
    close(got.sum(), -0.5 if semantics == "torchrl" else -1.0)


@SEMANTICS
def test_cispo_differentiates_through_the_clip_or_never(semantics):
    loss = grpo.CISPOLoss(
        actor_of([[1.0, 0.0]]), clip_epsilon=(0.2, 0.28), entropy_bonus=False, semantics=semantics
    )
    batch = batch_of([[0.0, 0.0]], [[1.0, 1.0]])
    output = loss(batch)
    output.loss_objective.backward()
    gradient = loss.actor_network.log_probs.grad
    if semantics == "torchrl":
        close(output.loss_objective, -(1.28 + 1) / 2)
        close(gradient, [[0.0, -0.5]])
        theirs = TorchRLCISPOLoss(
            actor_of([[1.0, 0.0]]), clip_epsilon=(0.2, 0.28), entropy_bonus=False
        )
        close(theirs(batch).loss_objective, output.loss_objective)
    else:
        close(output.loss_objective, -1.28 * 1.0 / 2)
        close(gradient, [[-0.64, -0.5]])


@SEMANTICS
def test_dapo_clips_higher_by_default_when_corrected(semantics):
    loss = grpo.DAPO(actor_of([[1.0]]), semantics=semantics)
    output = loss(batch_of([[0.0]], [[1.0]]))
    close(output.loss_objective, -1.2 if semantics == "torchrl" else -1.28)


@SEMANTICS
def test_ragged_advantages_are_padded_on_the_right_or_as_the_tokens(semantics):
    """Vector 11: advantages [10, 20] of a row of two tokens beside one of three."""

    def row(advantages):
        length = len(advantages)
        return TensorDict(
            {
                ACTION: torch.zeros(length, dtype=torch.int64),
                SAMPLED: torch.zeros(length),
                "advantage": torch.tensor(advantages).unsqueeze(-1),
            }
        )

    batch = lazy_stack([row([10.0, 20.0]), row([1.0, 1.0, 1.0])])
    actor = actor_of([[0.0] * 3] * 2, [[False, True, True], [True] * 3])
    loss = grpo.GRPOLoss(actor, aggregation="none", semantics=semantics)
    got = loss(batch).loss_objective[0, :, 0]
    close(got, [0.0, -20.0, 0.0] if semantics == "torchrl" else [0.0, -10.0, -20.0])
    if semantics == "torchrl":
        theirs = torchrl_losses.GRPOLoss(actor, aggregation="none")(batch)
        close(theirs.loss_objective[0, :, 0], got)


@SEMANTICS
@pytest.mark.parametrize("aggregation", ["token_mean", "none"])
def test_reduction_sum_is_ignored_or_a_sum(semantics, aggregation):
    loss = grpo.GRPOLoss(
        actor_of([[0.0] * 4]), reduction="sum", aggregation=aggregation, semantics=semantics
    )
    got = loss(batch_of([[0.0] * 4], [[1.0, 2.0, 3.0, 4.0]])).loss_objective
    if aggregation == "none":
        assert got.shape == (1, 4, 1)
    else:
        close(got, -2.5 if semantics == "torchrl" else -10.0)


@SEMANTICS
def test_the_kl_mask_is_against_the_sampling_policy(semantics):
    """Token 0 is far from the reference, token 1 from the sampling policy."""
    loss = grpo.GRPOLoss(
        actor_of([[0.0, 3.0]]), kl_mask_threshold=1.0, aggregation="none", semantics=semantics
    )
    batch = batch_of([[0.0, 0.0]], [[1.0, 1.0]], [[-9.0, 3.0]])
    close(loss(batch).loss_objective[0, :, 0], [-1.0, 0.0])


@SEMANTICS
def test_an_overflowing_ratio_is_finite_where_the_clip_binds(semantics):
    """Vector 1: TorchRL's gradient is NaN."""
    loss = grpo.GRPOLoss(
        actor_of([[100.0, 0.0]]), clip_epsilon=0.1, entropy_bonus=False, semantics=semantics
    )
    output = loss(batch_of([[0.0, 0.0]], [[1.0, 1.0]]))
    output.loss_objective.backward()
    close(output.loss_objective, -(1.1 + 1) / 2)
    close(loss.actor_network.log_probs.grad, [[0.0, -0.5]])


@SEMANTICS
def test_log_ratio_cap_bounds_the_loss(semantics):
    loss = grpo.GRPOLoss(actor_of([[100.0]]), log_ratio_cap=20.0, semantics=semantics)
    close(loss(batch_of([[0.0]], [[-1.0]])).loss_objective, math.exp(20))


@SEMANTICS
@pytest.mark.parametrize(
    ("aggregation", "whole", "normaliser"), [("token_mean", 0.5, 4), ("prompt_mean", 0.0, 2)]
)
def test_micro_batches_add_up_with_the_normaliser(semantics, aggregation, whole, normaliser):
    """Vector 9: rows with losses [-1] and [1, 1, 1]."""
    masks = [[True, False, False], [True] * 3]
    advantages = [[1.0, 0.0, 0.0], [-1.0] * 3]

    def loss(rows, normaliser):
        actor = actor_of([[0.0] * 3 for _ in rows], [masks[row] for row in rows])
        module = grpo.GRPOLoss(actor, aggregation=aggregation, semantics=semantics)
        batch = batch_of([[0.0] * 3 for _ in rows], [advantages[row] for row in rows])
        return module(batch, normaliser=normaliser).loss_objective.sum()

    close(loss([0, 1], None), whole)
    close(loss([0], normaliser) + loss([1], normaliser), whole)


@SEMANTICS
def test_equal_bf16_weights_have_an_effective_sample_size_of_1(semantics):
    actor = actor_of([[0.0] * 65])
    actor.log_probs.data = actor.log_probs.data.bfloat16()
    batch = batch_of([[0.0] * 65], [[1.0] * 65])
    batch[SAMPLED] = batch[SAMPLED].bfloat16()
    assert grpo.GRPOLoss(actor, semantics=semantics)(batch).ESS == 1


@SEMANTICS
@pytest.mark.parametrize("shape", [(2, 3), (0, 3), (2, 0)])
def test_a_batch_without_valid_tokens_gives_zeros_and_a_graph(semantics, shape):
    """Vector 7."""
    actor = GivenActor(torch.randn(shape), torch.zeros(shape), torch.zeros(shape) > 0)
    batch = TensorDict(
        {
            ACTION: torch.zeros(shape, dtype=torch.int64),
            SAMPLED: torch.randn(shape),
            REF: torch.randn(shape),
            "advantage": torch.randn(*shape, 1),
        },
        shape[:1],
    )
    loss = grpo.GRPOLoss(actor, kl_to_ref_coeff=1.0, kl_to_inference_coeff=1.0, semantics=semantics)
    output = loss(batch)
    terms = output.to_tensordict().to_dict()
    losses = [term for key, term in terms.items() if key.startswith("loss_")]
    assert len(losses) == 4
    for key, value in terms.items():
        assert (value == 0).all(), key
    sum(value.sum() for value in losses).backward()
    assert (actor.log_probs.grad == 0).all()
