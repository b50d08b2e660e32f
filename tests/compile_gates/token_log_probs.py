"""The compiled forms of token_log_probs' kernels. The vocabulary and all strides are run-time
arguments: one form serves V = 151936 and 151937 alike."""

from grpo_kernels.token_log_probs import triton as kernels

from .harness import Configuration

ITEM_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8}


def _form(dtype: str, softcap: float | None, mask: bool, per_row: bool):
    accumulator = "*fp64" if dtype == "fp64" else "*fp32"
    vector = kernels.VECTOR_BYTES // ITEM_BYTES[dtype]
    arguments = {
        "logits_ptr": f"*{dtype}",
        "tokens_ptr": "*i64",
        "max_ptr": accumulator,
        "log_sum_ptr": accumulator,
        "columns": "i32",
        "batch_stride": "i64",
        "column_stride": "i32",
        "first_element": "i32",
        "vocab": "i32",
        "temperature_stride": "i32",
        "inverse_temperature": "fp32",
    }
    if mask:
        arguments["mask_ptr"] = "*i1"
    if per_row:
        arguments["temperature_ptr"] = accumulator
    constants = {"softcap": softcap, "VECTOR": vector, "LANES": kernels.LANES}
    return arguments, constants, accumulator


def _forward(dtype, *, softcap=None, entropy=True, mask=True, splits=1) -> Configuration:
    arguments, constants, accumulator = _form(dtype, softcap, mask, per_row=softcap is not None)
    arguments["log_probs_ptr"] = accumulator
    if entropy:
        arguments["entropy_ptr"] = accumulator
    if splits > 1:
        arguments["parts_ptr"] = accumulator
    return Configuration(
        f"forward {dtype} softcap={softcap} entropy={entropy} mask={mask} splits={splits}",
        kernels.forward_kernel,
        arguments,
        {**constants, "SPLITS": splits},
        num_warps=kernels.NUM_WARPS,
        load_bytes=16,
        fp64=dtype == "fp64",
    )


def _merge(dtype) -> Configuration:
    arguments, constants, accumulator = _form(dtype, None, mask=True, per_row=False)
    arguments |= dict.fromkeys(("log_probs_ptr", "entropy_ptr", "parts_ptr"), accumulator)
    return Configuration(
        f"merge {dtype}",
        kernels.merge_kernel,
        arguments,
        {"softcap": constants["softcap"], "SPLITS": kernels.MAX_SPLITS},
        num_warps=1,
        fp64=dtype == "fp64",
    )


def _backward(dtype, *, softcap=None, entropy=True, mask=True, aligned=True) -> Configuration:
    arguments, constants, accumulator = _form(dtype, softcap, mask, per_row=softcap is not None)
    arguments |= {
        "log_prob_slope_ptr": accumulator,
        "grad_ptr": f"*{dtype}",
        "programs_per_row": "i32",
        "grad_batch_stride": "i64",
        "grad_column_stride": "i32",
        "grad_first_element": "i32",
        "log_prob_slope_batch_stride": "i32",
        "log_prob_slope_column_stride": "i32",
        "entropy_slope_batch_stride": "i32",
        "entropy_slope_column_stride": "i32",
    }
    if entropy:
        arguments |= {"entropy_slope_ptr": accumulator, "entropy_ptr": accumulator}
    constants |= {"SAME_ALIGNMENT": aligned, "TILES": kernels.TILES_PER_PROGRAM}
    return Configuration(
        f"backward {dtype} softcap={softcap} entropy={entropy} mask={mask} aligned={aligned}",
        kernels.backward_kernel,
        arguments,
        constants,
        num_warps=kernels.NUM_WARPS,
        # Upstream gradients come as views of any alignment.
        unaligned=("log_prob_slope_ptr", "entropy_slope_ptr"),
        load_bytes=16,
        store_bytes=16 if aligned else 0,
        fp64=dtype == "fp64",
    )


def configurations() -> list[Configuration]:
    # fp16 compiles to what bf16 does but for the conversions.
    return [
        _forward("fp32"),
        _forward("bf16"),
        _forward("fp64"),
        _forward("bf16", entropy=False, mask=False),
        _forward("bf16", splits=kernels.MAX_SPLITS),
        _forward("fp32", softcap=30.0),
        _merge("fp32"),
        _backward("fp32"),
        _backward("bf16"),
        _backward("fp64"),
        _backward("bf16", entropy=False, mask=False, aligned=False),
        _backward("bf16", softcap=30.0),
    ]
