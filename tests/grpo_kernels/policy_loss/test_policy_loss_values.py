"""Every output and gradient of `policy_loss` against the naive formula, on every backend."""

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
    upstream_of,
)

from grpo_kernels import policy_loss
from grpo_kernels.policy_loss.options import OBJECTIVES

SEMANTICS = ("torchrl", "corrected")
AGGREGATIONS = ("token_mean", "prompt_mean", "none")


def check(backend, batch, options, **how):
    expected = evaluate(naive_policy_loss, batch, options, double=True, **how)
    actual = evaluate(policy_loss, batch, {**options, "backend": backend}, **how)
    assert_equal_outputs(actual, expected, batch)


@pytest.mark.parametrize("kl_mask_threshold", [None, 0.02, 50.0])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("semantics", SEMANTICS)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_option_gives_the_formula(
    backend, objective, semantics, aggregation, kl_mask_threshold
):
    for seed, (cap, normaliser) in enumerate([(None, None), (0.4, 17.0)]):
        batch = make_batch(2, 37, seed=seed)
        options = {
            "objective": objective,
            "semantics": semantics,
            "aggregation": aggregation,
            "kl_mask_threshold": kl_mask_threshold,
            "log_ratio_cap": cap,
            "normaliser": normaliser,
            "clip_low": 0.15,
            "clip_high": 0.3,
            **FULL,
        }
        check(backend, batch, options, upstream_seed=seed)


# Each term alone and with each other: kernels specialise on what is present.
@pytest.mark.parametrize("semantics", SEMANTICS)
@pytest.mark.parametrize("terms", list(itertools.product([False, True], repeat=3)))
def test_penalties_are_independent_of_each_other(backend, semantics, terms):
    options = {name: FULL[name] for name, on in zip(FULL, terms, strict=True) if on}
    aggregation = "none" if semantics == "corrected" else "token_mean"
    for given in (True, False):  # without a coefficient there is still a metric
        batch = make_batch(2, 19, ref=given or terms[0], entropy=given or terms[2])
        check(backend, batch, {**options, "semantics": semantics, "aggregation": aggregation})


def test_metrics_of_ref_and_entropy_need_no_coefficient(backend):
    output = policy_loss(**make_batch(2, 9), backend=backend)
    assert output.kl_to_ref is not None
    assert output.entropy is not None
    assert output.loss_kl_to_ref is output.loss_entropy is output.kl_to_inference is None


SHAPES = [
    (1, 1),
    (5, 1),  # one token a row
    (1, 16),  # one whole vector
    (2, 31),  # a vector and a tail
    (2, 128),  # the small Triton block exactly
    (2, 129),  # just beyond it
    (1, 1024),  # one C++ run, one Triton block
    (1, 1025),  # two
    (2, 2113),  # three
]


