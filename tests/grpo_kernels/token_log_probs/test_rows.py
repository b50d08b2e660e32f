"""Masks, tokens out of range, shapes and strides."""

import math

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from grpo_kernels.token_log_probs import token_log_probs
from grpo_kernels.token_log_probs import triton as kernels
from grpo_kernels.token_log_probs.op import as_rows

from .reference import reference, reference_gradient


def gradient(logits, tokens, mask, backend, **options):
    logits = logits.detach().requires_grad_()
    log_probs, entropy = token_log_probs(logits, tokens, mask, backend=backend, **options)
    (grad,) = torch.autograd.grad(log_probs.sum() + 2 * entropy.sum(), logits)
    return log_probs.detach(), entropy.detach(), grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("token", [-100, 2**40, 3])
def test_what_stands_in_a_masked_row_is_without_effect(backend, dtype, poison, token):
    torch.manual_seed(0)
    clean = torch.randn(2, 3, 50).to(dtype)
    tokens = torch.randint(0, 50, (2, 3))
    mask = torch.tensor([[True, False, True], [False, False, True]])
    dirty = clean.where(mask[..., None], poison)
    dirty_tokens = tokens.where(mask, token)
    log_probs, entropy, grad = gradient(dirty, dirty_tokens, mask, backend)
    for value in (log_probs, entropy, grad):
        assert (value[~mask] == 0).all()
    alone = gradient(clean[mask], tokens[mask], None, backend)
    for value, right in zip((log_probs, entropy, grad), alone, strict=True):
        torch.testing.assert_close(value[mask], right, rtol=1e-6, atol=1e-7)


def test_all_rows_masked(backend):
    logits = torch.full((2, 9), math.nan)
    mask = torch.zeros(2, dtype=torch.bool)
    for value in gradient(logits, torch.tensor([-100, 99]), mask, backend):
        assert (value == 0).all()


@pytest.mark.parametrize("token", [-1, 10, -100, 2**33])
@pytest.mark.parametrize("backend_on_cpu", ["eager", "cpu"])
def test_a_valid_token_out_of_range_raises_on_a_cpu(backend_on_cpu, token):
    tokens = torch.tensor([[0, 3], [9, token]])
    with pytest.raises(RuntimeError, match=rf"\[0, 10\).*got {token} at row 3"):
        token_log_probs(torch.zeros(2, 2, 10), tokens, backend=backend_on_cpu)


@pytest.mark.parametrize("vocab", [10, 5000])  # one program a row, and two
def test_a_valid_token_out_of_range_is_nan_in_triton(vocab):
    rows = 3
    logits = torch.zeros(rows, vocab, requires_grad=True)
    tokens = torch.zeros(rows, dtype=torch.long)
    tokens[-1] = vocab
    log_probs, _ = token_log_probs(logits, tokens, backend="triton")
    log_probs.sum().backward()
    assert log_probs.isnan().nonzero().tolist() == [[rows - 1]]
    assert logits.grad[-1].isnan().all()
    assert logits.grad[:-1].isfinite().all()


def slice_of_sequence(dtype):
    return torch.randn(3, 5, 21, dtype=dtype)[:, :-1]


def batch_second(dtype):
    return torch.randn(5, 3, 21, dtype=dtype).transpose(0, 1)


def padded_rows(dtype):
    return torch.randn(4, 40, dtype=dtype)[:, 3:24]


def inner_stride(dtype):
    return torch.randn(21, 4, dtype=dtype).t()


def one_row_for_all(dtype):
    return torch.randn(1, 21, dtype=dtype).expand(4, 21)


def overlapping_rows(dtype):
    return torch.randn(200, dtype=dtype).as_strided((2, 2, 21), (70, 5, 1))


def four_dimensions(dtype):
    return torch.randn(2, 3, 2, 21, dtype=dtype)[:, :2]


