"""linear_log_probs against logits made whole in fp64."""

import math

import pytest
import torch
import torch.nn.functional as F

from grpo_kernels.linear_log_probs import chunked, linear_log_probs
from tests.grpo_kernels.token_log_probs.reference import reference


def inputs(dtype=torch.float32, rows=(2, 3), width=7, vocab=19):
    torch.manual_seed(0)
    hidden = torch.randn(*rows, width).to(dtype).requires_grad_()
    weight = torch.randn(vocab, width).to(dtype).requires_grad_()
    bias = torch.randn(vocab).to(dtype).requires_grad_()
    return hidden, weight, bias, torch.randint(0, vocab, rows), torch.rand(rows) < 0.7


def right_results(hidden, weight, bias, tokens, mask, slopes, **options):
    """log_probs, entropy and the gradients of hidden, weight and bias, by autograd in fp64."""
    leaves = [x.detach().double().requires_grad_() for x in (hidden, weight, bias)]
    log_probs, entropy = reference(F.linear(*leaves), tokens, **options)
    log_probs, entropy = log_probs.where(mask, 0), entropy.where(mask, 0)
    total = (log_probs * slopes[0]).sum() + (entropy * slopes[1]).sum()
    return log_probs, entropy, *torch.autograd.grad(total, leaves)


def our_results(hidden, weight, bias, tokens, mask, slopes, backend, **options):
    log_probs, entropy = linear_log_probs(
        hidden, weight, tokens, mask, bias=bias, backend=backend, **options
    )
    total = (log_probs * slopes[0]).sum() + (entropy * slopes[1]).sum()
    return log_probs, entropy, *torch.autograd.grad(total, (hidden, weight, bias))


@pytest.fixture
def small_chunks(monkeypatch):
    """Several chunks each way even at the tests' sizes."""
    monkeypatch.setattr(chunked, "MIN_ROWS", 1)
    monkeypatch.setattr(chunked, "MIN_VOCAB", 1)
    monkeypatch.setattr(chunked, "BLOCK", 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("chunks", ["one", "several"])
@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.6, "logit_softcap": 5.0}, {"temperature": torch.tensor([[0.5], [2]])}],
    ids=["plain", "scaled", "temperature per row"],
)
def test_agrees_with_fp64(backend, dtype, chunks, options, request):
    if chunks == "several":
        request.getfixturevalue("small_chunks")
    tensors = inputs(dtype)
    slopes = torch.randn(2, 3), torch.randn(2, 3)
    right = right_results(*tensors, slopes, **options)
    tolerance = {torch.float32: 3e-5, torch.float64: 1e-12, torch.bfloat16: 6e-2}[dtype]
    for ours, theirs in zip(our_results(*tensors, slopes, backend, **options), right, strict=True):
        scale = max(1, theirs.abs().max().item())
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=tolerance * scale)


