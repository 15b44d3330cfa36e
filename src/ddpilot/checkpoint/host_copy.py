# SPDX-License-Identifier: Apache-2.0
"""Copies the state to save to CPU memory, which is the only part of a save that training waits for.

Accepts only values that `torch.load(weights_only=True)` can load, so that every checkpoint can be read.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from ddpilot.errors import CheckpointError
from ddpilot.group.device import current_event, runs_behind

_LEAVES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_MAPPINGS = (dict, OrderedDict, Counter)


class HostCopy:
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
    """Return the minimum number of bytes of CPU memory that `HostCopy.take(tree)` needs.

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
        raise _error(path, f"a {kind.__module__}.{kind.__qualname__}")

    def key(self, key: Any, path: str) -> Any:
        if type(key) in _LEAVES or (type(key) is tuple and all(type(part) in _LEAVES for part in key)):
            return key
        raise _error(path, f"a dict with a key of type {type(key).__module__}.{type(key).__qualname__}")

    def copy_tensor(self, tensor: torch.Tensor, path: str) -> torch.Tensor:
        is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
        if not is_plain or tensor.is_meta or tensor.is_quantized or tensor.is_nested:
            raise _error(path, f"a {type(tensor).__name__} of layout {tensor.layout} on {tensor.device}")
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


def _error(path: str, what: str) -> CheckpointError:
    return CheckpointError(
        "copying the state to save",
        found=f"{path} is {what}, which could not be loaded without running code",
        fix="Save numbers, strings, dense tensors, and dicts, lists, tuples or sets of them, as state_dict() gives.",
    )


SLOT_BYTES = 1 << 24
NUM_SLOTS = 8
_NUM_WINDOW_THREADS = 4


