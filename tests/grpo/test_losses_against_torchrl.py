"""Outputs and gradients of GRPOLoss, DAPO and CISPOLoss equal torchrl.objectives.llm's."""

import math

import pytest
import torch
import torchrl.objectives.llm as torchrl_losses
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from loss_stubs import (
    ACTION,
    REF,
    SAMPLED,
    GivenActor,
    LogitsActor,
    StrategyActor,
    compare,
    make_case,
)
from tensordict import TensorDict, lazy_stack
from torchrl.objectives.llm.grpo import CISPOLoss as TorchRLCISPOLoss

import grpo

NAMES = ("GRPOLoss", "DAPO", "CISPOLoss")
FULL = {"kl_to_ref_coeff": 0.3, "kl_to_inference_coeff": 0.7}


def losses_of(name):
    theirs = getattr(torchrl_losses, name, TorchRLCISPOLoss)
    return getattr(grpo, name), theirs


def check(name, case, batch, options, actor=GivenActor, **tolerance):
    loss, other = (cls(actor(*case), **options) for cls in losses_of(name))
    return compare(loss, other, batch, **tolerance)


OPTIONS = st.fixed_dictionaries(
    {
        "clip_epsilon": st.sampled_from([0.2, 0.0, 0.05, (0.2, 0.28), (0.9, 3.0), (0.0, 0.3)]),
        "kl_mask_threshold": st.sampled_from([None, 0, 0.01, 0.1, 100.0]),
        "aggregation": st.sampled_from([None, "token_mean", "prompt_mean", "none"]),
        "reduction": st.sampled_from([None, "mean", "sum", "none"]),
        "entropy_bonus": st.booleans(),
        "entropy_coeff": st.sampled_from([0.01, 1.0, 0.0]),
        "kl_to_ref_coeff": st.sampled_from([None, 0, 0.5]),
        "kl_to_inference_coeff": st.sampled_from([None, 0.0, 0.5]),
        "masking_strategy": st.sampled_from(["sft", "rlhf", "generic"]),
        "ref_log_prob_padding_side": st.sampled_from(["left", "right"]),
        "ref_log_prob_padding_value": st.sampled_from([0.0, 1.0]),
    }
)
QUICK = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("name", NAMES)
@QUICK
@given(
    options=OPTIONS,
    shape=st.tuples(st.integers(1, 5), st.sampled_from([1, 2, 9, 17, 40])),
    seed=st.integers(0, 2**20),
    spread=st.sampled_from([0.01, 0.3, 1.0]),
    keep=st.sampled_from([0.0, 0.3, 0.8, 1.0]),
    nan_pads=st.booleans(),
)
def test_any_options_give_torchrls_numbers(name, options, shape, seed, spread, keep, nan_pads):
    case, batch = make_case(*shape, seed=seed, dtype=torch.float64, spread=spread, keep=keep)
    mask = case[2]
    if nan_pads:
        batch[SAMPLED][torch.rand(shape) < 0.2] = math.nan
    trained = mask.roll(["sft", "rlhf", "generic"].index(options["masking_strategy"]), -1)
    trained = trained & batch[SAMPLED].isfinite()
    if options["kl_mask_threshold"]:
        ratio = case[0] - batch[SAMPLED]
        trained = trained & (0.5 * ratio**2 <= options["kl_mask_threshold"])
    ours, theirs = losses_of(name)
    # Without a token TorchRL's ESS is NaN, ours 0 (tested below).
    loss, other = ours(StrategyActor(*case), **options), theirs(StrategyActor(*case), **options)
    if not trained.any():
        assert other(batch).ESS.isnan()
        assert loss(batch).ESS == 0
        loss, other = WithoutESS(loss), WithoutESS(other)
    # Another libm's log1p of an fp32 clip buffer differs in the last place.
    compare(loss, other, batch, rtol=1e-7, atol=1e-9, seed=seed)


