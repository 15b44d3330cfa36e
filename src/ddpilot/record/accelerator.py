# SPDX-License-Identifier: Apache-2.0
"""The accelerator without waiting for it: copies into host memory, and whether a graph is being captured."""

from __future__ import annotations

import functools
from collections import deque
from typing import Any

import torch
from torch import Tensor

_MAX_FREE = 16


class HostCopy:
    """One copy, in flight or complete. `release` returns its memory to the `HostCopies` that made it."""

    __slots__ = ("_device_type", "_event", "_free", "numbers")

    def __init__(self, like: Tensor, free: deque[HostCopy]) -> None:
        self._device_type = like.device.type
        is_pinned = _can_pin()
        self.numbers = torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=is_pinned)
        """The copy in host memory; valid from its arrival until `release`."""
        self._event: Any = torch.Event(like.device)
        self._free = free

    def begin(self, tensor: Tensor) -> None:
        """Enqueue a copy of `tensor` on the current stream of its device."""
        self.numbers.copy_(tensor, non_blocking=True)
        self._event.record(torch.accelerator.current_stream(tensor.device))

    def has_arrived(self) -> bool:
        """True if the copy has arrived; False while this thread captures a device graph, when it must not query."""
        return not is_capturing() and bool(self._event.query())

    def release(self) -> None:
        """Return memory and event for reuse by the next copy of the same size."""
        self._free.append(self)

    def fits(self, tensor: Tensor) -> bool:
        """True if dtype, shape and device type are those of `tensor`."""
        is_alike = self.numbers.dtype is tensor.dtype and self.numbers.shape == tensor.shape
        return is_alike and self._device_type == tensor.device.type


class HostCopies:
    """Copies accelerator tensors into pinned memory; that of at most `max_free` copies is kept and reused."""

    def __init__(self, *, max_free: int = _MAX_FREE) -> None:
        self._free: deque[HostCopy] = deque(maxlen=max_free)

    def begin(self, tensor: Tensor) -> HostCopy | None:
        """Enqueue a copy of `tensor` on the current stream of its device, without waiting.

        Returns None if the device is not an accelerator with streams, or while a device graph is captured.
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
            except IndexError:  # another thread took it
                break
            if copy.fits(tensor):
                return copy
            self._free.append(copy)
        return HostCopy(tensor, self._free)


@functools.cache
def can_copy_from(device_type: str) -> bool:
    """True if `device_type` is the accelerator of this torch build, which has streams and events."""
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == device_type


@functools.cache
def _can_pin() -> bool:
    try:
        torch.empty(1, pin_memory=True)
    except RuntimeError:  # an accelerator without pinned memory
        return False
    return True


def is_capturing() -> bool:
    """True if the current stream of this thread captures a device graph.

    During a capture, querying an event, waiting, or reading a generator raises an error and invalidates the capture,
    and each kernel that is launched becomes part of the user's graph. False on devices without graphs.
    """
    module = _device_module()
    return module is not None and captures(module)


def captures(module: Any) -> bool:
    """Same as `is_capturing`, for the device of `module`, such as `torch.cuda`. Does not initialize the device."""
    return bool(module.is_initialized() and module.is_current_stream_capturing())


@functools.cache
def _device_module() -> Any:
    """Return the module of this torch build's accelerator; None if it has no accelerator, or one without graphs."""
    import torch

    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return None
    module = torch.get_device_module(accelerator)
    return module if hasattr(module, "is_current_stream_capturing") and hasattr(module, "is_initialized") else None
