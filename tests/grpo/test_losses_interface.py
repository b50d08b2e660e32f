"""TorchRL's interface: keywords, keys, buffers, outputs, and exceptions by type and message."""

import copy
import inspect
import math
import warnings

import pytest
import torch
import torchrl.objectives.llm as torchrl_losses
from loss_stubs import ACTION, REF, SAMPLED, GivenActor, compare, make_case
from tensordict import TensorDict
from tensordict.nn import (
    CompositeDistribution,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    set_composite_lp_aggregate,
)
from torchrl.objectives.llm.grpo import CISPOLoss as TorchRLCISPOLoss

import grpo

NAMES = ("GRPOLoss", "DAPO", "CISPOLoss")
LOSSES = pytest.mark.parametrize("name", NAMES)


def losses_of(name):
    return getattr(grpo, name), getattr(torchrl_losses, name, TorchRLCISPOLoss)


@LOSSES
def test_every_keyword_of_torchrl_is_accepted_with_its_default(name):
    ours, theirs = losses_of(name)
    own = inspect.signature(grpo.GRPOLoss.__init__).parameters
    for keyword, parameter in inspect.signature(theirs.__init__).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD or keyword == "self":
            continue
        assert own[keyword].default == parameter.default, keyword
        assert own[keyword].kind == parameter.kind, keyword
        if keyword != "actor_network":
            ours(**{keyword: parameter.default})


@LOSSES
def test_dapo_alone_has_another_default_clip_and_only_when_corrected(name):
    ours, theirs = losses_of(name)
    for module in (ours(), theirs()):
        assert module.clip_epsilon_low == module.clip_epsilon_high == torch.tensor(0.2)
    corrected = ours(semantics="corrected")
    assert corrected.clip_epsilon_low == torch.tensor(0.2)
    assert corrected.clip_epsilon_high == torch.tensor(0.28 if name == "DAPO" else 0.2)
    assert ours(semantics="corrected", clip_epsilon=0.1).clip_epsilon_high == torch.tensor(0.1)


@LOSSES
def test_an_unknown_keyword_raises(name):
    with pytest.raises(TypeError, match="clip_epsilom"):
        losses_of(name)[0](clip_epsilom=0.2)


@LOSSES
@pytest.mark.parametrize(
    ("keyword", "value", "accepted"),
    [
        ("aggregation", "mean", "token_mean"),
        ("masking_strategy", "dpo", "rlhf"),
        ("reduction", "avg", "mean"),
        ("semantics", "paper", "corrected"),
        ("backend", "cuda", "triton"),
        ("ref_log_prob_padding_side", "top", "left"),
    ],
)
def test_a_misspelt_value_raises_with_what_is_accepted(name, keyword, value, accepted):
    with pytest.raises(ValueError, match=f"{keyword}.*{accepted}.*{value}"):
        losses_of(name)[0](**{keyword: value})


@LOSSES
@pytest.mark.parametrize(
    ("clip", "message"),
    [
        (-0.1, "non-negative"),
        ((0.1, -0.1), "non-negative"),
        (math.nan, "nan"),
        ((0.2, math.nan), "nan"),
        (1.0, "< 1"),
        ((0.1, 0.2, 0.3), "length 2"),
    ],
)
def test_clip_bounds_that_make_no_range_raise(name, clip, message):
    with pytest.raises(ValueError, match=f"clip_epsilon.*{message}"):
        losses_of(name)[0](clip_epsilon=clip)


@LOSSES
@pytest.mark.parametrize("entropy_bonus", [True, False])
def test_keys_and_state_dict_are_torchrls(name, entropy_bonus):
    case, _ = make_case(2, 3)
    ours, theirs = (cls(GivenActor(*case), entropy_bonus=entropy_bonus) for cls in losses_of(name))
    assert ours.in_keys == theirs.in_keys
    assert ours.out_keys == theirs.out_keys
    assert vars(ours.tensor_keys) == vars(theirs.tensor_keys)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    ours.load_state_dict(theirs.state_dict())
    for key, value in ours.state_dict().items():
        assert torch.equal(value, theirs.state_dict()[key])


