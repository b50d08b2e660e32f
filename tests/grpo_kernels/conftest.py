"""Every test of an operation runs on every backend that can take CPU tensors here."""

import pytest
import torch

from grpo_kernels import backends


@pytest.fixture(params=["eager", "cpu", "triton"])
def backend(request):
    if request.param == "triton":
        reason = backends.why_not("triton", torch.device("cpu"))
        if reason is not None:  # triton is absent, or a GPU is present and kernels are compiled
            pytest.skip(reason)
    return request.param
