# SPDX-License-Identifier: Apache-2.0
"""Who is told what the ranks say: the one that has their attention, else whoever shows what comes outside a cell."""

from __future__ import annotations

import contextlib
import queue
import signal
import threading
from collections.abc import Callable, Iterator

from ddpilot.errors import LaunchError, LaunchInterrupted
from ddpilot.session.events import Event, Interrupted
from ddpilot.session.stops import Stops


class Attention:
    """One caller at a time has the ranks' attention (`turn`). `show` gets every event that comes while nobody has it.

    `release` is called when a turn ends. `switch` is held while events change hands; `put` is to be called under it.
    """

    def __init__(self, show: Callable[[Event], None], release: Callable[[], None]) -> None:
        self._show = show
        self._release = release
        self._consumer: queue.SimpleQueue[Event] | None = None
        self._taken = threading.Lock()
        self._holder = 0
        self.switch = threading.RLock()

    @property
    def is_taken(self) -> bool:
        """Whether somebody is told what comes now."""
        return self._consumer is not None

    def end_turn(self, event: Event, limit_s: float) -> None:
        """If another thread has the attention: hand it `event`, by which its turn ends, and wait for that."""
        with self.switch:
            if self._consumer is None or self._holder == threading.get_ident():
                return
            self._consumer.put(event)
        if self._taken.acquire(timeout=limit_s):
            self._taken.release()

    def put(self, event: Event) -> None:
        """Hand an event to whoever is to have it."""
        if self._consumer is not None:
            self._consumer.put(event)
        else:
            self._show(event)

    @contextlib.contextmanager
    def turn(self, did: str) -> Iterator[tuple[queue.SimpleQueue[Event], Stops]]:
        """Take the ranks' attention: what they say goes to the events that are yielded. LaunchError if another has it.

        An interrupt that nobody took is delivered at the end, unless what was done ends as stopped anyway.
        """
        if not self._taken.acquire(blocking=False):
            raise LaunchError(
                did, found="the ranks are busy with another cell", fix="Wait for its end, or interrupt it"
            )
        self._holder = threading.get_ident()
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        is_interrupted = is_stopped = False
        try:
            with Stops(events) as stops:
                with self.switch:
                    self._consumer = events
                yield events, stops
        except KeyboardInterrupt:
            is_stopped = True
            raise
        finally:
            try:
                with self.switch:
                    self._consumer = None
                    self._release()
                    while not events.empty():
                        event = events.get_nowait()
                        is_interrupted = is_interrupted or isinstance(event, Interrupted)
                        self._show(event)
            finally:
                self._taken.release()
        if is_interrupted and not is_stopped:
            _interrupt_caller(did)


def _interrupt_caller(did: str) -> None:
    """Have SIGINT do now what it does in this program. Raises LaunchInterrupted where that is a KeyboardInterrupt."""
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        raise LaunchInterrupted(f"{did} was over already when it was stopped") from None
