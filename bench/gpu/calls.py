"""The operations as calls of the Triton backend: outputs, and what these are differentiable by."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bench.device import GPU
from bench.inputs import linear_inputs, policy_inputs, token_inputs


def policy_call(inputs: dict[str, Tensor], **options) -> tuple[list[Tensor], list[Tensor]]:
    """All losses and metrics; what the losses are differentiable by."""
    from grpo_kernels import policy_loss

    everything = {
        "kl_mask_threshold": 0.5,
        "kl_to_ref_coeff": 0.1,
        "kl_to_inference_coeff": 0.2,
        "entropy_coeff": 0.01,
    }
    out = policy_loss(**inputs, **everything, **options, backend="triton")
    return list(out), [inputs["log_probs"], inputs["entropy"]]


def token_call(logits: Tensor, tokens: Tensor, **options) -> tuple[list[Tensor], list[Tensor]]:
    from grpo_kernels import token_log_probs

    return list(token_log_probs(logits, tokens, **options, backend="triton")), [logits]


def linear_call(
    hidden: Tensor, weight: Tensor, tokens: Tensor, **options
) -> tuple[list[Tensor], list[Tensor]]:
    from grpo_kernels import linear_log_probs

    out = linear_log_probs(hidden, weight, tokens, **options, backend="triton")
    return list(out), [hidden, weight]


def gradients(outputs: list[Tensor], by: list[Tensor], retain: bool = False) -> list[Tensor]:
    """By the differentiable outputs, with an upstream gradient that is not 1."""
    outputs = [output for output in outputs if output.requires_grad]
    upstream = [torch.full_like(output, 0.5) for output in outputs]
    return list(torch.autograd.grad(outputs, by, upstream, retain_graph=retain))


def all_of(call: Callable[[], tuple[list[Tensor], list[Tensor]]]) -> list[Tensor]:
    outputs, by = call()
    return [*[output.detach() for output in outputs], *gradients(outputs, by)]


def small_calls() -> dict[str, Callable[[], tuple[list[Tensor], list[Tensor]]]]:
    """Every operation at sizes that take each path: one block, several; split rows, whole ones."""
    calls = {}
    kinds = [(o, s) for o in ("grpo", "cispo") for s in ("torchrl", "corrected")]
    for rows, columns in (3, 5), (4, 1025) if GPU else (1, 129):
        inputs = policy_inputs(rows, columns)
        for objective, semantics in kinds if GPU else kinds[::3]:
            name = f"policy_loss {objective} {semantics} {rows}x{columns}"
            options = {"objective": objective, "semantics": semantics}
            options["aggregation"] = "none" if columns == 5 else "prompt_mean"
            calls[name] = lambda inputs=inputs, o=options: policy_call(inputs, **o)
    for rows, vocab in (3, 4099), (600, 1025) if GPU else (2, 9):
        made = token_inputs(rows, vocab, torch.bfloat16)
        calls[f"token_log_probs {rows}x{vocab}"] = lambda made=made: token_call(*made)
    rows, vocab = (70, 1031) if GPU else (3, 37)
    made = linear_inputs(rows, 32, vocab, torch.bfloat16 if GPU else torch.float32)
    calls[f"linear_log_probs {rows}x32"] = lambda made=made: linear_call(*made)
    return calls
