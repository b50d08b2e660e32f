"""The replay buffer as GRPOTrainer uses it and keeps it in checkpoints."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from pathlib import Path

from tensordict import TensorDictBase
from torchrl.data import RayReplayBuffer, ReplayBuffer
from torchrl.data.utils import DEVICE_TYPING


class BufferFeed:
    """The replay buffer as the trainer uses it: each collected batch in once, micro-batches out."""

    def __init__(
        self,
        buffer: ReplayBuffer,
        *,
        iterate: bool,
        endless: bool,
        device: DEVICE_TYPING | None,
    ) -> None:
        self.buffer = buffer
        self.iterate = iterate
        self.endless = endless
        self.device = device
        self._is_written = False
        self._pass: Iterator[TensorDictBase] = iter(())

    def new_batch(self) -> None:
        """A batch has been collected: the next `extend` writes."""
        self._is_written = False

    def extend(self, batch: TensorDictBase) -> TensorDictBase:
        """Write the collected batch, in its first epoch."""
        if not self._is_written:
            self._is_written = True
            self.buffer.extend(batch.cpu())
        return batch

    def start_epoch(self) -> int:
        """Begin a pass over the buffer; the most micro-batches that it has."""
        if not self.endless:
            _end_pass_in_actor(self.buffer)
            self._pass = iter(self.buffer)
        return math.ceil(len(self.buffer) / self.buffer.batch_size)

    def sample(self, batch: TensorDictBase) -> TensorDictBase:
        """The next micro-batch. Raises StopIteration at the end of a pass that is not endless."""
        if not self.iterate:
            sample = self.buffer.sample()
        else:
            sample = next(self._pass, None)
            if sample is None and self.endless:
                self._pass = iter(self.buffer)
                sample = next(self._pass, None)
            if sample is None:
                raise StopIteration
        return sample if self.device is None else sample.to(self.device)


class BufferCheckpoint:
    """A replay buffer on disk; also one that has not been written to, which torchrl refuses."""

    def __init__(self, buffer: ReplayBuffer) -> None:
        self.buffer = buffer

    def dump(self, path: Path) -> None:
        """Save to the directory `path`."""
        try:
            self.buffer.dumps(path)
        except RuntimeError as error:
            if "non-initialized storage" not in str(error):
                raise
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir()
            (path / "never_written").touch()

    def load(self, path: Path) -> None:
        """Restore what `dump` saved."""
        if not (path / "never_written").exists():
            self.buffer.loads(path)

    def _torchrl_checkpoint_detach_from_load_path(self) -> None:
        detach = getattr(self.buffer, "_torchrl_checkpoint_detach_from_load_path", None)
        if detach is not None:
            detach()


def set_batch_size(buffer: ReplayBuffer, batch_size: int) -> None:
    """Also of a buffer in an actor."""
    if isinstance(buffer, RayReplayBuffer):
        import ray

        ray.get(buffer._rb._setattr.remote("_batch_size", batch_size))
    else:
        buffer._batch_size = batch_size


def _end_pass_in_actor(buffer: ReplayBuffer) -> None:
    """A RayReplayBuffer's iterators share one in its actor, which would end the next pass early."""
    if isinstance(buffer, RayReplayBuffer):
        import ray

        ray.get(buffer._rb._setattr.remote("_iterator", None))
