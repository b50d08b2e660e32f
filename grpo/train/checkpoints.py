"""The checkpoints of a run: they say whether they are whole, and ranks resume from a common one."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchrl.checkpoint import Checkpoint, CheckpointRotation

from ..trainer import GRPOTrainer
from .errors import InputError, blamed_on

SEAL = "seal.json"
BLOCK = 1 << 24
ROOM_BESIDE = 1 << 20  # for what is not tensors
# Equal on all ranks at the same point of a run.
SHARED = ("loss_module", "optimizer")


class SealedCheckpoint(Checkpoint):
    """A checkpoint directory with the length and CRC-32 of each file in it.

    A file that was cut short would load without an error.
    """

    def save(self, path: str | Path, **options: Any) -> Path:
        """Save, then seal what was saved. Raises OSError where the disk lacks the room."""
        _check_room(Path(path).parent, self.components)
        directory = super().save(path, **options)
        (directory / SEAL).write_text(json.dumps(_contents(directory), indent=1) + "\n")
        return directory


def make_rotation(directory: Path, ranks: int) -> CheckpointRotation:
    """Keeps as many checkpoints as it takes for the ranks to have one in common.

    A rank that dies can be one save behind the others, which then save once more as they stop.
    """
    return CheckpointRotation(directory, keep_last=2 if ranks == 1 else 3)


def load_latest(trainer: GRPOTrainer, output: Path, warn: Callable[[str], None]) -> None:
    """Load the latest checkpoint that every rank has whole; remove damaged and later ones.

    Raises InputError where there is none.
    """
    rotation = trainer.checkpoint_rotation
    what = f"--resume {output}"
    for unfinished in rotation.directory.glob(".*.stage-*"):
        shutil.rmtree(unfinished, ignore_errors=True)
    # By step and weights: ranks cut off within a step may have ended on either side of it.
    found: dict[tuple[int, int], Path] = {}
    checkpoints = _checkpoints(rotation.directory)
    for step, path in checkpoints:
        contents = _read_contents(path)
        if contents is not None:
            found[step, _fingerprint(contents)] = path
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
        raise InputError(f"{what}: no checkpoint in {where}")
    latest = max(common)
    with blamed_on(what):
        trainer.load_from_file(found[latest])
    for step, path in checkpoints:
        if step > latest[0] or path not in found.values():
            shutil.rmtree(path)


def _read_contents(directory: Path) -> dict[str, list[int]] | None:
    """Its files as `_contents` gives them; None if they are not those that were sealed."""
    try:
        contents = _contents(directory)
        return contents if contents == json.loads((directory / SEAL).read_text()) else None
    except (OSError, ValueError, RecursionError):
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


def _checkpoints(directory: Path) -> list[tuple[int, Path]]:
    """Step and directory of each, in order."""
    if not directory.is_dir():
        return []
    paths = [path for path in directory.iterdir() if path.is_dir()]
    named = [(re.fullmatch(r"checkpoint-([0-9]+)", path.name), path) for path in paths]
    return sorted((int(name[1]), path) for name, path in named if name)


def _check_room(directory: Path, components: Mapping[str, Any]) -> None:
    """Raise OSError where the disk has no room: writing a mapped file would end the process."""
    states = [c.state_dict() for c in components.values() if hasattr(c, "state_dict")]
    leaves = torch.utils._pytree.tree_leaves(states)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    needed = sum(tensor.numel() * tensor.element_size() for tensor in tensors) + ROOM_BESIDE
    if shutil.disk_usage(directory).free < needed:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(directory))


def _fingerprint(contents: dict[str, list[int]]) -> int:
    """Of what is equal on all ranks."""
    shared = {
        name: entry
        for name, entry in contents.items()
        if any(f"-{component}/" in name for component in SHARED)
    }
    return zlib.crc32(json.dumps(shared, sort_keys=True).encode())
