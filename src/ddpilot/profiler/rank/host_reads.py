# SPDX-License-Identifier: Apache-2.0
"""Time where the program reads values of tensors, copies tensors to and from a device, or waits for the device."""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from ddpilot.guard.probe import WRAPPER_FILE, Notes, keep_dynamo_out

READS = ("item", "tolist", "__float__", "__int__", "__bool__", "__repr__", "__format__", "nonzero")
"""Methods of tensors for which the host waits, if the tensor is on a device."""
COPIES = ("to", "cpu", "cuda")
LEAST_NS = 20_000
"""Shorter reads are added up by line; longer ones are spans."""

Add = Callable[[int, int, bool], None]


class HostReads:
    """Wraps methods of `torch.Tensor` and functions that wait for a device.

    `add(begin_ns, end_ns, is_copy)` is called for each that takes long, `number_of_site` returns the number of the
    user's line, and `is_paused` is true while nothing is to be observed: inside an optimizer's step.
    """

    def __init__(
        self,
        notes: Notes,
        add: Add,
        number_of_site: Callable[[], int],
        is_paused: Callable[[], bool],
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._notes = notes
        self._clock = clock
        self._add = notes.safely(add)
        self._number_of_site = number_of_site
        self._is_paused = is_paused
        self._main = threading.main_thread().ident
        self._is_open = False
        self._short: dict[tuple[Any, int], list[int]] = {}  # site, calls, ns

    def install(self) -> list[Callable[[], None]]:
        """Start observing; returns the functions that stop it."""
        waits = [
            self._notes.around(owner, "synchronize", before=self._begins, after=self._ends_waiting)
            for owner in _find_devices()
        ]
        methods = [name for name in (*READS, *COPIES) if hasattr(torch.Tensor, name)]
        return [*waits, *(self._wrap(name) for name in methods)]

    def totals(self) -> list[list[int]]:
        """Return site, calls and ns of short reads, by line."""
        return list(self._short.values())

    def _begins(self, *_args: Any, **_kwargs: Any) -> int:
        return self._clock() if threading.get_ident() == self._main else 0

    def _ends_waiting(self, begin_ns: int, *_args: Any, **_kwargs: Any) -> None:
        if begin_ns:
            self._add(begin_ns, self._clock(), False)

    def _wrap(self, name: str) -> Callable[[], None]:
        original = getattr(torch.Tensor, name)
        is_copy = name in COPIES
        add, count, copied = self._add, self._notes.safely(self._count), self._notes.safely(self._copied)

        @functools.wraps(original)
        def wrapper(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if self._is_open or self._is_paused() or threading.get_ident() != self._main:
                return original(tensor, *args, **kwargs)
            self._is_open = True
            clock = time.monotonic_ns if tensor.is_cpu != is_copy else self._clock
            begin_ns = clock()
            try:
                result = original(tensor, *args, **kwargs)
            finally:
                self._is_open = False
            end_ns = clock()
            if is_copy:
                if result is not tensor and end_ns - begin_ns >= LEAST_NS:
                    copied(tensor, result, begin_ns, end_ns)
            elif end_ns - begin_ns >= LEAST_NS:
                add(begin_ns, end_ns, False)
            else:
                count(sys._getframe(1), end_ns - begin_ns)
            return result

        wrapper.__code__ = wrapper.__code__.replace(co_filename=WRAPPER_FILE)  # type: ignore[attr-defined]
        keep_dynamo_out(wrapper)
        is_own = name in vars(torch.Tensor)
        setattr(torch.Tensor, name, wrapper)

        def undo() -> None:
            if vars(torch.Tensor).get(name) is not wrapper:  # other code has wrapped it since
                return
            if is_own:
                setattr(torch.Tensor, name, original)
            else:
                delattr(torch.Tensor, name)

        return undo

    def _copied(self, tensor: Any, result: Any, begin_ns: int, end_ns: int) -> None:
        """Note a copy between host and device; to the host it waits for the device."""
        if isinstance(result, torch.Tensor) and tensor.is_cpu != result.is_cpu:
            self._add(begin_ns, end_ns, bool(tensor.is_cpu))

    def _count(self, frame: Any, ns: int) -> None:
        key = (frame.f_code, frame.f_lineno)
        found = self._short.get(key)
        if found is None:
            found = self._short[key] = [self._number_of_site(), 0, 0]
        found[1] += 1
        found[2] += ns


def _find_devices() -> list[Any]:
    """Return the modules that have `synchronize` for the device of this machine."""
    if not torch.accelerator.is_available():
        return []
    return [torch.accelerator, torch.get_device_module()]
