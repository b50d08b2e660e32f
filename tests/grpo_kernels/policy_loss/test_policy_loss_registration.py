"""`policy_loss` under torch.library's checks, torch.compile and torch.export."""

import pytest
import torch
from policy_loss_reference import DIFFERENTIABLE, FULL, evaluate, make_batch

from grpo_kernels import policy_loss
from grpo_kernels.policy_loss.options import PolicyLossOptions


def operator_arguments(batch, backend, **options):
    defaults = {
        "objective": "grpo",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "kl_mask_threshold": None,
        "aggregation": "token_mean",
        "kl_to_ref_coeff": None,
        "kl_to_inference_coeff": None,
        "entropy_coeff": None,
        "semantics": "torchrl",
        "log_ratio_cap": None,
        "normaliser": None,
    }
    inputs = [
        tensor.requires_grad_() if tensor is not None and name in DIFFERENTIABLE else tensor
        for name, tensor in batch.items()
    ]
    return (*inputs, *PolicyLossOptions(**{**defaults, **options}).flatten(), backend)


CONFIGURATIONS = [
    {},
    {"aggregation": "prompt_mean", **FULL},
    {"aggregation": "none", "semantics": "corrected", **FULL},
    {"objective": "cispo", "clip_low": torch.tensor(0.1), "normaliser": torch.tensor(9.0)},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", CONFIGURATIONS, ids=["plain", "full", "per token", "tensors"])
def test_the_operator_passes_opcheck(backend, options, dtype):
    present = "kl_to_ref_coeff" in options
    batch = make_batch(2, 5, dtype=dtype, ref=present, entropy=present)
    torch.library.opcheck(
        torch.ops.grpo_kernels.policy_loss.default, operator_arguments(batch, backend, **options)
    )


@pytest.mark.parametrize("options", CONFIGURATIONS, ids=["plain", "full", "per token", "tensors"])
def test_compiled_equals_eager(backend, options):
    torch._dynamo.reset()
    present = "kl_to_ref_coeff" in options
    batch = make_batch(2, 20, ref=present, entropy=present)
    options = {**options, "backend": backend}
    compiled = torch.compile(policy_loss, fullgraph=True)
    expected = evaluate(policy_loss, batch, options)
    actual = evaluate(compiled, batch, options)
    assert actual.keys() == expected.keys()
    for name, want in expected.items():
        torch.testing.assert_close(actual[name], want, rtol=1e-6, atol=1e-7)


def test_compiled_metrics_are_not_differentiable(backend):
    torch._dynamo.reset()
    batch = make_batch(2, 20)
    batch["log_probs"].requires_grad_()
    output = torch.compile(policy_loss, fullgraph=True)(**batch, **FULL, backend=backend)
    assert output.loss_objective.requires_grad
    assert not any(metric.requires_grad for metric in output[4:])


def test_changing_a_clip_tensor_or_a_normaliser_does_not_recompile():
    torch._dynamo.reset()
    batch = make_batch(2, 20, ref=False, entropy=False)

    def loss(clip, normaliser):
        return policy_loss(**batch, clip_high=clip, normaliser=normaliser).loss_objective

    compiled = torch.compile(loss, fullgraph=True)
    with torch.compiler.set_stance("default"):
        compiled(torch.tensor(0.1), torch.tensor(10))
    with torch.compiler.set_stance("fail_on_recompile"):
        for clip in (0.2, 0.3):
            arguments = torch.tensor(clip), torch.tensor(int(100 * clip))
            torch.testing.assert_close(compiled(*arguments), loss(*arguments))


def test_other_shapes_compile_once_more_at_most():
    torch._dynamo.reset()
    compiled = torch.compile(policy_loss, fullgraph=True, dynamic=True)
    for shape in ((2, 20), (3, 30)):
        compiled(**make_batch(*shape))
    with torch.compiler.set_stance("fail_on_recompile"):
        for shape in ((4, 40), (5, 17)):
            batch = make_batch(*shape)
            torch.testing.assert_close(
                compiled(**batch).loss_objective, policy_loss(**batch).loss_objective
            )


def test_a_module_that_calls_it_exports():
    class Loss(torch.nn.Module):
        def forward(self, log_probs, old_log_probs, advantages, mask):
            output = policy_loss(log_probs, old_log_probs, advantages, mask)
            return output.loss_objective, output.ESS

    batch = make_batch(2, 20, ref=False, entropy=False)
    arguments = tuple(batch[name] for name in list(batch)[:4])
    exported = torch.export.export(Loss(), arguments)
    for got, want in zip(exported.module()(*arguments), Loss()(*arguments), strict=True):
        torch.testing.assert_close(got, want)


def test_a_second_derivative_raises_in_the_operator(backend):
    batch = make_batch(2, 5, ref=False, entropy=False)
    arguments = operator_arguments(batch, backend)
    loss = torch.ops.grpo_kernels.policy_loss(*arguments)[0]
    (gradient,) = torch.autograd.grad(loss, arguments[0], create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        gradient.sum().backward()


def test_numbers_that_change_do_not_recompile():
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    def loss(log_probs, clip, normaliser):
        return policy_loss(
            log_probs,
            torch.zeros(2, 4),
            torch.ones(2),
            clip_low=clip,
            clip_high=clip,
            normaliser=normaliser,
        ).loss_objective

    torch._dynamo.reset()
    compiled = torch.compile(loss, backend=count, fullgraph=True)
    log_probs = torch.linspace(-1, 1, 8).view(2, 4)
    for step in range(8):
        clip, normaliser = 0.1 + 0.01 * step, 3 + step
        torch.testing.assert_close(
            compiled(log_probs, clip, normaliser), loss(log_probs, clip, normaliser)
        )
    assert len(graphs) <= 3  # one with the values as constants, then with them as inputs
