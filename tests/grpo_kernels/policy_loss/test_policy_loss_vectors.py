"""The numbers that must come out: each defect of TorchRL, with the right value beside it."""

import math

import pytest
import torch

from grpo_kernels import policy_loss
from grpo_kernels.policy_loss import policy_loss_with
from grpo_kernels.policy_loss.options import PolicyLossOptions

NAN, INF = math.nan, math.inf


def tokens(*values):
    return torch.tensor([values], dtype=torch.float32)


def loss_and_gradient(log_ratio, advantages, backend, mask=None, old=None, **options):
    """Values and d loss_objective / d log_probs of one row with old log-probs of 0."""
    log_probs = tokens(*log_ratio).requires_grad_()
    old = torch.zeros_like(log_probs) if old is None else tokens(*old)
    mask = None if mask is None else torch.tensor([mask])
    output = policy_loss(log_probs, old, tokens(*advantages), mask, backend=backend, **options)
    (gradient,) = torch.autograd.grad(output.loss_objective.sum(), log_probs)
    return output, gradient[0]


def close(got, *want):
    want = torch.tensor(want if len(want) > 1 else want[0], dtype=torch.float64)
    torch.testing.assert_close(got.detach().double(), want, rtol=2e-4, atol=1e-6)


SEMANTICS = pytest.mark.parametrize("semantics", ["torchrl", "corrected"])


@SEMANTICS
def test_an_overflowing_ratio_with_the_clip_binding_is_finite(backend, semantics):
    output, gradient = loss_and_gradient(
        [100, 0], [1, 1], backend, clip_low=0.1, clip_high=0.1, semantics=semantics
    )
    close(output.loss_objective, -(1.1 + 1) / 2)
    close(gradient * 2, 0, -1)


@SEMANTICS
def test_an_overflowing_ratio_with_advantage_0_is_finite(backend, semantics):
    output, gradient = loss_and_gradient(
        [100, 0], [0, 1], backend, clip_low=0.1, clip_high=0.1, semantics=semantics
    )
    close(output.loss_objective, -0.5)
    close(gradient * 2, 0, -1)


@SEMANTICS
def test_an_overflowing_ratio_against_the_clip_is_infinite_unless_capped(backend, semantics):
    output, _ = loss_and_gradient([100], [-1], backend, semantics=semantics)
    assert output.loss_objective == INF
    output, gradient = loss_and_gradient(
        [100], [-1], backend, semantics=semantics, log_ratio_cap=20
    )
    close(output.loss_objective, math.exp(20))
    close(gradient, [0.0])


@pytest.mark.parametrize(
    ("semantics", "log_ratio", "clip_high", "expected"),
    [
        ("torchrl", (0.5, 0.05), 0.2, (0, -0.5256)),
        ("corrected", (0.5, 0.05), 0.2, (-0.6, -0.5256)),
        ("torchrl", (1.0, 0.0), 0.28, (0, -0.5)),
        ("corrected", (1.0, 0.0), 0.28, (-0.64, -0.5)),
    ],
)
def test_cispo_keeps_the_gradient_of_clipped_tokens_when_corrected(
    backend, semantics, log_ratio, clip_high, expected
):
    _, gradient = loss_and_gradient(
        log_ratio, (1, 1), backend, objective="cispo", clip_high=clip_high, semantics=semantics
    )
    close(gradient, *expected)


@SEMANTICS
def test_a_masked_overflowing_token_does_nothing(backend, semantics):
    output, gradient = loss_and_gradient(
        [0, 200], [-1, -1], backend, mask=[True, False], semantics=semantics
    )
    close(output.loss_objective, 1.0)
    close(gradient, 1, 0)


@SEMANTICS
@pytest.mark.parametrize("missing", [NAN, INF, -INF])
def test_a_token_without_a_finite_old_log_prob_counts_as_masked(backend, semantics, missing):
    output, gradient = loss_and_gradient(
        [0, 0], [1, 1], backend, old=[0, missing], semantics=semantics
    )
    close(output.loss_objective, -1.0)
    close(gradient, -1, 0)
    close(output.ESS, 1.0)


@SEMANTICS
def test_a_nan_advantage_at_a_token_that_is_not_trained_does_nothing(backend, semantics):
    output, gradient = loss_and_gradient(
        [0, 0, 3],
        [1, NAN, NAN],
        backend,
        mask=[True, False, True],
        kl_mask_threshold=1.0,
        semantics=semantics,
    )
    close(output.loss_objective, -1.0)
    close(gradient, -1, 0, 0)
    assert output.clip_fraction.isfinite()