class WithoutESS:
    def __init__(self, loss):
        self.loss, self.actor_network = loss, loss.actor_network

    def __call__(self, batch):
        output = self.loss(batch)
        output.ESS = torch.zeros(())
        return output


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("backend", ["eager", "cpu", "triton"])
def test_every_backend_gives_torchrls_numbers(name, backend):
    ours, theirs = losses_of(name)
    case, batch = make_case(2, 21)
    options = {"aggregation": "prompt_mean", "kl_mask_threshold": 0.3, **FULL}
    loss = ours(GivenActor(*case), backend=backend, **options)
    compare(loss, theirs(GivenActor(*case), **options), batch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_low_precision_gives_the_fp64_numbers(name, dtype):
    """TorchRL's own numbers in the inputs' precision would be off by a percent."""
    ours, theirs = losses_of(name)
    case, batch = make_case(3, 21, dtype=dtype)
    lifted = batch.apply(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)
    log_probs, entropy, mask = case
    output = ours(GivenActor(*case), **FULL)(batch)
    expected = theirs(GivenActor(log_probs.double(), entropy.double(), mask), **FULL)(lifted)
    for key, want in expected.to_tensordict().items():
        got = output.get(key)
        assert got.dtype == torch.float32, key
        torch.testing.assert_close(got.double(), want.double(), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("aggregation", ["token_mean", "prompt_mean"])
def test_position_masked_logits_get_torchrls_gradient(name, aggregation):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 11, 7, generator=generator)
    mask = torch.rand(3, 11, generator=generator) < 0.6
    _, batch = make_case(3, 11)
    batch[ACTION] = torch.randint(7, (3, 11), generator=generator)
    options = {"aggregation": aggregation, **FULL}
    check(name, (logits, mask), batch, options, actor=LogitsActor)


def test_a_token_id_of_minus_100_at_a_masked_position_has_no_gradient():
    """Vector 5."""
    logits = torch.randn(1, 4, 7)
    mask = torch.tensor([[True, False, True, False]])
    _, batch = make_case(1, 4)
    batch[ACTION][~mask] = -100
    loss = grpo.GRPOLoss(LogitsActor(logits, mask), **FULL)
    output = loss(batch)
    (output.loss_objective + output.loss_kl_to_ref + output.loss_entropy).backward()
    gradient = loss.actor_network.logits.grad
    assert (gradient[~mask] == 0).all()
    assert gradient[mask].abs().sum() > 0
    assert gradient.isfinite().all()


@pytest.mark.parametrize("garbage", [math.nan, math.inf])
def test_garbage_logits_at_a_masked_position_have_no_gradient(garbage):
    """Vector 5."""
    logits = torch.randn(1, 3, 7)
    logits[0, 1, 2] = garbage
    mask = torch.tensor([[True, False, True]])
    _, batch = make_case(1, 3)
    loss = grpo.GRPOLoss(LogitsActor(logits, mask), entropy_bonus=False)
    loss(batch).loss_objective.backward()
    gradient = loss.actor_network.logits.grad
    assert (gradient[~mask] == 0).all()


def test_a_garbage_entropy_at_a_masked_position_reaches_neither_loss_nor_metric():
    case, batch = make_case(2, 5)
    case[1][~case[2]] = math.nan
    output = grpo.GRPOLoss(GivenActor(*case))(batch)
    assert output.loss_entropy.isfinite()
    assert output.entropy.isfinite()


@pytest.mark.parametrize("name", NAMES)
def test_finite_entropies_at_masked_positions_count_in_the_metric_as_in_torchrls(name):
    case, batch = make_case(2, 9, keep=0.3)
    check(name, case, batch, {})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [30.0, 60.0, 100.0])