@pytest.mark.parametrize("semantics", SEMANTICS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape_gives_the_formula(backend, shape, semantics):
    aggregation = AGGREGATIONS[sum(shape) % 3]
    options = {"semantics": semantics, "aggregation": aggregation, "kl_mask_threshold": 0.3}
    check(backend, make_batch(*shape), {**options, **FULL})


# More programs than Triton merges at a time, 64 of short rows and 256 of segments of long ones.
@pytest.mark.parametrize(
    ("shape", "semantics", "aggregation"),
    [((130, 2), "corrected", "prompt_mean"), ((86, 2049), "torchrl", "token_mean")],
    ids=str,
)
def test_many_rows_give_the_formula(backend, shape, semantics, aggregation):
    options = {"semantics": semantics, "aggregation": aggregation}
    check(backend, make_batch(*shape, ref=False, entropy=False), options)


FLOATING = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("semantics", SEMANTICS)
@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_every_dtype_gives_the_formula(backend, dtype, semantics):
    for objective in OBJECTIVES:
        options = {"semantics": semantics, "objective": objective, **FULL}
        check(backend, make_batch(3, 45, dtype=dtype), options)


@pytest.mark.parametrize("seed", range(5))
def test_inputs_may_differ_in_dtype(backend, seed):
    generator = torch.Generator().manual_seed(seed)
    batch = make_batch(3, 21, seed=seed, dtype=torch.float64)
    for name, tensor in batch.items():
        if name != "mask":
            dtype = FLOATING[int(torch.randint(4, (), generator=generator))]
            batch[name] = tensor.to(dtype)
    check(backend, batch, {**FULL, "aggregation": AGGREGATIONS[seed % 3]})


def sliced(tensor):  # [:, :-1], as next-token losses have it
    return torch.cat([tensor, tensor[:, :1]], 1)[:, :-1]


def transposed(tensor):
    return tensor.t().contiguous().t()


def every_other_column(tensor):
    return tensor.repeat_interleave(2, 1)[:, ::2]


def every_other_row(tensor):
    return tensor.repeat_interleave(2, 0)[::2]


LAYOUTS = [sliced, transposed, every_other_column, every_other_row]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_strides_do_not_matter(backend, layout):
    dtype = torch.bfloat16 if layout is sliced else torch.float32
    batch = make_batch(2, 150, dtype=dtype)
    strided = {name: layout(tensor) for name, tensor in batch.items()}
    assert not any(tensor.is_contiguous() for tensor in strided.values())
    options = {"semantics": "corrected", "aggregation": "prompt_mean", **FULL}
    check(backend, strided, options)


def test_each_input_may_have_its_own_strides(backend):
    batch = make_batch(4, 40)
    batch["log_probs"] = sliced(batch["log_probs"])
    batch["old_log_probs"] = transposed(batch["old_log_probs"])
    batch["mask"] = every_other_column(batch["mask"])
    batch["entropy"] = every_other_row(batch["entropy"])
    check(backend, batch, FULL)


@pytest.mark.parametrize("form", ["[B, T]", "[B, 1]", "[B]", "expanded", "one value"])
def test_advantages_broadcast(backend, form):
    batch = make_batch(4, 33)
    per_row = torch.tensor([1.0, -2.0, 0.5, 0.0])
    batch["advantages"] = {
        "[B, T]": batch["advantages"],
        "[B, 1]": per_row[:, None],
        "[B]": per_row,
        "expanded": per_row[:, None].expand(4, 33),
        "one value": torch.tensor(-1.5).expand(4, 33),
    }[form]
    check(backend, batch, {"aggregation": "prompt_mean", **FULL})


def test_no_mask_means_every_token(backend):
    batch = make_batch(3, 27, masked=False)
    explicit = {**batch, "mask": torch.ones(3, 27, dtype=torch.bool)}
    options = {"backend": backend, **FULL}
    expected = evaluate(policy_loss, explicit, options)
    check("eager", batch, FULL)
    for name, got in evaluate(policy_loss, batch, options).items():
        torch.testing.assert_close(got, expected[name], rtol=0, atol=0)


@pytest.mark.parametrize("clip", [(0.0, 0.0), (0.2, 0.28), (0.99, 5.0), (3e-4, 4e-4), (0.5, 0.0)])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_clip_bounds_are_independent(backend, objective, clip):
    low, high = clip
    check(
        backend,
        make_batch(3, 40, spread=1.0),
        {"clip_low": low, "clip_high": high, "objective": objective},
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(), (1, 1)], ids=str)
def test_clip_bounds_may_be_tensors(backend, dtype, shape):
    low, high = torch.full(shape, 0.125, dtype=dtype), torch.full(shape, 0.25, dtype=dtype)
    batch = make_batch(3, 40)
    numbers = evaluate(
        policy_loss, batch, {"clip_low": 0.125, "clip_high": 0.25, "backend": backend}
    )
    tensors = evaluate(policy_loss, batch, {"clip_low": low, "clip_high": high, "backend": backend})
    rtol = 1e-2 if dtype == torch.bfloat16 else 1e-5  # log(1 + bound) rounds to the bound's dtype
    for name, want in numbers.items():
        torch.testing.assert_close(tensors[name], want, rtol=rtol, atol=rtol / 10)


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_the_logarithm_of_a_clip_tensor_is_in_its_own_dtype_as_torchrl_takes_it(backend, dtype):
    """TorchRL's fp32 buffer gives an fp32 bound to fp64 log-probs, a bf16 buffer a bf16 one."""
    bound = torch.tensor(0.2, dtype=dtype)
    ones = torch.ones(1, 2, dtype=torch.float64)
    loss = policy_loss(
        torch.tensor([[1.0, -1.0]], dtype=torch.float64),
        0 * ones,
        torch.tensor([[1.0, -1.0]], dtype=torch.float64),
        clip_low=bound,
        clip_high=bound,
        aggregation="none",
        backend=backend,
    ).loss_objective
    expected = torch.stack([-bound.log1p().double().exp(), (-bound).log1p().double().exp()])
    # A GPU has no log1p as exact as libm's, and the interpreter truncates to bf16.
    rtol = torch.finfo(dtype).eps / 7 if backend == "triton" else 1e-14
    torch.testing.assert_close(loss[0], expected, rtol=rtol, atol=0)