@SEMANTICS
@pytest.mark.parametrize("aggregation", ["token_mean", "prompt_mean", "none"])
@pytest.mark.parametrize("shape", [(2, 3), (0, 3), (2, 0), (0, 0)])
def test_a_batch_without_valid_tokens_gives_zeros_and_a_graph(
    backend, semantics, aggregation, shape
):
    inputs = [torch.randn(shape) for _ in range(5)]
    log_probs, old, advantages, ref, entropy = inputs
    leaves = [log_probs.requires_grad_(), ref.requires_grad_(), entropy.requires_grad_()]
    output = policy_loss(
        log_probs,
        old,
        advantages,
        torch.zeros(shape, dtype=torch.bool),
        ref_log_probs=ref,
        entropy=entropy,
        kl_to_ref_coeff=1.0,
        kl_to_inference_coeff=1.0,
        entropy_coeff=1.0,
        aggregation=aggregation,
        semantics=semantics,
        backend=backend,
    )
    for name, term in output._asdict().items():
        assert term is not None, name
        torch.testing.assert_close(term, torch.zeros_like(term), msg=name)
    for gradient in torch.autograd.grad(sum(loss.sum() for loss in output[:4]), leaves):
        assert gradient.shape == shape
        torch.testing.assert_close(gradient, torch.zeros(shape))


@SEMANTICS
def test_a_fully_masked_row_changes_only_its_own_gradient(backend, semantics):
    log_probs = torch.randn(2, 3, requires_grad=True)
    mask = torch.tensor([[True] * 3, [False] * 3])
    loss = policy_loss(
        log_probs, torch.zeros(2, 3), torch.ones(2), mask, semantics=semantics, backend=backend
    ).loss_objective
    (gradient,) = torch.autograd.grad(loss, log_probs)
    alone = policy_loss(
        log_probs[:1], torch.zeros(1, 3), torch.ones(1), semantics=semantics, backend=backend
    ).loss_objective
    torch.testing.assert_close(loss, alone)
    torch.testing.assert_close(gradient[1], torch.zeros(3))


ROWS = {  # losses [-1] and [1, 1, 1]: the loss of a token with ratio 1 is -A
    "advantages": torch.tensor([[1.0, 0.0, 0.0], [-1.0, -1.0, -1.0]]),
    "mask": torch.tensor([[True, False, False], [True, True, True]]),
}


@SEMANTICS
@pytest.mark.parametrize(
    ("aggregation", "whole", "normaliser"), [("token_mean", 0.5, 4), ("prompt_mean", 0.0, 2)]
)
def test_micro_batches_add_up_to_the_whole_batch_with_the_normaliser(
    backend, semantics, aggregation, whole, normaliser
):
    def loss(rows, normaliser):
        zeros = torch.zeros(len(ROWS["mask"][rows]), 3)
        return policy_loss(
            zeros,
            zeros,
            ROWS["advantages"][rows],
            ROWS["mask"][rows],
            aggregation=aggregation,
            semantics=semantics,
            normaliser=normaliser,
            backend=backend,
        ).loss_objective.sum()

    close(loss(slice(0, 2), None), whole)
    close(loss(slice(0, 1), normaliser) + loss(slice(1, 2), normaliser), whole)


@pytest.mark.parametrize(
    ("semantics", "shape", "expected"), [("torchrl", (1,), -0.5), ("corrected", (), -1.0)]
)
def test_prompt_mean_counts_fully_masked_rows_only_as_torchrl_does(
    backend, semantics, shape, expected
):
    zeros = torch.zeros(2, 3)
    mask = torch.tensor([[True] * 3, [False] * 3])
    loss = policy_loss(
        zeros,
        zeros,
        torch.ones(2),
        mask,
        aggregation="prompt_mean",
        semantics=semantics,
        backend=backend,
    ).loss_objective
    assert loss.shape == shape
    close(loss.sum(), expected)


@pytest.mark.parametrize(
    ("semantics", "clip_fraction", "kl_approx", "kl"),
    [("torchrl", 0.25, -0.125, 0.0920), ("corrected", 1.0, -0.5, 0.3679)],
)
def test_metrics_are_means_over_positions_or_over_valid_tokens(
    backend, semantics, clip_fraction, kl_approx, kl
):
    output = policy_loss(
        tokens(0.5, 0, 0, 0),
        tokens(0, 0, 0, 0),
        torch.ones(1),
        torch.tensor([[True, False, False, False]]),
        ref_log_probs=tokens(-0.5, 9, 9, 9),
        kl_to_ref_coeff=1.0,
        semantics=semantics,
        backend=backend,
    )
    close(output.clip_fraction, clip_fraction)
    close(output.kl_approx, kl_approx)
    torch.testing.assert_close(output.loss_kl_to_ref, torch.tensor(kl), rtol=0, atol=5e-5)
    torch.testing.assert_close(output.kl_to_ref, torch.tensor(kl), rtol=0, atol=5e-5)


@pytest.mark.parametrize(("semantics", "expected"), [("torchrl", 1.0), ("corrected", 0.0)])
def test_clip_fraction_counts_where_the_clip_binds_when_corrected(backend, semantics, expected):
    output, _ = loss_and_gradient([1, -1], [-1, 1], backend, semantics=semantics)
    close(output.clip_fraction, expected)


