# SPDX-License-Identifier: Apache-2.0
"""Copies the state to save to CPU memory, which is the only part of a save that training waits for.

Accepts only values that `torch.load(weights_only=True)` can load, so that every checkpoint can be read.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ddpilot.checkpoint.arena import Arena, aligned, copy_bytes
from ddpilot.checkpoint.window import Window
from ddpilot.errors import CheckpointError

_LEAVES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_MAPPINGS = (dict, OrderedDict, Counter)


class Snapshots:
    """Makes copies, one at a time, in reused memory: each `take` overwrites the result of the previous one."""

    def __init__(self) -> None:
        self._arena = Arena()
        self._window = Window()

    def reserve(self, num_bytes: int) -> None:
        """Preallocate memory, so that the first `take` is as fast as later ones."""
        self._arena.reserve(num_bytes)

    def take(self, tree: Mapping[str, Any]) -> dict[str, Any]:
        """Return a copy of `tree` on the CPU, detached.

        `tree`: nested dicts, lists, tuples and sets of numbers, strings and dense tensors. Identical tensors
        are copied once and remain shared. Raises CheckpointError with the path of a value that cannot be saved.
        """
        self._arena.reset()
        copying = _Copying(self._arena)
        copied: dict[str, Any] = copying.copy(dict(tree), "")
        self._window.copy(copying.from_devices)
        copy_bytes(copying.pairs)
        return copied


def measure(tree: Mapping[str, Any]) -> int:
    """Return the minimum number of bytes of CPU memory that `Snapshots.take(tree)` needs.

    Raises CheckpointError with the path of a value that cannot be saved, before anything is copied.
    """
    measuring = _Measuring(Arena())
    measuring.copy(dict(tree), "")
    return measuring.num_bytes


def can_hold(value: object) -> bool:
    """True if `value` can be saved."""
    try:
        measure({"value": value})
    except CheckpointError:
        return False
    return True


class _Copying:
    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.same: dict[tuple[Any, ...], torch.Tensor] = {}
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.from_devices: list[tuple[torch.Tensor, torch.Tensor]] = []

    def copy(self, value: Any, path: str) -> Any:
        kind = type(value)
        if isinstance(value, torch.Tensor):
            return self.copy_tensor(value, path)
        if isinstance(value, np.generic):  # schedulers compute learning rates with numpy
            return self.copy(value.item(), path)
        if kind in _LEAVES:
            return value
        if kind in _MAPPINGS:
            return kind({self.key(key, path): self.copy(item, f"{path}[{key!r}]") for key, item in value.items()})
        if kind in (list, tuple):
            return kind([self.copy(item, f"{path}[{index}]") for index, item in enumerate(value)])
        if kind is set:
            return {self.copy(item, f"{path}{{{item!r}}}") for item in value}
        raise _refuse(path, f"a {kind.__module__}.{kind.__qualname__}")

    def key(self, key: Any, path: str) -> Any:
        if type(key) in _LEAVES or (type(key) is tuple and all(type(part) in _LEAVES for part in key)):
            return key
        raise _refuse(path, f"a dict with a key of type {type(key).__module__}.{type(key).__qualname__}")

    def copy_tensor(self, tensor: torch.Tensor, path: str) -> torch.Tensor:
        is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
        if not is_plain or tensor.is_meta or tensor.is_quantized or tensor.is_nested:
            raise _refuse(path, f"a {type(tensor).__name__} of layout {tensor.layout} on {tensor.device}")
        tensor = tensor.detach()
        identity = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        if tensor.numel() and identity in self.same:
            return self.same[identity]
        copied = self.same[identity] = self.start_copy(tensor)
        return copied

    def start_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.numel():
            return torch.empty_like(tensor, device="cpu")
        dense = torch.empty_like(tensor, device="meta")
        flat = self.arena.allocate(dense.nbytes)
        buffer = flat.view(tensor.dtype).as_strided(dense.shape, dense.stride())
        is_dense = dense.stride() == tensor.stride() and not tensor.is_conj() and not tensor.is_neg()
        if tensor.device.type != "cpu":
            self.from_devices.append((buffer, tensor if is_dense else torch.empty_like(tensor).copy_(tensor)))
        elif is_dense:
            self.pairs.append((buffer, tensor))
        else:
            buffer.copy_(tensor)
        return buffer


class _Measuring(_Copying):
    num_bytes = 0

    def start_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        self.num_bytes += aligned(tensor.numel() * tensor.element_size())
        return tensor


def _refuse(path: str, what: str) -> CheckpointError:
    return CheckpointError(
        "copying what is to be saved",
        found=f"{path} is {what}, which could not be loaded without running code",
        fix="Save numbers, strings, dense tensors, and dicts, lists, tuples or sets of them, as state_dict() gives.",
    )