NORMALISERS = [
    7,
    7.0,
    torch.tensor(7),
    torch.tensor(7, dtype=torch.int32),
    torch.tensor(7.0),
    torch.tensor([7.0], dtype=torch.float64),
]


@pytest.mark.parametrize("aggregation", ["token_mean", "prompt_mean"])
@pytest.mark.parametrize("normaliser", NORMALISERS, ids=repr)
def test_the_normaliser_may_be_a_number_or_a_tensor(backend, normaliser, aggregation):
    semantics = "corrected" if aggregation == "prompt_mean" else "torchrl"
    options = {"aggregation": aggregation, "semantics": semantics, "normaliser": normaliser}
    check(backend, make_batch(2, 20), {**options, **FULL})


@pytest.mark.parametrize("term", LOSSES)
@pytest.mark.parametrize("semantics", SEMANTICS)
def test_one_term_alone_has_its_own_gradient(backend, semantics, term):
    for aggregation in ("token_mean", "none"):
        batch = make_batch(2, 20)
        options = {"semantics": semantics, "aggregation": aggregation, **FULL}
        shape = evaluate(naive_policy_loss, batch, options, double=True)[term].shape
        check(backend, batch, options, upstream={term: torch.full(shape, 3.0).double()})


def test_the_upstream_gradient_scales_the_gradient(backend):
    """Vector 8: backward(3) is three times backward(1), and so is a scaled loss."""
    batch = make_batch(3, 30)

    def gradient(scale, upstream):
        log_probs = batch["log_probs"].clone().requires_grad_()
        output = policy_loss(**{**batch, "log_probs": log_probs}, backend=backend)
        (output.loss_objective * scale).backward(torch.tensor(upstream))
        return log_probs.grad

    once = gradient(1.0, 1.0)
    assert once.abs().sum() > 0
    torch.testing.assert_close(gradient(1.0, 3.0), 3 * once)
    torch.testing.assert_close(gradient(3.0, 1.0), 3 * once)