class Window:
    """At most `num_slots` slots of `slot_bytes`, pinned when first needed and kept."""

    def __init__(self, slot_bytes: int = SLOT_BYTES, num_slots: int = NUM_SLOTS) -> None:
        self._slot_bytes = slot_bytes
        self._num_slots = num_slots
        self._slots: list[torch.Tensor] = []

    def copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy each second tensor, on an accelerator, to the first, on the CPU: same shape, dtype and strides, dense.

        Returns when all copies are complete. Without pinned memory, and on devices without events, the device copies to
        the tensors directly, which is slower.
        """
        if not pairs:
            return
        piped = [pair for pair in pairs if runs_behind(pair[1].device) and self._has_slots()]
        if len(piped) < len(pairs):
            for into, out_of in pairs:
                into.copy_(out_of)
            return
        with ThreadPoolExecutor(_NUM_WINDOW_THREADS, thread_name_prefix="ddpilot-copy") as helpers:
            moving: dict[int, Future[None]] = {}
            for number, batch in enumerate(self._batches(piped)):
                if number == len(self._slots) < self._num_slots:
                    self._add_slot()
                place = number % len(self._slots)
                if place in moving:
                    moving[place].result()
                moving[place] = helpers.submit(_copy_moves, *_fill(self._slots[place], batch))
            for one in moving.values():
                one.result()

    def _has_slots(self) -> bool:
        return bool(self._slots) or self._add_slot()

    def _add_slot(self) -> bool:
        try:
            self._slots.append(torch.empty(self._slot_bytes, dtype=torch.uint8, pin_memory=True))
        except RuntimeError:  # the system cannot pin more memory, or the device has none for it
            return False
        return True

    def _batches(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
        """Yield lists of byte ranges that fill a slot and come from one device."""
        batch: list[tuple[torch.Tensor, torch.Tensor]] = []
        left = self._slot_bytes
        for into, out_of in pairs:
            into, out_of = _bytes(into), _bytes(out_of)
            start = 0
            while start < len(into):
                if batch and (not left or batch[0][1].device != out_of.device):
                    yield batch
                    batch, left = [], self._slot_bytes
                end = min(len(into), start + left)
                batch.append((into[start:end], out_of[start:end]))
                left -= end - start
                start = end
        if batch:
            yield batch


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return torch.as_strided(tensor, (tensor.numel(),), (1,)).view(torch.uint8)


def _fill(
    slot: torch.Tensor, batch: list[tuple[torch.Tensor, torch.Tensor]]
) -> tuple[torch.Event, list[tuple[int, int, int]]]:
    """Start copying the pieces of `batch` into `slot`; return its end as an event, and the moves to do then."""
    moves, start = [], 0
    for into, out_of in batch:
        slot[start : start + len(out_of)].copy_(out_of, non_blocking=True)
        moves.append((into.data_ptr(), slot.data_ptr() + start, len(into)))
        start += len(out_of)
    return current_event(batch[0][1].device), moves


def _copy_moves(event: torch.Event, moves: list[tuple[int, int, int]]) -> None:
    event.synchronize()
    for move in moves:
        ctypes.memmove(*move)


_HUGE_PAGE_BYTES = 1 << 21
_LARGEST_STEP_BYTES = 1 << 26
_ALIGNMENT_BYTES = 64
_PIECE_BYTES = 1 << 22
_PIECES_PER_THREAD = 4
_MAX_THREADS = 4


class Arena:
    """Memory that is allocated in order and reused after `reset`."""

    def __init__(self) -> None:
        self._blocks: list[mmap.mmap] = []
        self._current = 0
        self._used_bytes = 0

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Return `num_bytes` (>= 1) of uninitialised memory: uint8 of shape (num_bytes,), with its own storage."""
        while True:
            if self._current == len(self._blocks):
                self._blocks.append(self._make_block(num_bytes))
            if self._used_bytes + num_bytes <= len(self._blocks[self._current]):
                break
            self._current, self._used_bytes = self._current + 1, 0
        start = self._used_bytes
        self._used_bytes += aligned(num_bytes)
        return torch.frombuffer(self._blocks[self._current], dtype=torch.uint8, count=num_bytes, offset=start)

    def reset(self) -> None:
        """Reuse the memory from the start: tensors allocated before are overwritten."""
        self._current = self._used_bytes = 0

    def reserve(self, num_bytes: int) -> None:
        """Preallocate `num_bytes`, so that `allocate` does not wait for the system.

        Only before the first `allocate`.
        """
        if num_bytes:
            self.allocate(num_bytes)[:: mmap.PAGESIZE] = 0
            self.reset()

    def _make_block(self, num_bytes: int) -> mmap.mmap:
        step = min(_LARGEST_STEP_BYTES, _HUGE_PAGE_BYTES << len(self._blocks))
        block = mmap.mmap(-1, max(step, -(-num_bytes // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES))
        if hasattr(mmap, "MADV_HUGEPAGE"):
            block.madvise(mmap.MADV_HUGEPAGE)
        return block


def aligned(num_bytes: int) -> int:
    """Return the number of bytes that `num_bytes` take up in an arena."""
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def copy_bytes(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy the memory of each second tensor to the first; both dense, on the CPU and of equal size in bytes."""
    pieces = [
        (into.data_ptr() + start, out_of.data_ptr() + start, min(_PIECE_BYTES, into.nbytes - start))
        for into, out_of in pairs
        for start in range(0, into.nbytes, _PIECE_BYTES)
    ]
    # Each thread takes the next piece: one that gets no core delays one piece, not its share of all.
    left = iter(pieces)
    num_helpers = min(_MAX_THREADS, os.cpu_count() or 1, len(pieces) // _PIECES_PER_THREAD) - 1
    with ThreadPoolExecutor(max(1, num_helpers), thread_name_prefix="ddpilot-copy") as helpers:
        helping = [helpers.submit(_move_all, left) for _ in range(num_helpers)]
        _move_all(left)
    for helper in helping:
        helper.result()


def _move_all(pieces: Iterator[tuple[int, int, int]]) -> None:
    for piece in pieces:
        ctypes.memmove(*piece)
