"""Rewrites tables/*.json: python -m tests.compile_gates.update [--print operation]."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path

TABLES = Path(__file__).parent / "tables"
OPERATIONS = ("policy_loss", "token_log_probs")


def current(operation: str) -> dict:
    from .harness import table

    return table(importlib.import_module(f"{__package__}.{operation}").configurations())


def main() -> None:
    os.environ.pop("TRITON_INTERPRET", None)  # before triton is imported
    if "--print" in sys.argv:
        json.dump(current(sys.argv[sys.argv.index("--print") + 1]), sys.stdout)
        return
    TABLES.mkdir(exist_ok=True)
    for operation in OPERATIONS:
        text = json.dumps(current(operation), indent=1)
        (TABLES / f"{operation}.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
