"""policy_loss beside the same formula, eager and under torch.compile."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from bench import formulas
from bench.conftest import Bench
from bench.inputs import policy_inputs
from grpo_kernels import policy_loss

PLAIN = ("log_probs", "old_log_probs", "advantages", "mask")
# Where launches decide; usual batches; a large one of long rows.
SHAPES = [(8, 64), (64, 1024), (16, 8192), (64, 32768)]
ASKED = (16, 8192)


def inputs_of(rows: int, columns: int, everything: bool) -> dict[str, Tensor]:
    inputs = policy_inputs(rows, columns)
    return inputs if everything else {name: inputs[name] for name in PLAIN}


def ours(inputs: dict[str, Tensor]) -> Tensor:
    if "entropy" not in inputs:
        return policy_loss(**inputs).loss_objective
    out = policy_loss(
        **inputs,
        kl_mask_threshold=0.5,
        kl_to_ref_coeff=0.1,
        kl_to_inference_coeff=0.2,
        entropy_coeff=0.01,
    )
    return out.loss_objective + out.loss_kl_to_ref + out.loss_kl_to_inference + out.loss_entropy


def by_formula(formula: Callable, inputs: dict[str, Tensor]) -> Tensor:
    return formula(*inputs.values())[0]


def leaves(inputs: dict[str, Tensor]) -> list[Tensor]:
    return [tensor for tensor in inputs.values() if tensor.requires_grad]


def all_of(loss: Tensor, inputs: dict[str, Tensor]) -> list[Tensor]:
    """The loss and its gradients."""
    return [loss.detach(), *torch.autograd.grad(loss, leaves(inputs))]


def in_fp64(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: tensor.detach().double().requires_grad_(tensor.requires_grad)
        if tensor.is_floating_point()
        else tensor
        for name, tensor in inputs.items()
    }


def bytes_moved(inputs: dict[str, Tensor]) -> tuple[int, int]:
    """What the forward must read, and what the backward must read and write."""
    tokens = [tensor for tensor in inputs.values() if tensor.shape == inputs["mask"].shape]
    read = sum(tensor.numel() * tensor.element_size() for tensor in tokens)
    written = sum(leaf.numel() * leaf.element_size() for leaf in leaves(inputs))
    entropy = inputs["log_probs"].numel() * 4 if "entropy" in inputs else 0  # the forward's alone
    return read, read - entropy + written


def one_pass(inputs: dict[str, Tensor]) -> None:
    """torch reads every input once."""
    for tensor in inputs.values():
        tensor.detach().sum()


def prepare(name: str, rows: int, columns: int, everything: bool) -> Callable[[], object]:
    """Forward and backward of one contender, after a small call that loads what it needs."""
    formula = formulas.compiled(formulas.policy_loss) if "compile" in name else formulas.policy_loss

    def both(inputs: dict[str, Tensor]) -> list[Tensor]:
        return all_of(ours(inputs) if name == "ours" else by_formula(formula, inputs), inputs)

    inputs = inputs_of(rows, columns, everything)
    both(inputs if "compile" in name else inputs_of(2, 8, everything))
    return lambda: both(inputs)


@pytest.mark.parametrize("everything", [False, True], ids=["plain", "everything"])
@pytest.mark.parametrize("shape", SHAPES, ids="{0[0]}x{0[1]}".format)
def test_policy_loss(bench: Bench, shape: tuple[int, int], everything: bool) -> None:
    rows, columns = bench.size(*shape)
    inputs = inputs_of(rows, columns, everything)
    formula = formulas.compiled(formulas.policy_loss)
    times = bench.times(
        f"policy_loss {'with everything' if everything else 'plain'}, B={rows} T={columns}",
        {
            "ours": lambda: all_of(ours(inputs), inputs),
            "torch.compile": lambda: all_of(by_formula(formula, inputs), inputs),
            "eager": lambda: all_of(by_formula(formulas.policy_loss, inputs), inputs),
            "ours, forward": lambda: ours(inputs),
            "one pass": lambda: one_pass(inputs),
        },
        rounds=41,
    )
    exact = in_fp64(inputs)
    bench.error(
        {
            "ours": all_of(ours(inputs), inputs),
            "eager": all_of(by_formula(formulas.policy_loss, inputs), inputs),
        },
        all_of(by_formula(formulas.policy_loss, exact), exact),
    )
    forward, backward = bytes_moved(inputs)
    bench.bandwidth(forward + backward, "ours", "torch.compile", "eager")
    bench.bandwidth(forward, "ours, forward")
    if shape == SHAPES[0]:
        tiny = inputs_of(1, 8, everything)
        bench.host(
            {
                "ours": lambda: all_of(ours(tiny), tiny),
                "eager": lambda: all_of(by_formula(formulas.policy_loss, tiny), tiny),
            }
        )
    if shape == SHAPES[-1]:
        contenders = ("ours", "torch.compile", "eager")
        bench.peak(prepare, {name: (name, rows, columns, everything) for name in contenders})
    if shape == ASKED:
        bench.faster_than("torch.compile", 1.5)
        passes = times["ours, forward"] / times["one pass"]
        bench.at_most("forward in passes over the inputs", passes, 3, times)