def one_dimension(dtype):
    return torch.randn(21, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "layout",
    [
        slice_of_sequence,
        batch_second,
        padded_rows,
        inner_stride,
        one_row_for_all,
        overlapping_rows,
        four_dimensions,
        one_dimension,
    ],
)
def test_any_strides(backend, layout, dtype):
    torch.manual_seed(0)
    logits = layout(dtype)
    tokens = torch.randint(0, 21, logits.shape[:-1])
    log_probs, entropy, grad = gradient(logits, tokens, None, backend)
    assert grad.shape == logits.shape
    right = reference(logits, tokens)
    torch.testing.assert_close(log_probs.double(), right[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(entropy.double(), right[1], rtol=1e-6, atol=1e-6)
    ones = torch.ones(tokens.shape)
    right_grad = reference_gradient(logits, tokens, ones, 2 * ones)
    tolerance = 1e-6 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(grad.double(), right_grad, rtol=tolerance, atol=1e-6)


def test_a_slice_is_not_copied(monkeypatch):
    def no_copy(*_, **__):
        raise AssertionError("the logits were copied")

    logits = torch.randn(3, 5, 21)[:, :-1]
    monkeypatch.setattr(torch.Tensor, "clone", no_copy)
    monkeypatch.setattr(torch.Tensor, "contiguous", no_copy)
    assert as_rows(logits).data_ptr() == logits.data_ptr()
    assert as_rows(logits).stride() == logits.stride()


def test_rows_beyond_32_bit_offsets(backend):
    stride = 2**31 + 8
    memory = torch.empty(
        stride + 50, dtype=torch.bfloat16
    )  # only the pages of two rows are touched
    logits = memory.as_strided((2, 50), (stride, 1))
    torch.manual_seed(0)
    logits.copy_(torch.randn(2, 50))
    tokens = torch.tensor([1, 49])
    far, near = (gradient(x, tokens, None, backend) for x in (logits, logits.clone()))
    for a, b in zip(far, near, strict=True):
        assert torch.equal(a, b)


def test_splitting_a_row_among_programs_changes_rounding_only(monkeypatch):
    torch.manual_seed(0)
    logits, tokens = torch.randn(2, 9001), torch.tensor([0, 9000])
    assert kernels._splits(2, 9001, 4) == 4
    split = gradient(logits, tokens, None, "triton")
    monkeypatch.setattr(kernels, "FULL_GRID", 1)
    assert kernels._splits(2, 9001, 4) == 1
    for a, b in zip(gradient(logits, tokens, None, "triton"), split, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_threads_change_nothing():
    torch.manual_seed(0)
    logits, tokens = torch.randn(50, 3000), torch.randint(0, 3000, (50,))
    one = gradient(logits, tokens, None, "cpu")
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        three = gradient(logits, tokens, None, "cpu")
    finally:
        torch.set_num_threads(threads)
    for a, b in zip(one, three, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("shape", [(0, 7), (2, 0, 7), (0, 3, 7)])
def test_no_rows(backend, shape):
    logits = torch.randn(shape, requires_grad=True)
    log_probs, entropy = token_log_probs(
        logits, torch.zeros(shape[:-1], dtype=torch.long), backend=backend
    )
    assert log_probs.shape == entropy.shape == shape[:-1]
    (log_probs.sum() + entropy.sum()).backward()
    assert logits.grad.shape == shape


@pytest.mark.parametrize("token_dtype", [torch.int32, torch.int16, torch.uint8], ids=str)
def test_any_integer_tokens(backend, token_dtype):
    logits, tokens = torch.randn(4, 9), torch.tensor([0, 3, 8, 1])
    torch.testing.assert_close(
        token_log_probs(logits, tokens.to(token_dtype), backend=backend)[0],
        token_log_probs(logits, tokens, backend=backend)[0],
    )


@hypothesis.settings(max_examples=25, deadline=None)
@hypothesis.given(data=st.data())
@pytest.mark.parametrize("name", ["eager", "cpu", "triton"])
def test_any_shape_mask_dtype_and_scale(name, data):
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    batch, columns = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    vocab = data.draw(st.integers(1, 300))
    lead = data.draw(st.integers(0, 9))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    scale = data.draw(st.sampled_from([0.01, 1.0, 30.0]))
    memory = torch.randn(batch, columns + 1, vocab + lead, generator=generator) * scale
    logits = memory.to(dtype)[:, 1:, lead:]
    tokens = torch.randint(0, vocab, (batch, columns), generator=generator)
    mask = torch.rand(batch, columns, generator=generator) < 0.7
    temperature = data.draw(st.sampled_from([0.5, 1.0, 1.7]))
    softcap = data.draw(st.sampled_from([None, 20.0]))
    options = {"temperature": temperature, "logit_softcap": softcap}
    log_probs, entropy, grad = gradient(logits, tokens, mask, name, **options)
    right = reference(logits, tokens, **options)
    largest = logits.abs().max().item()
    tolerance = {"rtol": 2e-6, "atol": 2e-6 * (1 + largest)}
    for value, right_value in zip((log_probs, entropy), right, strict=True):
        torch.testing.assert_close(value.double(), right_value.where(mask, 0), **tolerance)
    ones = torch.ones(tokens.shape)
    right_grad = reference_gradient(logits, tokens, ones, 2 * ones, temperature, softcap)
    right_grad = right_grad.where(mask[..., None], 0)
    tolerance["rtol"] += {torch.float32: 0, torch.bfloat16: 2**-7, torch.float16: 2**-9}[dtype]
    torch.testing.assert_close(grad.double(), right_grad, **tolerance)