@SEMANTICS
@pytest.mark.parametrize(
    ("log_ratio", "expected"), [((0, math.log(3)), 0.8), ((0, 50, -3), 1 / 3), ((800, 0), 0.5)]
)
def test_effective_sample_size(backend, semantics, log_ratio, expected):
    output, _ = loss_and_gradient(log_ratio, [1] * len(log_ratio), backend, semantics=semantics)
    close(output.ESS, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("log_ratio", [0.0, 0.3125, -70.0, 90.0])
@pytest.mark.parametrize("count", [65, 1025])
def test_the_effective_sample_size_of_equal_weights_is_exactly_1(backend, dtype, log_ratio, count):
    old = torch.full((1, count), -1.0, dtype=dtype)
    log_probs = old + torch.tensor(log_ratio, dtype=dtype)
    assert policy_loss(log_probs, old, torch.zeros(1), backend=backend).ESS == 1


@pytest.mark.parametrize("log_ratio", [0.0, 0.3125, -3.0, 90.0])
def test_the_fp64_effective_sample_size_of_equal_weights_is_1(backend, log_ratio):
    old = torch.zeros(3, 333, dtype=torch.float64)
    ess = policy_loss(old + log_ratio, old, torch.zeros(3), backend=backend).ESS
    torch.testing.assert_close(ess, torch.ones_like(ess), rtol=1e-13, atol=0)


@pytest.mark.parametrize(("semantics", "expected"), [("torchrl", 0.462), ("corrected", 1.386)])
def test_entropy_is_a_mean_over_positions_or_over_valid_tokens(backend, semantics, expected):
    zeros = torch.zeros(1, 3)
    output = policy_loss(
        zeros,
        zeros,
        zeros,
        torch.tensor([[False, True, False]]),
        entropy=tokens(7, math.log(4), 7),
        semantics=semantics,
        backend=backend,
    )
    torch.testing.assert_close(output.entropy, torch.tensor(expected), rtol=0, atol=5e-4)


@SEMANTICS
@pytest.mark.parametrize("valid", [3, 40])
def test_entropies_of_pads_count_where_a_loss_asks_for_it(backend, semantics, valid):
    """100 tokens of which the first are valid; three pads are not finite, the others are halves."""
    entropy = torch.full((1, 100), 0.5)
    entropy[0, :valid] = 2.0
    entropy[0, [50, 51, 99]] = tokens(NAN, INF, -INF)
    zeros = torch.zeros(1, 100)
    options = PolicyLossOptions(
        "grpo", 0.2, 0.2, None, "token_mean", None, None, 0.1, semantics, None, None
    )._replace(entropy_of_pads=True)
    output = policy_loss_with(
        options, zeros, zeros, zeros, torch.arange(100)[None] < valid, None, entropy, backend
    )
    of_all = (2.0 * valid + 0.5 * (97 - valid)) / 100
    expected = of_all if semantics == "torchrl" else 2.0
    torch.testing.assert_close(output.entropy, torch.tensor(expected))
    torch.testing.assert_close(output.loss_entropy, torch.tensor(-0.2))


@SEMANTICS
@pytest.mark.parametrize("aggregation", ["token_mean", "prompt_mean"])
def test_kl_penalties_follow_aggregation_and_precede_the_kl_mask_when_corrected(
    backend, semantics, aggregation
):
    """k3 per token: 1, then 0 or 1 at a KL-masked one, 0, a pad; a second row with 0."""
    one = 1.1461932206205825  # exp(x) - 1 - x = 1
    log_probs = torch.tensor([[0.0, 5.0, 0.0, 9.0], [0.0, 9.0, 9.0, 9.0]])
    ref = torch.tensor([[one, 5.0, 0.0, -9.0], [0.0, -9.0, -9.0, -9.0]])
    mask = torch.tensor([[True, True, True, False], [True, False, False, False]])

    def loss_kl_to_ref():
        return policy_loss(
            log_probs,
            torch.zeros(2, 4),
            torch.ones(2),
            mask,
            ref_log_probs=ref,
            kl_to_ref_coeff=1.0,
            kl_mask_threshold=1.0,
            aggregation=aggregation,
            semantics=semantics,
            backend=backend,
        ).loss_kl_to_ref

    one_token = {
        ("torchrl", "token_mean"): 1 / 8,
        ("torchrl", "prompt_mean"): 1 / 8,
        ("corrected", "token_mean"): 1 / 4,
        ("corrected", "prompt_mean"): (1 / 3 + 0) / 2,
    }[semantics, aggregation]
    close(loss_kl_to_ref(), one_token)
    ref[0, 1] += one
    close(loss_kl_to_ref(), one_token if semantics == "torchrl" else 2 * one_token)


@SEMANTICS
def test_the_kl_mask_is_against_the_sampling_policy(backend, semantics):
    _, gradient = loss_and_gradient(
        [0, 2], [1, 1], backend, kl_mask_threshold=1.0, clip_high=9.0, semantics=semantics
    )
    close(gradient, -1, 0)
