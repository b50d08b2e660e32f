"""TorchRL adds returns with Python's sum(), which compensates from Python 3.12 on."""

import pytest
import torchrl.objectives.llm.grpo as torchrl_module


def left_to_right(numbers):
    total = 0
    for number in numbers:
        total += number
    return total


@pytest.fixture(autouse=True, scope="session")
def plain_sums_in_torchrl():
    torchrl_module.sum = left_to_right
    yield
    del torchrl_module.sum
