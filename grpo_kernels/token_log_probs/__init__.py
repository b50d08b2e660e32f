"""Log-probability of a token and entropy of its distribution, in one read of the logits."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..backends import Backend, resolve_backend
from .op import TokenLogProbs, token_log_probs_op

__all__ = ["token_log_probs"]

LOGITS_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
TOKEN_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def check_selection(tokens: Tensor, mask: Tensor | None, shape: torch.Size, of: str) -> None:
    """Raise unless tokens and mask fit rows of `shape`, the leading shape of argument `of`."""
    if tokens.dtype not in TOKEN_DTYPES:
        raise TypeError(f"tokens must be an integer tensor, got {tokens.dtype}")
    if tokens.shape != shape:
        raise ValueError(
            f"tokens must have the shape of {of} without its last dimension, {tuple(shape)}, got "
            f"{tuple(tokens.shape)}"
        )
    if mask is None:
        return
    if mask.dtype != torch.bool:
        raise TypeError(f"mask must be a bool tensor, got {mask.dtype}")
    if mask.shape != shape:
        raise ValueError(
            f"mask must have the shape of tokens, {tuple(shape)}, got {tuple(mask.shape)}"
        )


def check_scale(
    temperature: float | Tensor, logit_softcap: float | None, shape: torch.Size
) -> None:
    """Raise unless temperature and logit_softcap are positive, and broadcast to `shape`."""
    if isinstance(temperature, Tensor):
        if temperature.requires_grad:
            raise ValueError("temperature is not differentiable, got a tensor that requires grad")
        dims = zip(reversed(temperature.shape), reversed(shape), strict=False)
        if temperature.dim() > len(shape) or any(size not in (1, of) for size, of in dims):
            raise ValueError(
                f"temperature must be a number or broadcast to the shape of tokens, "
                f"{tuple(shape)}, got shape {tuple(temperature.shape)}"
            )
    elif not 0 < temperature < math.inf:
        raise ValueError(f"temperature must be positive and finite, got {temperature}")
    if logit_softcap is not None and not 0 < logit_softcap < math.inf:
        raise ValueError(f"logit_softcap must be None or positive and finite, got {logit_softcap}")


def check_devices(**tensors: Tensor | None) -> None:
    """Raise unless all tensors are on the first one's device."""
    (first_name, first), *others = tensors.items()
    for name, tensor in others:
        if tensor is not None and tensor.device != first.device:
            raise ValueError(
                f"{name} must be on the device of {first_name}, {first.device}, got {tensor.device}"
            )


def token_log_probs(
    logits: Tensor,
    tokens: Tensor,
    mask: Tensor | None = None,
    *,
    temperature: float | Tensor = 1.0,
    entropy: bool = True,
    logit_softcap: float | None = None,
    overwrite_logits: bool = False,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of each token, and entropy, under softmax(logits / temperature).

    Args:
        logits: [..., V] in fp32, bf16, fp16 or fp64, any strides; only rows whose elements lie
            more than one element apart are copied.
        tokens: [...] integers in [0, V) wherever the mask is true.
        mask: [...] bool. A row where it is false is not read, whatever stands there; its outputs
            and its gradient are exactly 0.
        temperature: what logits are divided by: a number, or a tensor that broadcasts to [...].
            A logit scale s is a temperature of 1 / s. Not differentiable.
        entropy: whether to compute the entropy.
        logit_softcap: c for logits = c tanh(logits / c), before the temperature.
        overwrite_logits: let backward write the gradient over the logits' memory instead of
            allocating as much again. The logits must not be used after backward; a second
            backward raises. torch.compile plans memory itself and ignores it.
        backend: see grpo_kernels.backends.

    Returns:
        log_probs [...] and entropy [...] (None if not asked), in nats, fp32 (fp64 for fp64
        logits). Both are differentiable once with respect to logits. NaN or +inf in a row that
        the mask keeps gives NaN; -inf is a token of probability 0.

    Raises:
        RuntimeError: a token out of range, on a CPU. A GPU gives NaN, so as not to wait for it.
        TypeError, ValueError: an argument of a wrong dtype, shape, device or value.
    """
    if logits.dtype not in LOGITS_DTYPES:
        raise TypeError(f"logits must be fp32, bf16, fp16 or fp64, got {logits.dtype}")
    if logits.dim() == 0 or logits.shape[-1] == 0:
        raise ValueError(f"logits must be [..., V] with V > 0, got shape {tuple(logits.shape)}")
    check_selection(tokens, mask, logits.shape[:-1], of="logits")
    check_scale(temperature, logit_softcap, tokens.shape)
    temperatures = temperature if isinstance(temperature, Tensor) else None
    check_devices(logits=logits, tokens=tokens, mask=mask, temperature=temperatures)
    backend = resolve_backend(backend, logits.device)
    if torch.compiler.is_compiling():
        if temperatures is None:  # as a number it would be compiled in, each value anew
            temperatures = temperature * torch.ones((), dtype=torch.float64, device=logits.device)
        log_probs, entropies, _, _ = token_log_probs_op(
            logits,
            tokens,
            mask,
            temperatures,
            1.0,
            entropy,
            float(logit_softcap or 0),
            backend,
        )
        return log_probs, entropies if entropy else None
    base = logits if logits._base is None else logits._base
    if overwrite_logits and base.requires_grad and base.is_leaf:
        raise ValueError(
            "overwrite_logits must not overwrite a leaf that requires grad, or a view of one"
        )
    return TokenLogProbs.apply(
        logits, tokens, mask, temperature, entropy, logit_softcap, overwrite_logits, backend
    )