def test_huge_log_ratios_give_torchrls_numbers_where_those_are_finite(name, size):
    case, batch = make_case(3, 21, dtype=torch.float64, spread=size)
    check(name, case, batch, {}, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_a_fully_masked_row_gives_torchrls_numbers(name):
    for aggregation in ("token_mean", "prompt_mean", "none"):
        case, batch = make_case(3, 9)
        case[2][1] = False
        check(name, case, batch, {"aggregation": aggregation, **FULL})


@pytest.mark.parametrize("name", NAMES)
def test_reference_log_probs_may_have_a_feature_dimension(name):
    for columns in (1, 9):
        case, batch = make_case(3, columns)
        batch[REF] = batch[REF].unsqueeze(-1)
        check(name, case, batch, FULL)


@pytest.mark.parametrize("name", NAMES)
def test_renamed_keys_are_read(name):
    ours, theirs = losses_of(name)
    case, batch = make_case(3, 9)
    keys = {
        "advantage": "gain",
        "action": ("a", "ids"),
        "sample_log_prob": "old",
        "ref_log_probs": ("b", "ref"),
    }
    renamed = TensorDict(
        {
            "gain": batch["advantage"],
            ("a", "ids"): batch[ACTION],
            "old": batch[SAMPLED],
            ("b", "ref"): batch[REF],
        },
        batch.batch_size,
    )
    loss, other = ours(GivenActor(*case), **FULL), theirs(GivenActor(*case), **FULL)
    before = compare(loss, other, batch)
    loss.set_keys(**keys)
    other.set_keys(**keys)
    after = compare(loss, other, renamed)
    torch.testing.assert_close(after["loss_objective"], before["loss_objective"])
    assert loss.in_keys == other.in_keys


@pytest.mark.parametrize("name", NAMES)
def test_a_scheduled_clip_is_followed(name):
    ours, theirs = losses_of(name)
    case, batch = make_case(3, 40)
    loss, other = ours(GivenActor(*case)), theirs(GivenActor(*case))
    values = []
    for low, high in ((0.2, 0.2), (0.05, 0.4), (0.3, 0.01)):
        for module in (loss, other):
            module.clip_epsilon_low = low
            module.clip_epsilon_high = high
            assert isinstance(module.clip_epsilon_low, torch.Tensor)
        values.append(compare(loss, other, batch)["loss_objective"])
    assert values[0] != values[1] != values[2]


@pytest.mark.parametrize("name", NAMES)
def test_a_loss_in_bf16_clips_at_the_bf16_bounds(name):
    """module.to(bfloat16) rounds the clip buffers too."""
    ours, theirs = losses_of(name)
    case, batch = make_case(3, 40, dtype=torch.float64)
    loss, other = ours(GivenActor(*case)), theirs(GivenActor(*case))
    for module in (loss, other):
        module.clip_epsilon_low = module.clip_epsilon_low.bfloat16()
        module.clip_epsilon_high = module.clip_epsilon_high.bfloat16()
    compare(loss, other, batch, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("aggregation", ["token_mean", "prompt_mean", "none"])
@pytest.mark.parametrize("shape", [(3, 9), (3, 9, 1)])
def test_a_loss_mask_in_the_batch_drops_tokens_as_in_torchrl(name, aggregation, shape):
    case, batch = make_case(3, 9)
    batch["keep"] = torch.rand(shape) < 0.5
    ours, theirs = losses_of(name)
    options = {"aggregation": aggregation, **FULL}
    loss, other = ours(GivenActor(*case), **options), theirs(GivenActor(*case), **options)
    without = compare(loss, other, batch)["loss_objective"]
    for module in (loss, other):
        module.loss_mask_key = "keep"
    masked = compare(loss, other, batch)["loss_objective"]
    # TorchRL applies it to the token mean only.
    assert torch.allclose(masked, without) == (aggregation != "token_mean")


def ragged(case, batch, lengths):
    """The rows cut to their lengths, lazily stacked; the actor's view is padded on the left."""
    rows = []
    longest = max(lengths)
    mask = torch.zeros(len(lengths), longest, dtype=torch.bool)
    for index, length in enumerate(lengths):
        row = batch[index]
        rows.append(
            TensorDict(
                {
                    ACTION: row[ACTION][:length],
                    SAMPLED: row[SAMPLED][:length],
                    REF: row[REF][:length],
                    "advantage": row["advantage"][:length],
                }
            )
        )
        mask[index, longest - length :] = True
    log_probs, entropy, _ = case
    return (log_probs[:, :longest], entropy[:, :longest], mask), lazy_stack(rows)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("lengths", [(5, 5, 5), (2, 7, 4), (1, 1, 6)])
def test_ragged_batches_give_torchrls_numbers(name, side, lengths):
    case, batch = ragged(*make_case(3, 9), lengths)
    options = {"ref_log_prob_padding_side": side, "ref_log_prob_padding_value": 0.5, **FULL}
    check(name, case, batch, options)


@pytest.mark.parametrize("name", NAMES)
def test_one_batch_may_be_scored_many_times(name):
    ours, _ = losses_of(name)
    case, batch = make_case(3, 9)
    loss = ours(GivenActor(*case))
    keys = set(batch.keys(True, True))
    first, second = loss(batch), loss(batch)
    assert set(batch.keys(True, True)) == keys
    assert first.loss_objective == second.loss_objective


# Subclasses


def test_a_subclass_with_its_own_objective_equals_torchrls():
    def subclass(base):
        class SquaredRatio(base):
            def _compute_policy_objective(self, log_weight, advantage):
                _, high = self._clip_bounds
                value = -(2 * log_weight).exp() * advantage
                return value, (log_weight > high).to(log_weight.dtype).mean()

        return SquaredRatio

    for aggregation in ("token_mean", "prompt_mean", "none"):
        options = {"aggregation": aggregation, "kl_mask_threshold": 0.3, **FULL}
        case, batch = make_case(3, 15)
        ours, theirs = (subclass(module.GRPOLoss) for module in (grpo, torchrl_losses))
        compare(ours(GivenActor(*case), **options), theirs(GivenActor(*case), **options), batch)


@pytest.mark.parametrize("name", NAMES)
def test_a_subclass_that_calls_the_inherited_objective_equals_torchrls(name):
    def subclass(base):
        class Doubled(base):
            def _compute_policy_objective(self, log_weight, advantage):
                value, clip_fraction = super()._compute_policy_objective(log_weight, advantage)
                return 2 * value, clip_fraction

        return Doubled

    case, batch = make_case(3, 15)
    ours, theirs = map(subclass, losses_of(name))
    compare(ours(GivenActor(*case), **FULL), theirs(GivenActor(*case), **FULL), batch)


@pytest.mark.parametrize("name", NAMES)
def test_a_subclass_with_its_own_aggregation_equals_torchrls(name):
    def subclass(base):
        class LongestRow(base):
            def _aggregate_loss_value(self, value, mask, tensordict=None):
                total = torch.where(mask.unsqueeze(-1), value, 0.0).sum()
                return total / mask.sum(-1).max()

        return LongestRow

    case, batch = make_case(3, 15)
    ours, theirs = map(subclass, losses_of(name))
    compare(ours(GivenActor(*case), **FULL), theirs(GivenActor(*case), **FULL), batch)


def test_a_subclass_may_give_a_plain_number_as_the_clip_fraction():
    class Unclipped(grpo.GRPOLoss):
        def _compute_policy_objective(self, log_weight, advantage):
            return -log_weight.exp() * advantage, 0.25

    case, batch = make_case(3, 15)
    output = Unclipped(GivenActor(*case))(batch).detach()
    assert output.clip_fraction == torch.tensor(0.25)


def test_a_method_replaced_on_the_class_itself_is_called(monkeypatch):
    case, batch = make_case(3, 15)
    fives = torch.full((3, 15, 1), 5.0)
    monkeypatch.setattr(grpo.GRPOLoss, "_get_entropy", lambda self, dist, shape: fives)
    assert grpo.DAPO(GivenActor(*case))(batch).entropy == 5.0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("aggregation", ["token_mean", "prompt_mean", "none"])
def test_the_composed_path_equals_the_kernel(name, aggregation):
    """A subclass whose override changes nothing takes the other path to the same numbers."""
    base = getattr(grpo, name)

    class Composed(base):
        def _aggregate_loss_value(self, value, mask, tensordict=None):
            return super()._aggregate_loss_value(value, mask, tensordict)

    for semantics in ("torchrl", "corrected"):
        case, batch = make_case(3, 15)
        options = {
            "aggregation": aggregation,
            "semantics": semantics,
            "kl_mask_threshold": 0.3,
            "log_ratio_cap": 0.3,
            **FULL,
        }
        compare(base(GivenActor(*case), **options), Composed(GivenActor(*case), **options), batch)