@pytest.mark.parametrize("form", ["stride 0", "one a row", "transposed", "fp64"])
def test_per_token_upstream_gradients_may_have_any_strides(backend, form):
    batch = make_batch(3, 30)
    options = {"aggregation": "none", "semantics": "corrected", **FULL}
    dense = upstream_of({name: torch.empty(3, 30) for name in LOSSES})
    given = {
        "stride 0": {name: weight[0, 0].expand(3, 30) for name, weight in dense.items()},
        "one a row": {name: weight[:, :1].expand(3, 30) for name, weight in dense.items()},
        "transposed": {name: transposed(weight) for name, weight in dense.items()},
        "fp64": dense,
    }[form]
    inputs = {
        name: tensor.clone().requires_grad_(name in ("log_probs", "ref_log_probs", "entropy"))
        for name, tensor in batch.items()
    }
    leaves = [inputs[name] for name in ("log_probs", "ref_log_probs", "entropy")]
    losses = policy_loss(**inputs, **options, backend=backend)[:4]
    upstream = [given[name].to(loss.dtype) for name, loss in zip(LOSSES, losses, strict=True)]
    gradients = torch.autograd.grad(losses, leaves, upstream)
    expected = evaluate(naive_policy_loss, batch, options, double=True, upstream=given)
    for name, got in zip(("log_probs", "ref_log_probs", "entropy"), gradients, strict=True):
        torch.testing.assert_close(got.double(), expected[f"grad {name}"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("wanted", ["log_probs", "ref_log_probs", "entropy"])
def test_only_the_inputs_that_require_a_gradient_get_one(backend, wanted):
    batch = make_batch(3, 30)
    inputs = {name: tensor.clone() for name, tensor in batch.items()}
    inputs[wanted].requires_grad_()
    output = policy_loss(**inputs, **FULL, backend=backend)
    sum(loss.sum() for loss in output[:4]).backward()
    expected = evaluate(
        naive_policy_loss,
        batch,
        FULL,
        double=True,
        upstream=dict.fromkeys(LOSSES, torch.tensor(1.0)),
    )
    torch.testing.assert_close(
        inputs[wanted].grad.double(), expected[f"grad {wanted}"], rtol=1e-5, atol=1e-7
    )
    assert all(inputs[name].grad is None for name in inputs if name not in (wanted, "mask"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("size", [1e-4, 1e-3, 0.1, 0.24, 0.26, 1.0])
def test_small_kl_penalties_do_not_cancel(backend, size, dtype):
    """exp(x) - 1 - x at x = 1e-4 is 5e-9: the plain difference in fp32 would be all error."""
    difference = torch.full((1, 24), size, dtype=dtype)
    difference[:, ::2] *= -1
    zeros = torch.zeros(1, 24, dtype=dtype)
    log_probs = zeros.clone().requires_grad_()
    output = policy_loss(
        log_probs,
        zeros,
        zeros,
        ref_log_probs=difference,
        kl_to_ref_coeff=1.0,
        aggregation="none",
        semantics="corrected",
        backend=backend,
    )
    exact = difference.double()
    series = sum(exact**n / math.factorial(n) for n in range(2, 20))
    eps = torch.finfo(dtype).eps
    # expm1(x) - x is off by eps / x, exp(x) - 1 - x by eps / x^2.
    rtol = 8 * eps / min(size, 0.5)
    torch.testing.assert_close(output.loss_kl_to_ref.double(), series, rtol=rtol, atol=0)
    (gradient,) = torch.autograd.grad(output.loss_kl_to_ref.sum(), log_probs)
    torch.testing.assert_close(gradient.double(), -exact.expm1(), rtol=16 * eps, atol=0)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("semantics", SEMANTICS)
def test_the_ratio_is_accurate_over_its_range(backend, objective, semantics):
    """Values within a few ulp of fp64 over the log-ratios that training sees."""
    log_ratio = torch.linspace(-30, 30, 211)[None]
    batch = {
        "log_probs": log_ratio,
        "old_log_probs": torch.zeros_like(log_ratio),
        "advantages": -torch.ones_like(log_ratio),
        "mask": None,
        "ref_log_probs": None,
        "entropy": None,
    }
    options = {"objective": objective, "semantics": semantics, "aggregation": "none"}
    expected = evaluate(naive_policy_loss, batch, options, double=True)
    actual = evaluate(policy_loss, batch, {**options, "backend": backend})
    for name in ("loss_objective", "grad log_probs"):
        torch.testing.assert_close(actual[name].double(), expected[name], rtol=1e-6, atol=1e-12)
