"""Gradients that raise when they are differentiated again, rather than be taken for constants."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx


def refuse_second_derivative(operation: str) -> NoReturn:
    """Raise the error of `operation`'s double backward."""
    raise RuntimeError(
        f"{operation}: double backward is not implemented; call backward without create_graph, or "
        "differentiate the operation's formula in plain PyTorch"
    )


def not_twice_differentiable(grad: Tensor, operation: str, *depends_on: Tensor | None) -> Tensor:
    """`grad`, raising if it is differentiated with respect to what it depends on."""
    if not torch.is_grad_enabled():
        return grad
    return _RaiseOnBackward.apply(grad, operation, *depends_on)


class _RaiseOnBackward(torch.autograd.Function):
    """Identity on a first-order gradient that must not be differentiated again."""

    @staticmethod
    def forward(ctx: FunctionCtx, grad: Tensor, operation: str, *depends_on: Tensor):
        ctx.operation = operation
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: FunctionCtx, *_) -> NoReturn:
        refuse_second_derivative(ctx.operation)
