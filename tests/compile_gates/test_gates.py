"""What the Triton kernels compile to, against the committed tables and against what must hold."""

import functools
import json
import os
import subprocess
import sys

import pytest
import triton

from .update import OPERATIONS, TABLES


def committed(operation: str) -> dict:
    return json.loads((TABLES / f"{operation}.json").read_text())


@functools.cache
def compiled(operation: str) -> dict:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-m", "tests.compile_gates.update", "--print", operation],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(result.stdout)


def pairs():
    return [(operation, name) for operation in OPERATIONS for name in committed(operation)]


def test_tables_name_every_configuration():
    for operation in OPERATIONS:
        assert list(compiled(operation)) == list(committed(operation)), (
            "run python -m tests.compile_gates.update"
        )


@pytest.mark.parametrize(("operation", "name"), pairs())
def test_no_spills_no_fp64_and_wide_accesses(operation, name):
    entry = compiled(operation)[name]
    requires = entry["requires"]
    for target in entry.keys() - {"requires"}:
        facts = entry[target]
        assert facts["spills"] == 0, target
        assert facts["load_bytes"] >= requires["load_bytes"], target
        assert facts["store_bytes"] >= requires["store_bytes"], target
        if not requires["fp64"]:
            assert facts["fp64"] == 0, target


@pytest.mark.skipif(
    not triton.__version__.startswith("3.7."), reason="the tables are of triton 3.7"
)
@pytest.mark.parametrize(("operation", "name"), pairs())
def test_nothing_differs_from_the_table(operation, name):
    old, new = committed(operation)[name], compiled(operation)[name]
    changes = [
        f"{target} {fact}: {old[target][fact]} -> {new[target][fact]}"
        for target in old
        for fact in old[target]
        if old[target][fact] != new[target][fact]
    ]
    assert not changes, (
        f"{name}: {'; '.join(changes)}. If meant, run python -m tests.compile_gates.update"
    )
