# SPDX-License-Identifier: Apache-2.0
"""Reusable CPU memory in huge pages for copies of tensors, and multi-threaded copying into it.

Allocating fresh memory in small pages takes several times as long as the copy, and torch's own threads spin if the
cores are busy.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

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
