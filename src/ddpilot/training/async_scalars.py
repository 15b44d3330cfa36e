# SPDX-License-Identifier: Apache-2.0
"""Asynchronous copies of scalars from an accelerator to the host; only `PendingScalar.read` waits for the device."""

from __future__ import annotations

import torch

from ddpilot.record.accelerator import is_capturing


class _Slot:
    """A scalar in pinned memory and the event that marks its copy as done; reused."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        try:
            self.number = torch.empty((), dtype=dtype, pin_memory=True)
        except RuntimeError:  # no memory can be pinned: the copy is then synchronous
            self.number = torch.empty((), dtype=dtype)
        self.event = torch.Event(device)


class PendingScalar:
    """A scalar that is being copied to the host."""

    def __init__(self, slot: _Slot, free: list[_Slot]) -> None:
        self._slot: _Slot | None = slot
        self._free = free
        self._number: float | None = None

    @classmethod
    def of(cls, number: float) -> PendingScalar:
        """Return a scalar that is on the host already."""
        there = object.__new__(cls)
        there._slot, there._free, there._number = None, [], number
        return there

    @property
    def is_there(self) -> bool:
        """True if `read` would not wait."""
        return self._slot is None or (not is_capturing() and self._slot.event.query())

    def read(self) -> float:
        """Return the value; waits for the copy to finish."""
        if self._slot is not None:
            if not self.is_there:
                self._slot.event.synchronize()
            self._number = float(self._slot.number.item())
            self._free.append(self._slot)
            self._slot = None
        assert self._number is not None  # set above or by an earlier call
        return self._number


class ScalarCopier:
    """Copies scalar tensors (shape ()) of accelerators to the host, through pinned memory that it reuses."""

    def __init__(self) -> None:
        self._free: dict[tuple[torch.dtype, torch.device], list[_Slot]] = {}

    def send(self, number: torch.Tensor) -> PendingScalar:
        """Start copying `number` to the host, in the current stream of its device."""
        if number.device.type == "cpu":
            return PendingScalar.of(number.item())
        free = self._free.setdefault((number.dtype, number.device), [])
        slot = free.pop() if free else _Slot(number.dtype, number.device)
        slot.number.copy_(number.detach(), non_blocking=True)
        slot.event.record(torch.accelerator.current_stream(number.device))
        return PendingScalar(slot, free)
