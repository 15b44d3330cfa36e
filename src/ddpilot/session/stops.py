# SPDX-License-Identifier: Apache-2.0
"""Handle SIGINT (interrupt button, Ctrl-C) while ranks run a cell, as an event that never interrupts a message."""

from __future__ import annotations

import contextlib
import queue
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

from ddpilot.session.kernels.events import Event, Interrupted


class Stops:
    """Context manager in which SIGINT puts `Interrupted` into `events` instead of raising KeyboardInterrupt.

    Does nothing outside the main thread, which is the only one to receive signals in Python.
    """

    def __init__(self, events: queue.SimpleQueue[Event]) -> None:
        self._events = events
        self._previous: Any = None

    def __enter__(self) -> Stops:
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *_error: object) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._events.put(Interrupted())

    @contextlib.contextmanager
    def raised(self) -> Iterator[None]:
        """Context manager in which SIGINT raises KeyboardInterrupt again: for calls that wait for the user."""
        if self._previous is None:
            yield
            return
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, self._on_signal)
