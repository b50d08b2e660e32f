"""What cannot be honoured raises, naming the argument, what it got and what is accepted."""

import math

import pytest
import torch

from grpo_kernels import policy_loss

X = torch.zeros(2, 3)

WRONG_VALUES = [
    ({"objective": "gppo"}, "objective must be one of .*grpo.*cispo.*gppo"),
    ({"aggregation": "mean"}, "aggregation must be one of .*token_mean.*mean"),
    ({"semantics": "fixed"}, "semantics must be one of .*torchrl.*corrected.*fixed"),
    ({"backend": "cuda"}, "backend must be one of .*triton.*cuda"),
    ({"clip_low": -0.1}, "clip_low.*-0.1"),
    ({"clip_high": -0.1}, "clip_high.*-0.1"),
    ({"clip_low": math.nan}, "clip_low.*nan"),
    ({"clip_high": math.nan}, "clip_high.*nan"),
    ({"clip_low": 1.0}, "clip_low must be < 1.*1.0"),
    ({"clip_low": torch.tensor([0.1, 0.2])}, "clip_low.*one element.*2"),
    ({"clip_high": torch.tensor(1)}, "clip_high.*floating point.*int64"),
    ({"kl_mask_threshold": 0.0}, "kl_mask_threshold.*0.0"),
    ({"kl_mask_threshold": math.nan}, "kl_mask_threshold.*nan"),
    ({"log_ratio_cap": -1.0}, "log_ratio_cap.*-1.0"),
    ({"kl_to_inference_coeff": math.inf}, "kl_to_inference_coeff.*inf"),
    ({"entropy_coeff": math.nan, "entropy": X}, "entropy_coeff.*nan"),
    ({"kl_to_ref_coeff": math.nan, "ref_log_probs": X}, "kl_to_ref_coeff.*nan"),
    ({"kl_to_ref_coeff": 1.0}, "kl_to_ref_coeff needs ref_log_probs"),
    ({"entropy_coeff": 1.0}, "entropy_coeff needs entropy"),
    ({"normaliser": 0}, "normaliser.*0"),
    ({"normaliser": math.inf}, "normaliser.*inf"),
    ({"normaliser": torch.ones(2)}, "normaliser.*one element.*2"),
    ({"log_probs": torch.zeros(3)}, r"log_probs must be \[B, T\].*3"),
    ({"log_probs": torch.zeros(2, 3, 1)}, r"log_probs must be \[B, T\].*3, 1"),
    ({"old_log_probs": torch.zeros(2, 4)}, r"old_log_probs.*\(2, 3\).*\(2, 4\)"),
    ({"advantages": torch.zeros(3)}, r"advantages.*\[B\]"),
    ({"advantages": torch.zeros(1, 3)}, r"advantages.*\(1, 3\)"),
    ({"mask": torch.ones(2, 1, dtype=torch.bool)}, r"mask.*\(2, 1\)"),
    ({"mask": torch.ones(2, 3)}, r"mask must be bool.*float32.*mask\.bool\(\)"),
    ({"ref_log_probs": torch.zeros(3, 2)}, r"ref_log_probs.*\(3, 2\)"),
    ({"entropy": torch.zeros(6)}, r"entropy.*\(6,\)"),
    ({"log_probs": torch.zeros(2, 3, dtype=torch.int64)}, "log_probs must be fp32.*int64"),
    ({"old_log_probs": torch.zeros(2, 3, dtype=torch.complex64)}, "old_log_probs.*complex64"),
    ({"advantages": torch.zeros(2, dtype=torch.int64)}, "advantages.*int64"),
    ({"old_log_probs": torch.zeros(2, 3, device="meta")}, "old_log_probs.*cpu.*meta"),
    ({"mask": torch.ones(2, 3, device="meta", dtype=torch.bool)}, "mask.*cpu.*meta"),
]


@pytest.mark.parametrize(("change", "message"), WRONG_VALUES, ids=[m for _, m in WRONG_VALUES])
def test_a_wrong_argument_is_named(change, message):
    arguments = {"log_probs": X, "old_log_probs": X, "advantages": X, **change}
    with pytest.raises((ValueError, TypeError), match=message):
        policy_loss(**arguments)


@pytest.mark.parametrize("name", ["old_log_probs", "advantages"])
def test_an_input_that_is_not_differentiable_may_not_require_a_gradient(name):
    arguments = {"log_probs": X, "old_log_probs": X, "advantages": X}
    arguments[name] = torch.zeros(2, 3, requires_grad=True)
    with pytest.raises(RuntimeError, match=rf"{name} requires grad.*{name}\.detach\(\)"):
        policy_loss(**arguments)


def test_an_unknown_keyword_raises():
    with pytest.raises(TypeError, match="normalizer"):
        policy_loss(X, X, X, normalizer=3)


def test_the_extremes_that_are_accepted(backend):
    output = policy_loss(
        X,
        X,
        X,
        clip_low=0,
        clip_high=math.inf,
        kl_mask_threshold=math.inf,
        log_ratio_cap=math.inf,
        kl_to_inference_coeff=0.0,
        backend=backend,
    )
    assert output.loss_objective == 0
    assert output.loss_kl_to_inference == 0