@LOSSES
def test_a_loss_without_an_actor_has_torchrls_keys(name):
    ours, theirs = (cls() for cls in losses_of(name))
    assert ours.in_keys == theirs.in_keys
    ours.in_keys, ours.out_keys = ["a"], ["b"]
    assert (ours.in_keys, ours.out_keys) == (["a"], ["b"])


@LOSSES
def test_an_unknown_key_name_raises(name):
    with pytest.raises(ValueError, match="accepted tensordict key"):
        losses_of(name)[0]().set_keys(advantages="a")


@LOSSES
def test_the_output_is_typed_as_torchrls(name):
    ours, theirs = losses_of(name)
    case, batch = make_case(2, 3)
    output = ours(GivenActor(*case))(batch)
    assert type(output).__name__ == theirs.output_type.__name__
    assert isinstance(output, grpo.LLMLossOutput)
    assert {f.name for f in output.fields()} == {f.name for f in theirs.output_type.fields()}
    assert output.kl_to_ref is output.loss_kl_to_ref is output.kl_to_inference is None


@LOSSES
def test_a_copy_is_independent(name):
    ours, _ = losses_of(name)
    case, batch = make_case(2, 9)
    loss = ours(GivenActor(*case), clip_epsilon=0.3)
    twin = copy.deepcopy(loss)
    assert twin(batch).loss_objective == loss(batch).loss_objective
    twin.clip_epsilon_high = 0.0
    twin.clip_epsilon_low = 0.0
    assert twin(batch).loss_objective != loss(batch).loss_objective
    assert loss.clip_epsilon_high == torch.tensor(0.3)


def both_raise(name, exception, message, batch, prepare=lambda loss: None, **options):
    case, _ = make_case(2, 3)
    for cls in losses_of(name):
        loss = cls(GivenActor(*case), **options)
        prepare(loss)
        with pytest.raises(exception, match=message):
            loss(batch)


@LOSSES
@pytest.mark.parametrize(
    ("key", "exception", "message"),
    [
        (ACTION, ValueError, "Action key .*tokens.* not in tensordict"),
        ("advantage", ValueError, "Advantage key advantage not in tensordict"),
        (SAMPLED, KeyError, "Couldn't find the log-prob"),
        (REF, KeyError, "Couldn't find the ref log-prob"),
    ],
)
def test_a_missing_entry_raises_as_in_torchrl(name, key, exception, message):
    _, batch = make_case(2, 3)
    both_raise(name, exception, message, batch.exclude(key), kl_to_ref_coeff=1.0)


@LOSSES
def test_a_sampling_log_prob_of_another_shape_raises_with_advice(name):
    _, batch = make_case(2, 3)
    batch[SAMPLED] = torch.zeros(2, 4)
    both_raise(name, ValueError, "(?s)Shape mismatch detected.*masking_strategy='sft'", batch)


@LOSSES
def test_a_reference_log_prob_of_another_shape_raises(name):
    _, batch = make_case(2, 3)
    batch[REF] = torch.zeros(2, 4)
    message = "ref_log_prob and cur_log_prob must have the same shape"
    both_raise(name, ValueError, message, batch, kl_to_ref_coeff=1.0)


@LOSSES
def test_a_sampling_log_prob_that_requires_a_gradient_raises(name):
    _, batch = make_case(2, 3)
    batch[SAMPLED] = batch[SAMPLED].requires_grad_()
    both_raise(name, RuntimeError, "requires grad", batch)


@LOSSES
def test_an_advantage_without_a_feature_dimension_raises(name):
    _, batch = make_case(2, 3)
    batch["advantage"] = batch["advantage"].squeeze(-1)
    both_raise(name, ValueError, "same number of dimensions", batch)


@LOSSES
def test_an_actor_that_gives_no_distribution_raises(name):
    _, batch = make_case(2, 3)
    for cls in losses_of(name):
        with pytest.raises(NotImplementedError):
            cls(torch.nn.Linear(1, 1))(batch)