def test_sixteen_bit_error_at_most_twice_that_of_linear_and_log_softmax(backend, small_chunks):
    if backend == "triton":
        pytest.skip("the interpreter truncates to bf16 where a GPU rounds")
    hidden, weight, bias, tokens, mask = inputs(torch.bfloat16, (24,), 32, 100)
    mask = torch.ones_like(mask)
    slopes = torch.randn(24), torch.randn(24)
    right = right_results(hidden, weight, bias, tokens, mask, slopes)
    log_p = torch.log_softmax(F.linear(hidden, weight, bias).float(), -1)
    own = log_p.gather(-1, tokens[:, None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)
    total = (own[0] * slopes[0]).sum() + (own[1] * slopes[1]).sum()
    own = *own, *torch.autograd.grad(total, (hidden, weight, bias))
    ours = our_results(hidden, weight, bias, tokens, mask, slopes, backend)
    for a, b, value in zip(ours, own, right, strict=True):
        assert a.dtype == b.dtype
        error, own_error = (a.double() - value).norm(), (b.double() - value).norm()
        assert error <= 2 * own_error


@pytest.mark.parametrize("workspace_mib", [1, 256])
def test_workspace_bounds_a_chunk(workspace_mib):
    row_bytes = 152_000 * 4
    chunks = list(chunked._chunks(4096, 64, row_bytes, workspace_mib * 2**20))
    largest = max(chunk.stop - chunk.start for chunk in chunks)
    assert largest == 1 or largest * row_bytes <= workspace_mib * 2**20
    assert largest <= 4096 / 5 + 16
    assert [chunk.start for chunk in chunks[1:]] == [chunk.stop for chunk in chunks[:-1]]
    assert (chunks[0].start, chunks[-1].stop) == (0, 4096)


def test_logits_never_exist_whole(monkeypatch):
    hidden, weight, bias, tokens, _ = inputs(rows=(400,), width=8, vocab=3000)
    seen = []
    allocate = chunked._Workspace.logits

    def logits(self, rows, vocab):
        seen.append(rows * vocab)
        return allocate(self, rows, vocab)

    monkeypatch.setattr(chunked._Workspace, "logits", logits)
    log_probs, _ = linear_log_probs(hidden, weight, tokens, bias=bias)
    log_probs.sum().backward()
    assert len(seen) == 10
    assert max(seen) == 400 * 608  # a fifth of the vocabulary, in blocks of 16


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_what_stands_in_a_masked_row_is_without_effect(backend, poison, small_chunks):
    hidden, weight, bias, tokens, mask = inputs()
    slopes = torch.ones(2, 3), torch.ones(2, 3)
    right = our_results(hidden, weight, bias, tokens, mask, slopes, backend)
    with torch.no_grad():
        hidden[~mask] = poison
    tokens = tokens.where(mask, -100)
    for ours, clean in zip(
        our_results(hidden, weight, bias, tokens, mask, slopes, backend), right, strict=True
    ):
        assert torch.equal(ours, clean)
    assert (right[0][~mask] == 0).all()
    assert (right[2][~mask] == 0).all()


def test_no_compaction_gives_the_same(backend, monkeypatch, small_chunks):
    """The path of GPUs, which do not know how many rows are valid."""
    tensors = inputs(torch.float64)
    slopes = torch.randn(2, 3), torch.randn(2, 3)
    compact = our_results(*tensors, slopes, backend)
    with torch.no_grad():
        tensors[0][~tensors[4]] = math.nan
    monkeypatch.setattr(chunked, "_valid_rows", lambda mask: None)
    for a, b in zip(our_results(*tensors, slopes, backend), compact, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("rows", [(0,), (2, 0), (3,)])
def test_nothing_to_score(backend, rows):
    hidden, weight, bias, tokens, _ = inputs(rows=rows)
    mask = torch.zeros(rows, dtype=torch.bool)
    results = our_results(hidden, weight, bias, tokens, mask, (1, 1), backend)
    for result, like in zip(results, (tokens, tokens, hidden, weight, bias), strict=True):
        assert result.shape == like.shape
        assert (result == 0).all()


@pytest.mark.parametrize("needs", range(1, 8))
def test_any_choice_of_what_requires_grad(backend, needs, monkeypatch):
    tensors = inputs()
    slopes = torch.ones(2, 3), torch.ones(2, 3)
    right = our_results(*tensors, slopes, backend)[2:]
    leaves = tensors[:3]
    wanted = [leaf for i, leaf in enumerate(leaves) if needs >> i & 1]
    for i, leaf in enumerate(leaves):
        leaf.requires_grad_(bool(needs >> i & 1))
    log_probs, entropy = linear_log_probs(
        tensors[0], tensors[1], *tensors[3:], bias=tensors[2], backend=backend
    )
    matmuls = []
    real_mm = torch.mm
    monkeypatch.setattr(torch, "mm", lambda *a, **k: matmuls.append(1) or real_mm(*a, **k))
    grads = torch.autograd.grad((log_probs + entropy).sum(), wanted)
    if not needs & 2:
        assert not matmuls, "a frozen weight's gradient was computed"
    for grad, value in zip(grads, [g for i, g in enumerate(right) if needs >> i & 1], strict=True):
        assert torch.equal(grad, value)


def test_nothing_requires_grad(backend):
    hidden, weight, _, tokens, _ = (x.detach() for x in inputs())
    log_probs, entropy = linear_log_probs(hidden, weight, tokens, backend=backend)
    assert not log_probs.requires_grad
    assert not entropy.requires_grad


def test_tied_weight_collects_both_gradients(backend):
    _, weight, _, tokens, _ = inputs()

    def loss(score):
        hidden = F.embedding(tokens, weight)
        return score(hidden, weight)

    def whole(hidden, weight):
        return F.log_softmax(F.linear(hidden, weight), -1).gather(-1, tokens[..., None]).sum()

    ours = loss(lambda h, w: linear_log_probs(h, w, tokens, backend=backend)[0].sum())
    torch.testing.assert_close(
        torch.autograd.grad(ours, weight), torch.autograd.grad(loss(whole), weight)
    )


def test_autocast_behaves_like_linear(backend):
    hidden, weight, bias, tokens, _ = inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        log_probs, _ = linear_log_probs(hidden, weight, tokens, bias=bias, backend=backend)
        logits = F.linear(hidden, weight, bias)
    assert logits.dtype == torch.bfloat16
    right = torch.log_softmax(logits.float(), -1).gather(-1, tokens[..., None]).squeeze(-1)
    assert log_probs.dtype == torch.float32
    torch.testing.assert_close(log_probs, right, rtol=1e-5, atol=1e-5)
    grads = torch.autograd.grad(log_probs.sum(), (hidden, weight, bias))
    right_grads = torch.autograd.grad(right.sum(), (hidden, weight, bias))
    for grad, value in zip(grads, right_grads, strict=True):
        assert grad.dtype == torch.float32
        torch.testing.assert_close(grad, value, rtol=2e-2, atol=3e-2)


def test_a_mixed_dtype_is_refused_as_by_linear():
    hidden, weight, bias, tokens, _ = inputs()
    with pytest.raises(RuntimeError):
        F.linear(hidden.bfloat16(), weight)
    with pytest.raises(TypeError, match="weight must have the dtype of hidden"):
        linear_log_probs(hidden.bfloat16(), weight, tokens)
    with pytest.raises(TypeError, match="bias must have the dtype of hidden"):
        linear_log_probs(hidden, weight, tokens, bias=bias.double())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"weight": torch.zeros(5)}, r"weight must be \[V, H\]"),
        ({"weight": torch.zeros(5, 4)}, r"hidden must be \[..., 4\]"),
        ({"bias": torch.zeros(4)}, r"bias must be \[19\]"),
        ({"workspace_mib": 0}, "workspace_mib must be positive"),
        ({"tokens": torch.zeros(2, dtype=torch.long)}, "tokens must have the shape of hidden"),
        ({"temperature": -1.0}, "temperature must be positive"),
    ],
)
def test_wrong_arguments_are_named(change, words):
    hidden, weight, _, tokens, _ = inputs()
    arguments = {"hidden": hidden, "weight": weight, "tokens": tokens} | change
    with pytest.raises(ValueError, match=words):
        linear_log_probs(**arguments)


