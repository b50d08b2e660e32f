"""The checkpoints of a run: they say whether they are whole, and ranks resume from a common one."""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torchrl.checkpoint import Checkpoint, CheckpointError, CheckpointRotation

from ..trainer import GRPOTrainer
from .errors import InputError, first_line

SEAL = "seal.json"
BLOCK = 1 << 24
# Equal on all ranks at the same point of a run.
SHARED = ("loss_module", "optimizer")


class SealedCheckpoint(Checkpoint):
    """A checkpoint directory with the length and CRC-32 of each file in it.

    A file that was cut short would load without an error.
    """

    def save(self, path: str | Path, **options: Any) -> Path:
        """Save, then seal what was saved."""
        directory = super().save(path, **options)
        (directory / SEAL).write_text(json.dumps(_contents(directory), indent=1) + "\n")
        return directory


def make_rotation(directory: Path, ranks: int) -> CheckpointRotation:
    """Keeps as many checkpoints as it takes for the ranks to have one in common.

    A rank that dies can be one save behind the others, which then save once more as they stop.
    """
    return CheckpointRotation(directory, keep_last=2 if ranks == 1 else 3)


def load_latest(trainer: GRPOTrainer, warn: Callable[[str], None]) -> None:
    """Load the latest checkpoint that every rank has whole, and remove what is later.

    Raises InputError where there is none.
    """
    rotation = trainer.checkpoint_rotation
    for unfinished in rotation.directory.glob(".*.stage-*"):
        shutil.rmtree(unfinished, ignore_errors=True)
    # By step and weights: ranks cut off within a step may have ended on either side of it.
    found: dict[tuple[int, int], Path] = {}
    for path in rotation.checkpoints():
        contents = _read_contents(path)
        if contents is not None:
            found[_step(path), _fingerprint(contents)] = path
        else:
            warn(f"warning: {path} is damaged; the one before it is taken")
    common = set(found)
    if trainer.process_group is not None:
        everyones: list[set[tuple[int, int]]] = [set()] * trainer.world_size
        dist.all_gather_object(everyones, common, group=trainer.process_group)
        common = set.intersection(*everyones)
    if not common:
        where = rotation.directory
        if trainer.process_group is not None:
            where = f"{where} that all ranks have"
        raise InputError(f"--resume {rotation.directory.parent}: no checkpoint in {where}")
    latest = found[max(common)]
    try:
        trainer.load_from_file(latest)
    except CheckpointError as error:
        raise InputError(f"--resume {rotation.directory.parent}: {first_line(error)}") from None
    for path in rotation.checkpoints():
        if _step(path) > _step(latest):
            shutil.rmtree(path)


def _read_contents(directory: Path) -> dict[str, list[int]] | None:
    """Its files as `_contents` gives them; None if they are not those that were saved.

    Without a seal they pass: a run that is killed before it seals has moved a whole one into place.
    """
    seal = directory / SEAL
    try:
        contents = _contents(directory)
        return contents if not seal.exists() or contents == json.loads(seal.read_text()) else None
    except (OSError, ValueError):
        return None


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


def _step(path: Path) -> int:
    return int(path.name.split("-")[-1])


def _fingerprint(contents: dict[str, list[int]]) -> int:
    """Of what is equal on all ranks."""
    shared = {
        name: entry
        for name, entry in contents.items()
        if any(f"-{component}/" in name for component in SHARED)
    }
    return zlib.crc32(json.dumps(shared, sort_keys=True).encode())
