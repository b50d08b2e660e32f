"""Gradients as autograd, torch.compile and torch.library see them."""

import pytest
import torch

from grpo_kernels.token_log_probs import token_log_probs

from .reference import reference_gradient


def inputs(dtype=torch.float32, rows=(2, 3), vocab=13):
    torch.manual_seed(0)
    logits = torch.randn(*rows, vocab, dtype=dtype, requires_grad=True)
    return logits, torch.randint(0, vocab, rows), torch.rand(rows) < 0.7


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_gradcheck(backend, softcap):
    logits, tokens, mask = inputs(torch.float64, rows=(1, 2), vocab=5)
    mask[0, 0] = True
    temperature = torch.tensor([[0.7, 1.3]], dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda x: token_log_probs(
            x, tokens, mask, temperature=temperature, logit_softcap=softcap, backend=backend
        ),
        logits,
    )


@pytest.mark.parametrize("kind", ["stride 0", "random", "transposed", "log_probs", "entropy"])
def test_any_upstream_gradient(backend, kind):
    logits, tokens, _ = inputs()
    log_probs, entropy = token_log_probs(logits, tokens, backend=backend)
    one = torch.tensor(3.0).expand(tokens.shape)
    slopes = {
        "stride 0": (one, one),
        "random": (torch.randn(tokens.shape), torch.randn(tokens.shape)),
        "transposed": (torch.randn(3, 2).t(), torch.randn(3, 2).t()),
        "log_probs": (one, None),
        "entropy": (None, one),
    }[kind]
    outputs = [
        (output, slope)
        for output, slope in zip((log_probs, entropy), slopes, strict=True)
        if slope is not None
    ]
    (grad,) = torch.autograd.grad(
        [output for output, _ in outputs], logits, [slope for _, slope in outputs]
    )
    zero = torch.zeros(tokens.shape)
    right = reference_gradient(
        logits.detach(), tokens, *(zero if slope is None else slope for slope in slopes)
    )
    torch.testing.assert_close(grad.double(), right, rtol=1e-5, atol=1e-6)


def test_double_backward_raises(backend):
    logits, tokens, mask = inputs()
    log_probs, entropy = token_log_probs(logits, tokens, mask, backend=backend)
    (grad,) = torch.autograd.grad(log_probs.sum() + entropy.sum(), logits, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward is not implemented"):
        (grad.square().sum() + logits.sum()).backward()


def test_backward_twice_over_a_retained_graph(backend):
    logits, tokens, mask = inputs()
    log_probs, _ = token_log_probs(logits, tokens, mask, backend=backend)
    first, second = (
        torch.autograd.grad(log_probs.sum(), logits, retain_graph=True)[0] for _ in range(2)
    )
    assert torch.equal(first, second)


@pytest.mark.parametrize("cut", [slice(None), slice(0, -1)])
def test_overwrite_logits_gives_the_same_gradient_in_the_logits_memory(backend, cut):
    leaf, tokens, mask = inputs()
    tokens, mask = tokens[:, cut], mask[:, cut]
    expected, _ = token_log_probs(leaf[:, cut], tokens, mask, backend=backend)
    (right,) = torch.autograd.grad(expected.sum(), leaf)

    logits = (leaf * 1)[:, cut]
    seen = []
    logits.register_hook(lambda grad: seen.append(grad.data_ptr()))
    log_probs, _ = token_log_probs(logits, tokens, mask, overwrite_logits=True, backend=backend)
    log_probs.sum().backward()
    assert seen == [logits.data_ptr()]
    assert torch.equal(leaf.grad, right)


def test_overwrite_logits_refuses_a_second_backward(backend):
    leaf, tokens, mask = inputs()
    log_probs, _ = token_log_probs(leaf * 1, tokens, mask, overwrite_logits=True, backend=backend)
    log_probs.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="overwrite_logits=False"):
        log_probs.sum().backward()


def test_overwrite_logits_is_seen_by_other_uses_of_the_logits(backend):
    leaf, tokens, mask = inputs()
    logits = leaf * 1
    square = logits.square()
    log_probs, _ = token_log_probs(logits, tokens, mask, overwrite_logits=True, backend=backend)
    log_probs.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.sum().backward()


def test_overwrite_logits_refuses_a_leaf_and_shared_rows():
    leaf, tokens, _ = inputs()
    with pytest.raises(ValueError, match="leaf"):
        token_log_probs(leaf, tokens, overwrite_logits=True)
    with pytest.raises(ValueError, match="share memory"):
        token_log_probs((leaf[:1] * 1).expand(2, 3, 13), tokens, overwrite_logits=True)


@pytest.mark.parametrize("entropy", [True, False])
def test_opcheck(backend, entropy):
    logits, tokens, mask = inputs()
    for arguments in [
        (logits, tokens, mask, None, 0.7, entropy, 0.0, backend),
        (logits[:, :-1], tokens[:, :-1], None, torch.ones(2, 1), 1.0, entropy, 3.0, backend),
    ]:
        torch.library.opcheck(torch.ops.grpo_kernels.token_log_probs.default, arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiled_whole_equals_eager(backend, dtype):
    logits, tokens, mask = inputs(dtype)

    def loss(logits, temperature):
        log_probs, entropy = token_log_probs(
            logits, tokens, mask, temperature=temperature, backend=backend
        )
        return (log_probs.sin() + 0.3 * entropy).sum()

    torch.compiler.reset()
    compiled = torch.compile(loss, fullgraph=True)
    for number, temperature in enumerate((1.0, 0.5, 0.7)):
        stance = "fail_on_recompile" if number == 2 else "default"
        with torch.compiler.set_stance(stance):
            whole = compiled(logits, temperature)
        eager = loss(logits, temperature)
        torch.testing.assert_close(whole, eager)
        torch.testing.assert_close(
            *(torch.autograd.grad(value, logits)[0] for value in (whole, eager))
        )


def test_auto_backend_compiles_and_exports():
    logits, tokens, mask = inputs()

    class Score(torch.nn.Module):
        def forward(self, logits):
            return token_log_probs(logits, tokens, mask, temperature=0.7)

    torch.compiler.reset()
    right = Score()(logits)
    exported = torch.export.export(Score(), (logits,))
    for scores in (torch.compile(Score(), fullgraph=True)(logits), exported.module()(logits)):
        torch.testing.assert_close(scores, right)
