# SPDX-License-Identifier: Apache-2.0
"""Copies of a device's numbers in the host's memory, which nothing waits for."""

from __future__ import annotations

import functools
from collections import deque
from typing import Any

import torch
from torch import Tensor

from ddpilot.record.capturing import is_capturing

_MAX_FREE = 16


class HostCopy:
    """One copy that is on its way, or has arrived. `release` gives its memory back to the `HostCopies` it is of."""

    __slots__ = ("_device_type", "_event", "_free", "numbers")

    def __init__(self, like: Tensor, free: deque[HostCopy]) -> None:
        self._device_type = like.device.type
        is_pinned = _can_pin()
        self.numbers = torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=is_pinned)
        """In the host's memory; to be read once it has arrived, and until it is released."""
        self._event: Any = torch.Event(like.device)
        self._free = free

    def begin(self, tensor: Tensor) -> None:
        """Copy `tensor` once the device has come to here."""
        self.numbers.copy_(tensor, non_blocking=True)
        self._event.record(torch.accelerator.current_stream(tensor.device))

    def has_arrived(self) -> bool:
        """Whether it can be read; False while this thread captures a device graph, which asking would spoil."""
        return not is_capturing() and bool(self._event.query())

    def release(self) -> None:
        """Let the next copy of as much have its memory and its event."""
        self._free.append(self)

    def fits(self, tensor: Tensor) -> bool:
        """Whether it has room for `tensor`, no more, and an event of its device."""
        is_alike = self.numbers.dtype is tensor.dtype and self.numbers.shape == tensor.shape
        return is_alike and self._device_type == tensor.device.type


class HostCopies:
    """Copies tensors of accelerators, into page-locked memory that is used again and again."""

    def __init__(self) -> None:
        self._free: deque[HostCopy] = deque(maxlen=_MAX_FREE)

    def begin(self, tensor: Tensor) -> HostCopy | None:
        """Copy `tensor` as the current stream of its device leaves it. It waits for nothing.

        None where that cannot be: the device is no accelerator with streams, or a device graph is captured.
        """
        if not can_copy_from(tensor.device.type) or is_capturing():
            return None
        copy = self._take(tensor)
        copy.begin(tensor.detach())
        return copy

    def _take(self, tensor: Tensor) -> HostCopy:
        for _ in range(len(self._free)):
            try:
                copy = self._free.popleft()
            except IndexError:  # another thread was faster
                break
            if copy.fits(tensor):
                return copy
            self._free.append(copy)
        return HostCopy(tensor, self._free)


@functools.cache
def can_copy_from(device_type: str) -> bool:
    """Whether `device_type` is this torch's accelerator, which has streams and events."""
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == device_type


@functools.cache
def _can_pin() -> bool:
    try:
        torch.empty(1, pin_memory=True)
    except (RuntimeError, NotImplementedError):  # an accelerator that page-locks nothing
        return False
    return True
