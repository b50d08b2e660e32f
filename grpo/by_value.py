"""Trajectories as bytes.

Between processes torch sends a tensor as a handle to shared memory: every queued one holds a file
descriptor open, and reading it needs the process that sent it to be alive. A queue that outlives
its writers needs the values themselves; and of a view, only what it shows.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from tensordict import MemoryMappedTensor

_PLAIN = (torch.Tensor, torch.nn.Parameter, MemoryMappedTensor)


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any):
        if type(obj) not in _PLAIN or obj.is_nested or obj.layout is not torch.strided:
            return NotImplemented
        flat = obj.detach().cpu().contiguous().reshape(-1)
        data = bytearray(flat.view(torch.uint8).numpy()) if flat.numel() else bytearray()
        return _tensor, (data, obj.dtype, tuple(obj.shape), str(obj.device))


class _CPUUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str):
        if module == __name__ and name == "_tensor":
            return _tensor_on_cpu
        return super().find_class(module, name)


def to_bytes(obj: Any) -> bytes:
    """`obj` with all tensors in it by value."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(obj)
    return buffer.getvalue()


def from_bytes(data: bytes, *, to_device: bool = True) -> Any:
    """The object again, its tensors on the devices they came from or on the CPU."""
    if to_device:
        return pickle.loads(data)
    return _CPUUnpickler(io.BytesIO(data)).load().clear_device_()


def _tensor_on_cpu(data: bytearray, dtype: torch.dtype, shape: tuple, device: str) -> torch.Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype).reshape(shape)


def _tensor(data: bytearray, dtype: torch.dtype, shape: tuple, device: str) -> torch.Tensor:
    return _tensor_on_cpu(data, dtype, shape, device).to(device)
