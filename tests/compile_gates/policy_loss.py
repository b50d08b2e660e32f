"""The compiled forms of policy_loss' kernels: plain and with every term, by objective and dtype."""

import triton.language as tl

from grpo_kernels.policy_loss import triton as kernels

from .harness import Configuration

ROW_MAJOR = ("i64:16", 1)
PER_ROW = ("i64", "i64")  # advantages [B, 1], broadcast


def _compute_type(dtype: str) -> tl.dtype:
    return tl.float64 if dtype == "fp64" else tl.float32


def _form(dtype: str, everything: bool, objective: str, semantics: str, block: int):
    """Arguments and constants that the two kernels share."""
    accumulator = "*fp64" if dtype == "fp64" else "*fp32"
    number = accumulator if dtype == "fp64" else "fp32"  # fp64 takes its numbers by pointer
    pointer = f"*{dtype}"
    extra, extra_strides = (pointer, ROW_MAJOR) if everything else (None, None)
    coefficient = number if everything else None
    arguments = {
        "inputs": (pointer, pointer, accumulator, "*i1", extra, extra),
        "strides": (ROW_MAJOR, ROW_MAJOR, PER_ROW, ROW_MAJOR, extra_strides, extra_strides),
        "saved_ptr": accumulator,
        "B": "i32",
        "T": "i32:16",
        "segments": "i32",
    }
    if everything:
        for name in ("kl_mask_threshold", "kl_to_ref_coeff", "kl_to_inference_coeff"):
            arguments[name] = coefficient
        arguments["entropy_coeff"] = coefficient
        arguments["log_ratio_cap"] = coefficient
    constants = {
        "OBJECTIVE": objective,
        "TORCHRL": semantics == "torchrl",
        "DTYPE": _compute_type(dtype),
        "BLOCK": block,
    }
    return arguments, constants, accumulator


def _launch(dtype: str, block: int) -> dict:
    """How the launcher asks for it, and what must come of it."""
    return {
        "num_warps": kernels.num_warps(block, hip=False),
        "hip_num_warps": kernels.num_warps(block, hip=True),
        "options": {"maxnreg": kernels.MAX_REGISTERS[_compute_type(dtype)]},
        "load_bytes": 16 if block == kernels.BLOCK else 8,
    }


def _name(kernel: str, *parts: object) -> str:
    return " ".join(map(str, (kernel, *parts)))


def _forward(
    dtype: str,
    everything: bool,
    objective: str = "grpo",
    semantics: str = "torchrl",
    aggregation: str = "token_mean",
    block: int = kernels.BLOCK,
) -> Configuration:
    arguments, constants, accumulator = _form(dtype, everything, objective, semantics, block)
    others = (accumulator if everything else None,) * 3
    arguments |= {
        "losses": (accumulator, *others),
        "metrics": (*(accumulator,) * 3, *others),
        "sums_ptr": accumulator,
        "finished_ptr": "*i32",
        "clip_low": "*fp32",  # scheduled bounds
        "clip_high": "*fp32",
    }
    constants |= {
        "AGGREGATION": aggregation,
        "ENTROPY_OF_PADS": everything,
        "MERGE": kernels.MERGE[block],
    }
    terms = "everything" if everything else "plain"
    return Configuration(
        _name("forward", dtype, terms, objective, semantics, aggregation, f"block={block}"),
        kernels._forward_kernel,
        arguments,
        constants,
        **_launch(dtype, block),
        fp64=dtype == "fp64",
    )


def _backward(
    dtype: str,
    everything: bool,
    objective: str = "grpo",
    semantics: str = "torchrl",
    per_token: bool = False,
    block: int = kernels.BLOCK,
) -> Configuration:
    arguments, constants, accumulator = _form(dtype, everything, objective, semantics, block)
    others = (accumulator if everything else None,) * 3
    strides = ROW_MAJOR if per_token else None
    other_strides = strides if everything else None
    gradient = f"*{dtype}"
    arguments |= {
        "upstream": (accumulator, *others),
        "upstream_strides": (strides, other_strides, other_strides, other_strides),
        "gradients": (gradient, None, gradient if everything else None),
    }
    terms = "everything" if everything else "plain"
    upstream = "upstream per token" if per_token else "one upstream"
    return Configuration(
        _name("backward", dtype, terms, objective, semantics, upstream, f"block={block}"),
        kernels._backward_kernel,
        arguments,
        constants,
        **_launch(dtype, block),
        store_bytes=16 if block == kernels.BLOCK else 8,
        fp64=dtype == "fp64",
    )


def configurations() -> list[Configuration]:
    """Every dtype, objective and aggregation once, not their product."""
    return [
        _forward("fp32", everything=False),
        _forward("fp32", everything=True),
        _forward("bf16", everything=True, objective="cispo", semantics="corrected"),
        _forward("fp32", everything=True, objective="clipped_ratio", aggregation="none"),
        _forward("fp32", True, semantics="corrected", aggregation="prompt_mean"),
        _forward("fp32", everything=True, block=kernels.SMALL_BLOCK),
        _forward("fp64", everything=True),
        _backward("fp32", everything=False),
        _backward("fp32", everything=True),
        _backward("bf16", everything=True, objective="cispo", semantics="corrected"),
        _backward("fp32", True, semantics="corrected", per_token=True),
        _backward("fp32", everything=True, block=kernels.SMALL_BLOCK),
        _backward("fp64", everything=True),
    ]
