"""Every test of an operation runs on every backend."""

import pytest


@pytest.fixture(params=["eager", "cpu", "triton"])
def backend(request):
    return request.param
