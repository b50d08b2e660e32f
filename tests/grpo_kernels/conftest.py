"""Every test of an operation runs on every backend that can take CPU tensors here."""

import pytest

from grpo_kernels import backends


@pytest.fixture(params=["eager", "cpu", "triton"])
def backend(request):
    if request.param == "triton" and not backends.triton_interprets:
        pytest.skip("a GPU is present: the Triton kernels are compiled, not interpreted")
    return request.param
