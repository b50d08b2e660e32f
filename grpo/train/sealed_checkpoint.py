"""Checkpoints that say whether they are whole: a file cut short would load without an error."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

from torchrl.checkpoint import Checkpoint

SEAL = "seal.json"
BLOCK = 1 << 24


class SealedCheckpoint(Checkpoint):
    """A checkpoint directory with the length and CRC-32 of each file in it."""

    def save(self, path: str | Path, **options: Any) -> Path:
        """Save, then seal what was saved."""
        directory = super().save(path, **options)
        (directory / SEAL).write_text(json.dumps(_contents(directory), indent=1) + "\n")
        return directory


def is_whole(directory: Path) -> bool:
    """Whether the files are those that were saved; true of a checkpoint without a seal."""
    try:
        sealed = json.loads((directory / SEAL).read_text())
        return sealed == _contents(directory)
    except FileNotFoundError:
        return not (directory / SEAL).exists()
    except (OSError, ValueError):
        return False


def _contents(directory: Path) -> dict[str, list[int]]:
    files = (path for path in sorted(directory.rglob("*")) if path.is_file() and path.name != SEAL)
    return {
        path.relative_to(directory).as_posix(): [path.stat().st_size, _crc(path)] for path in files
    }


def _crc(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            value = zlib.crc32(block, value)
    return value
