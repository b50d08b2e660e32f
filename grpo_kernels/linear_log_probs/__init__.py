"""Log-probability and entropy straight from hidden states, without the logits tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from ..backends import Backend, resolve_backend
from ..token_log_probs import LOGITS_DTYPES, check_devices, check_scale, check_selection
from .op import LinearLogProbs, linear_log_probs_op

__all__ = ["linear_log_probs"]


def _autocast(tensor: Tensor | None, device_type: str) -> Tensor | None:
    """What autocast makes of an input of nn.Linear."""
    if tensor is None or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(device_type))


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    mask: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    entropy: bool = True,
    logit_softcap: float | None = None,
    workspace_mib: int = 256,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor | None]:
    """`token_log_probs(hidden @ weight.T + bias, tokens, mask, ...)` in bounded memory.

    The logits exist for a chunk of rows at a time, in the weight's dtype; backward computes them
    again.

    Args:
        hidden: [..., H], what the output layer takes.
        weight: [V, H], the output layer's, in the dtype of hidden (or under autocast). Tied and
            frozen weights work; a frozen one costs no gradient matmul.
        tokens: [...] integers in [0, V) wherever the mask is true.
        mask: [...] bool. Outputs and gradients of rows where it is false are exactly 0, whatever
            stands there. A CPU leaves these rows out; a GPU, which would have to wait to know
            their number, multiplies them as zeros: drop pads beforehand to save that.
        bias: [V] or None.
        temperature: what logits are divided by: a number, or a tensor that broadcasts to [...].
            A logit scale s is a temperature of 1 / s. Not differentiable.
        entropy: whether to compute the entropy.
        logit_softcap: c for logits = c tanh(logits / c), before the temperature.
        workspace_mib: most MiB for a chunk's logits (at least one row; at most about a fifth of
            all logits is used). 16-bit weights' gradients are summed in fp32 beside it.
        backend: see grpo_kernels.backends.

    Returns:
        log_probs [...] and entropy [...] (None if not asked), in nats, fp32 (fp64 for fp64
        weights). Both are differentiable once with respect to hidden, weight and bias.

    Raises:
        RuntimeError: a token out of range, on a CPU. A GPU gives NaN.
        TypeError, ValueError: an argument of a wrong dtype, shape, device or value.
    """
    device_type = hidden.device.type
    if torch.is_autocast_enabled(device_type):
        hidden, weight, bias = (_autocast(x, device_type) for x in (hidden, weight, bias))
    if hidden.dtype not in LOGITS_DTYPES:
        raise TypeError(f"hidden must be fp32, bf16, fp16 or fp64, got {hidden.dtype}")
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.dtype != hidden.dtype:
            raise TypeError(
                f"{name} must have the dtype of hidden, {hidden.dtype}, got {tensor.dtype}; "
                "convert one of them or use torch.autocast"
            )
    if weight.dim() != 2 or weight.shape[0] == 0:
        raise ValueError(f"weight must be [V, H] with V > 0, got shape {tuple(weight.shape)}")
    if hidden.dim() == 0 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"hidden must be [..., {weight.shape[1]}] for weight {tuple(weight.shape)}, got shape "
            f"{tuple(hidden.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must be [{weight.shape[0]}], got shape {tuple(bias.shape)}")
    if workspace_mib <= 0:
        raise ValueError(f"workspace_mib must be positive, got {workspace_mib}")
    check_selection(tokens, mask, hidden.shape[:-1], of="hidden")
    check_scale(temperature, logit_softcap, tokens.shape)
    temperatures = temperature if isinstance(temperature, Tensor) else None
    check_devices(
        hidden=hidden,
        weight=weight,
        tokens=tokens,
        mask=mask,
        bias=bias,
        temperature=temperatures,
    )
    backend = resolve_backend(backend, hidden.device)
    if torch.compiler.is_compiling():
        if temperatures is None:  # as a number it would be compiled in, each value anew
            temperatures = temperature * torch.ones((), dtype=torch.float64, device=weight.device)
        log_probs, entropies, _, _ = linear_log_probs_op(
            hidden,
            weight,
            bias,
            tokens,
            mask,
            temperatures,
            1.0,
            entropy,
            float(logit_softcap or 0),
            workspace_mib,
            backend,
        )
        return log_probs, entropies if entropy else None
    return LinearLogProbs.apply(
        hidden,
        weight,
        bias,
        tokens,
        mask,
        temperature,
        entropy,
        logit_softcap,
        workspace_mib,
        backend,
    )
