# SPDX-License-Identifier: Apache-2.0
"""Copies tensors from accelerators to host memory through a bounded window of pinned memory.

Copies to pinned memory are several times as fast, but pinning takes longer than copying, and pinned memory is not
available to other processes: so a few slots are pinned once, and threads empty each while the next ones are filled.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from ddpilot.group.accelerator import current_event, runs_behind

SLOT_BYTES = 1 << 24
NUM_SLOTS = 8
_NUM_THREADS = 4


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
        with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="ddpilot-copy") as helpers:
            moving: dict[int, Future[None]] = {}
            for number, batch in enumerate(self._batches(piped)):
                if number == len(self._slots) < self._num_slots:
                    self._add_slot()
                place = number % len(self._slots)
                if place in moving:
                    moving[place].result()
                moving[place] = helpers.submit(_move, *_fill(self._slots[place], batch))
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


def _move(event: torch.Event, moves: list[tuple[int, int, int]]) -> None:
    event.synchronize()
    for move in moves:
        ctypes.memmove(*move)