def test_negative_and_zero_thresholds_are_off_as_in_torchrl():
    case, batch = make_case(2, 9)
    for options in ({"kl_mask_threshold": -1.0}, {"kl_mask_threshold": 0}, {"kl_to_ref_coeff": -1}):
        ours, theirs = (cls(GivenActor(*case), **options) for cls in losses_of("GRPOLoss"))
        compare(ours, theirs, batch)


# Beyond TorchRL: there these raise, for want of `dist.mask` or of a composite path.


def categorical_actor(logits, module=torch.distributions.Categorical):
    class Head(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.logits = torch.nn.Parameter(logits.clone())

        def forward(self, observation):
            return self.logits.expand(*observation.shape, -1)

    return ProbabilisticTensorDictSequential(
        TensorDictModule(Head(), in_keys=["observation"], out_keys=["logits"]),
        ProbabilisticTensorDictModule(
            in_keys=["logits"], out_keys=["action"], distribution_class=module
        ),
    )


def test_a_plain_categorical_actor_trains_every_token():
    logits = torch.randn(5)
    batch = TensorDict(
        {
            "observation": torch.zeros(3, 4),
            "action": torch.randint(5, (3, 4)),
            "old": -2 + torch.randn(3, 4),
            "advantage": torch.randn(3, 4, 1),
        },
        [3],
    )
    loss = grpo.GRPOLoss(categorical_actor(logits))
    loss.set_keys(action="action", sample_log_prob="old")
    output = loss(batch)
    log_probs = logits.log_softmax(-1)[batch["action"]]
    ratio = (log_probs - batch["old"]).exp()
    advantage = batch["advantage"].squeeze(-1)
    expected = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
    torch.testing.assert_close(output.loss_objective, expected)
    entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum()
    torch.testing.assert_close(output.entropy, entropy)
    torch.testing.assert_close(output.loss_entropy, -0.01 * entropy)
    (output.loss_objective + output.loss_entropy).backward()
    gradients = [p.grad for p in loss.actor_network.parameters()]
    assert all(gradient.abs().sum() > 0 for gradient in gradients)


class CompositeActor(torch.nn.Module):
    """Two heads, each with its own log-prob."""

    def __init__(self, logits):
        super().__init__()
        self.logits = torch.nn.Parameter(logits)

    def get_dist(self, tensordict, logits_key="logits"):
        heads = {
            head: TensorDict({"logits": self.logits[index]}, self.logits.shape[1:-1])
            for index, head in enumerate("ab")
        }
        return CompositeDistribution(
            TensorDict(heads, self.logits.shape[1:-1]),
            distribution_map=dict.fromkeys("ab", torch.distributions.Categorical),
        )


def test_a_composite_distribution_is_the_sum_of_its_heads():
    logits = torch.randn(2, 3, 4, 5)
    action = TensorDict({head: torch.randint(5, (3, 4)) for head in "ab"}, [3, 4])
    old = -3 + torch.randn(3, 4)
    batch = TensorDict({"action": action, "old": old, "advantage": torch.randn(3, 4, 1)}, [3])
    with set_composite_lp_aggregate(True), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss = grpo.GRPOLoss(CompositeActor(logits))
        loss.set_keys(action="action", sample_log_prob="old")
        output = loss(batch)
    every = logits.log_softmax(-1)
    log_probs = sum(
        every[i].gather(-1, action[head][..., None]).squeeze(-1) for i, head in enumerate("ab")
    )
    ratio, advantage = (log_probs - old).exp(), batch["advantage"].squeeze(-1)
    expected = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
    torch.testing.assert_close(output.loss_objective, expected)
    entropy = -(every.exp() * every).sum(-1).sum(0).mean()
    torch.testing.assert_close(output.entropy, entropy)


def test_a_compiled_loss_equals_an_eager_one():
    torch._dynamo.reset()
    case, batch = make_case(3, 9)
    options = {"kl_to_ref_coeff": 0.3, "kl_to_inference_coeff": 0.7}
    eager, other = (grpo.GRPOLoss(GivenActor(*case), **options) for _ in range(2))
    compiled = torch.compile(other, backend="aot_eager")
    compare(compiled, eager, batch)
