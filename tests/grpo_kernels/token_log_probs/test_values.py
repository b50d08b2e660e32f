"""Log-probs, entropies and gradients against fp64, on random and adversarial logits."""

import math

import pytest
import torch

from grpo_kernels.token_log_probs import token_log_probs

from .reference import reference, reference_gradient

INF, NAN = math.inf, math.nan
GRADIENT_ROUNDING = {
    torch.float64: 1e-13,
    torch.float32: 2e-7,
    torch.bfloat16: 2**-8,
    torch.float16: 2**-10,
}
DTYPES = list(GRADIENT_ROUNDING)
RAGGED_VOCABS = [1, 2, 7, 8, 1025, 5000]


def scores_and_gradient(logits, tokens, mask=None, slopes=(1.0, 1.0), **options):
    logits = logits.detach().requires_grad_()
    log_probs, entropy = token_log_probs(logits, tokens, mask, **options)
    outer = [torch.as_tensor(slope, dtype=log_probs.dtype) for slope in slopes]
    total = (log_probs * outer[0]).sum() + (entropy * outer[1]).sum()
    (grad,) = torch.autograd.grad(total, logits)
    return log_probs.detach(), entropy.detach(), grad


def check(logits, tokens, backend, **options):
    """All three results against fp64, with a random upstream gradient."""
    torch.manual_seed(1)
    slopes = torch.randn(tokens.shape), torch.randn(tokens.shape)
    log_probs, entropy, grad = scores_and_gradient(
        logits, tokens, slopes=slopes, backend=backend, **options
    )
    right_log_probs, right_entropy = reference(logits, tokens, **options)
    temperature, softcap = options.get("temperature", 1.0), options.get("logit_softcap")
    right_grad = reference_gradient(logits, tokens, *slopes, temperature, softcap)
    wide = logits.dtype == torch.float64
    tolerance = 1e-12 if wide else 3e-6
    assert log_probs.dtype == entropy.dtype == (torch.float64 if wide else torch.float32)
    assert grad.dtype == logits.dtype
    torch.testing.assert_close(log_probs.double(), right_log_probs, rtol=1e-6, atol=tolerance)
    torch.testing.assert_close(entropy.double(), right_entropy, rtol=1e-6, atol=tolerance)
    rounding = GRADIENT_ROUNDING[logits.dtype]
    if backend == "triton" and logits.dtype == torch.bfloat16:
        rounding *= 2  # the interpreter truncates to bf16 where a GPU rounds
    # fp16's smallest step near zero is 2^-24.
    torch.testing.assert_close(
        grad.double(), right_grad, rtol=rounding, atol=max(tolerance / 3, 2.0**-24)
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", RAGGED_VOCABS)
def test_agrees_with_fp64_at_any_vocab(backend, dtype, vocab):
    torch.manual_seed(0)
    logits = (torch.randn(2, 3, vocab) * 3).to(dtype)
    check(logits, torch.randint(0, vocab, (2, 3)), backend)


@pytest.mark.parametrize("vocab", [50257, 151937])
def test_agrees_with_fp64_at_vocabs_of_models(backend, vocab):
    torch.manual_seed(0)
    logits = torch.randn(3, vocab) * 2
    check(logits, torch.tensor([0, vocab - 1, vocab // 2]), backend)
    check(logits[:1].bfloat16(), torch.tensor([vocab - 1]), backend)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize("per_row", [False, True])
def test_temperature_and_softcap(backend, dtype, softcap, per_row):
    torch.manual_seed(0)
    logits = (torch.randn(4, 37) * 3).to(dtype)
    temperature = torch.tensor([0.3, 0.7, 1.0, 2.5]) if per_row else 0.7
    check(
        logits,
        torch.randint(0, 37, (4,)),
        backend,
        temperature=temperature,
        logit_softcap=softcap,
    )


@pytest.mark.parametrize(
    "logits",
    [
        torch.full((1, 300), -110.0),
        torch.full((1, 300), 0.0),
        1e4 + torch.randn(1, 300, generator=torch.Generator().manual_seed(0)),
        -1e30 + torch.zeros(1, 300),
        torch.eye(300)[:1] * 1000,
        torch.eye(300)[7:8] * -1000,
        torch.linspace(-120, 120, 300)[None],
    ],
    ids=["all -110", "all 0", "offset 1e4", "offset -1e30", "one-hot", "one cold", "ramp"],
)
def test_extreme_finite_logits(backend, logits):
    check(logits, torch.tensor([7]), backend)


def test_minus_infinity_is_a_token_of_probability_zero(backend):
    log_probs, entropy, grad = scores_and_gradient(
        torch.tensor([[0, -INF], [0, -INF]]), torch.tensor([0, 1]), backend=backend
    )
    assert log_probs.tolist() == [0, -INF]
    assert entropy.tolist() == [0, 0]
    assert grad.isfinite().all()
    assert grad.tolist() == [[0, 0], [-1, 1]]


@pytest.mark.parametrize("dead", [slice(0, 2048), slice(2048, 4096), slice(1, 4095)])
def test_half_the_vocabulary_at_minus_infinity(backend, dead):
    torch.manual_seed(0)
    logits = torch.randn(2, 4096)
    logits[:, dead] = -INF
    tokens = torch.tensor([4095, 4095]) if dead.start == 0 else torch.tensor([0, 0])
    log_probs, entropy, grad = scores_and_gradient(logits, tokens, backend=backend)
    right = reference(logits, tokens)
    torch.testing.assert_close(log_probs.double(), right[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(entropy.double(), right[1], rtol=1e-6, atol=1e-6)
    assert (grad[:, dead] == 0).all()
    assert grad.isfinite().all()


@pytest.mark.parametrize("poison", [NAN, INF])
@pytest.mark.parametrize("position", [0, 5, 6000])
def test_nan_at_a_valid_row_stays_visible(backend, poison, position):
    for rest in (0.0, -INF):
        logits = torch.full((2, 6001), 0.0)
        logits[1] = rest
        logits[1, position] = poison
        log_probs, entropy, grad = scores_and_gradient(
            logits, torch.tensor([3, 3]), backend=backend
        )
        assert log_probs.isnan().tolist() == [False, True]
        assert entropy.isnan().tolist() == [False, True]
        assert grad[1].isnan().any()
        assert grad[0].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_error_at_most_twice_torchs_own(backend, dtype):
    torch.manual_seed(0)
    logits = (torch.randn(16, 2000) * 4).to(dtype)
    tokens = torch.randint(0, 2000, (16,))
    right_log_probs, right_entropy = reference(logits, tokens)
    right_grad = reference_gradient(logits, tokens, torch.ones(16), torch.ones(16))

    own = logits.detach().requires_grad_()
    own_log_p = torch.log_softmax(own.float(), -1)
    own_entropy = -(own_log_p.exp() * own_log_p).sum(-1)
    own_log_probs = own_log_p.gather(-1, tokens[:, None]).squeeze(-1)
    (own_grad,) = torch.autograd.grad((own_log_probs + own_entropy).sum(), own)

    log_probs, entropy, grad = scores_and_gradient(logits, tokens, backend=backend)
    for ours, theirs, right in [
        (log_probs, own_log_probs, right_log_probs),
        (entropy, own_entropy, right_entropy),
        (grad, own_grad, right_grad),
    ]:
        if ours is grad and backend == "triton" and dtype != torch.float32:
            continue  # the interpreter truncates where a GPU rounds
        error = (ours.double() - right).abs().max()
        assert error <= 2 * (theirs.double() - right).abs().max()


def test_bf16_logits_give_an_fp32_log_prob(backend):
    logits = torch.zeros(1, 4)
    logits[0, 0] = -10.03
    log_prob, _ = token_log_probs(logits.bfloat16(), torch.tensor([0]), backend=backend)
    right, _ = reference(logits.bfloat16(), torch.tensor([0]))
    assert abs(log_prob.item() - right.item()) < 1e-5
    assert log_prob.item() != log_prob.bfloat16().item()


def test_entropy_alone_has_its_own_gradient(backend):
    torch.manual_seed(0)
    logits = torch.randn(3, 17, requires_grad=True)
    _, entropy = token_log_probs(logits, torch.zeros(3, dtype=torch.long), backend=backend)
    entropy.sum().backward()
    p, log_p = torch.softmax(logits, -1), torch.log_softmax(logits, -1)
    torch.testing.assert_close(logits.grad, -p * (log_p + entropy.unsqueeze(-1)))
    assert logits.grad.abs().max() > 0.01


def test_entropy_can_be_left_out(backend):
    torch.manual_seed(0)
    logits, tokens = torch.randn(3, 17), torch.tensor([0, 5, 16])
    log_probs, entropy = token_log_probs(logits, tokens, entropy=False, backend=backend)
    assert entropy is None
    torch.testing.assert_close(log_probs.double(), reference(logits, tokens)[0], check_dtype=False)


def test_results_are_bitwise_repeatable(backend):
    torch.manual_seed(0)
    logits, tokens = torch.randn(3, 9001), torch.tensor([0, 5, 9000])
    first = scores_and_gradient(logits, tokens, backend=backend)
    second = scores_and_gradient(logits, tokens, backend=backend)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
