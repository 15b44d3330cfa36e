# SPDX-License-Identifier: Apache-2.0
"""Route events of ranks to the caller that is using the ranks, or to the idle display if no caller is."""

from __future__ import annotations

import contextlib
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

from ddpilot.errors import LaunchError, LaunchInterrupted
from ddpilot.launching.spawning import Ended, Wrote
from ddpilot.output.rich_output import RankMessage


@dataclass(frozen=True, kw_only=True)
class KernelMessage(RankMessage):
    """A Jupyter message on any channel. `parent_id` is the id of the message that it belongs to."""

    channel: str
    """"shell", "iopub", "stdin" or "control"."""

    parent_id: str
    header: dict[str, Any]


@dataclass(frozen=True)
class Interrupted:
    """The user interrupted the cell (interrupt button or Ctrl-C)."""


Event = KernelMessage | Wrote | Ended | Interrupted


@dataclass(frozen=True)
class Turn:
    """Exclusive use of the ranks by one caller."""

    events: queue.SimpleQueue[Event]
    """The events of the ranks, and `Interrupted` on SIGINT."""

    interrupts: InterruptListener
    """The SIGINT handler of the turn."""


class EventRouter:
    """Routes events to one caller at a time.

    A caller takes the ranks with `turn`; between turns, events are passed to `show`. `release` is called when a turn
    ends. `lock` is held while the receiver of events changes; hold it to call `put`.
    """

    def __init__(self, show: Callable[[Event], None], release: Callable[[], None]) -> None:
        self._show = show
        self._release = release
        self._consumer: queue.SimpleQueue[Event] | None = None
        self._taken = threading.Lock()
        self._holder = 0
        self.lock = threading.RLock()

    @property
    def is_taken(self) -> bool:
        """True if a caller is receiving the events."""
        return self._consumer is not None

    def end_turn(self, event: Event, limit_s: float) -> None:
        """End the turn of a different thread, if any, by sending it `event`. Waits up to `limit_s` seconds."""
        with self.lock:
            if self._consumer is None or self._holder == threading.get_ident():
                return
            self._consumer.put(event)
        if self._taken.acquire(timeout=limit_s):
            self._taken.release()

    def put(self, event: Event) -> None:
        """Send an event to its receiver. Hold `lock` to call it."""
        if self._consumer is not None:
            self._consumer.put(event)
        else:
            self._show(event)

    @contextlib.contextmanager
    def turn(self, did: str) -> Iterator[Turn]:
        """Context manager that takes exclusive use of the ranks.

        Raises LaunchError if a different caller has the turn. An interrupt that is still in the queue at the end is
        raised again in the caller, unless the body itself ended with a KeyboardInterrupt.
        """
        if not self._taken.acquire(blocking=False):
            raise LaunchError(
                did, found="the ranks are busy with another cell", fix="Wait for its end, or interrupt it"
            )
        self._holder = threading.get_ident()
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        is_interrupted = has_raised = False
        try:
            with InterruptListener(events) as interrupts:
                with self.lock:
                    self._consumer = events
                yield Turn(events, interrupts)
        except KeyboardInterrupt:
            has_raised = True
            raise
        finally:
            try:
                with self.lock:
                    self._consumer = None
                    self._release()
                    while not events.empty():
                        event = events.get_nowait()
                        is_interrupted = is_interrupted or isinstance(event, Interrupted)
                        self._show(event)
            finally:
                self._taken.release()
        if is_interrupted and not has_raised:
            _interrupt_caller(did)


def _interrupt_caller(did: str) -> None:
    """Run this program's own SIGINT handler now. Raises LaunchInterrupted if that raises a KeyboardInterrupt."""
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        raise LaunchInterrupted(f"{did} was interrupted after it had finished") from None


class InterruptListener:
    """Context manager in which SIGINT puts `Interrupted` into `events` instead of raising KeyboardInterrupt.

    Does nothing outside the main thread, which is the only one to receive signals in Python.
    """

    def __init__(self, events: queue.SimpleQueue[Event]) -> None:
        self._events = events
        self._previous: Any = None

    def __enter__(self) -> InterruptListener:
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