@pytest.mark.parametrize("name", ["eager", "cpu"])
def test_a_valid_token_out_of_range_raises_on_a_cpu(name):
    hidden, weight, _, tokens, _ = inputs()
    with pytest.raises(RuntimeError, match=r"tokens must be in \[0, 19\)"):
        linear_log_probs(hidden, weight, tokens + 19, backend=name)


def test_a_valid_token_out_of_range_is_nan_in_triton(small_chunks):
    hidden, weight, _, tokens, _ = inputs()
    tokens[0, 1] = 19
    log_probs, _ = linear_log_probs(hidden, weight, tokens, backend="triton")
    assert log_probs.isnan().nonzero().tolist() == [[0, 1]]
    (grad,) = torch.autograd.grad(log_probs.sum(), hidden)
    assert grad[0, 1].isnan().all()
    assert grad[1].isfinite().all()


def test_gradcheck(backend, small_chunks):
    if backend == "triton":
        pytest.skip("slow in the interpreter; the kernel has its own gradcheck")
    hidden, weight, bias, tokens, mask = inputs(torch.float64, (2, 2), 3, 6)
    assert torch.autograd.gradcheck(
        lambda h, w, b: linear_log_probs(h, w, tokens, mask, bias=b, backend=backend),
        (hidden, weight, bias),
    )


@pytest.mark.parametrize("masked", [True, False])
def test_opcheck(backend, masked):
    hidden, weight, bias, tokens, mask = inputs()
    torch.library.opcheck(
        torch.ops.grpo_kernels.linear_log_probs.default,
        (hidden, weight, bias, tokens, mask if masked else None, None, 0.7, True, 0.0, 1, backend),
    )


def test_compiled_whole_equals_eager(backend):
    hidden, weight, _, tokens, mask = inputs()

    def loss(hidden, weight):
        log_probs, entropy = linear_log_probs(hidden, weight, tokens, mask, backend=backend)
        return (log_probs.sin() + 0.3 * entropy).sum()

    torch.compiler.reset()
    whole, eager = torch.compile(loss, fullgraph=True)(hidden, weight), loss(hidden, weight)
    torch.testing.assert_close(whole, eager)
    grads = (torch.autograd.grad(value, (hidden, weight)) for value in (whole, eager))
    torch.testing.assert_close(*grads)


def test_results_are_bitwise_repeatable(backend, small_chunks):
    tensors = inputs()
    slopes = torch.randn(2, 3), torch.randn(2, 3)
    first, second = (our_results(*tensors, slopes, backend) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


def test_double_backward_raises(backend):
    hidden, weight, _, tokens, _ = inputs()
    log_probs, _ = linear_log_probs(hidden, weight, tokens, backend=backend)
    (grad,) = torch.autograd.grad(log_probs.sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward is not implemented"):
        (grad.square().sum() + weight.sum()).backward()


def test_auto_backend_compiles_under_autocast():
    hidden, weight, _, tokens, mask = inputs()

    def score(hidden, weight):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return linear_log_probs(hidden, weight, tokens, mask)

    torch.compiler.reset()
    whole = torch.compile(score, fullgraph=True)(hidden, weight)
    torch.testing.assert_close(whole, score(hidden, weight))
