# SPDX-License-Identifier: Apache-2.0
"""Turn SIGINT, SIGTERM and SIGUSR1 in the parent into events; end ranks step by step; handle SIGINT in a rank.

Signals never interrupt the parent in the middle of a message.
"""

from __future__ import annotations

import bisect
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

Step = Callable[[float], None]
"""Acts on the ranks; called with the current time."""


class Escalation:
    """Steps in the order of their times, which are in seconds of the monotonic clock."""

    def __init__(self) -> None:
        self._steps: list[tuple[float, Step]] = []

    @property
    def due_s(self) -> float | None:
        """Time of the next step; None if no step is left."""
        return self._steps[0][0] if self._steps else None

    @property
    def next_step(self) -> Step | None:
        """The next step; None if no step is left."""
        return self._steps[0][1] if self._steps else None

    def start(self, *steps: tuple[float, Step]) -> None:
        """Replace all steps."""
        self._steps = sorted(steps, key=_time_of)

    def add(self, due_s: float, step: Step) -> None:
        """Add a step, after those that are due at the same time."""
        bisect.insort(self._steps, (due_s, step), key=_time_of)

    def discard(self, *steps: Step) -> None:
        """Remove every occurrence of `steps`."""
        self._steps = [each for each in self._steps if each[1] not in steps]

    def clear(self) -> None:
        """Remove all steps."""
        self._steps.clear()

    def advance(self, by_s: float) -> None:
        """Move all steps forward by `by_s` seconds."""
        self._steps = [(due_s - by_s, step) for due_s, step in self._steps]

    def run_due(self, now_s: float) -> None:
        """Take the steps that are due, including those that they add."""
        while self._steps and self._steps[0][0] <= now_s:
            self._steps.pop(0)[1](now_s)


def _time_of(step: tuple[float, Step]) -> float:
    return step[0]


STOPS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))
"""Signals that schedulers send before they kill a job."""


class InterruptCatcher:
    """Context manager in which SIGINT is counted and makes `fd` readable instead of raising KeyboardInterrupt.

    An interrupt that was not taken is delivered on exit, unless an exception is already propagating. SIGTERM and
    SIGUSR1 make `fd` readable too and end this process on exit, unless `stop` was reset to None; they are not caught if
    other code handles them. Does nothing outside the main thread, where Python does not run signal handlers.
    """

    def __init__(self) -> None:
        self._count = 0
        self._taken = 0
        self.fd, self._writer = os.pipe()
        self._previous: Any = None
        self._caught: list[signal.Signals] = []
        self.stop: signal.Signals | None = None
        """The last SIGTERM or SIGUSR1 received, or None."""

    def __enter__(self) -> InterruptCatcher:
        os.set_blocking(self._writer, False)
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._on_signal)
            self._caught = [number for number in STOPS if signal.getsignal(number) == signal.SIG_DFL]
            for number in self._caught:
                signal.signal(number, self._on_stop)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
        for number in self._caught:
            signal.signal(number, signal.SIG_DFL)
        os.close(self.fd)
        os.close(self._writer)
        if self.stop is not None:
            signal.raise_signal(self.stop)
        if self._count > self._taken and kind is None:
            signal.raise_signal(signal.SIGINT)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._count += 1
        self._wake()

    def _on_stop(self, number: int, _frame: FrameType | None) -> None:
        self.stop = signal.Signals(number)
        self._wake()

    def _wake(self) -> None:
        try:
            os.write(self._writer, b"i")
        except BlockingIOError:  # the pipe is full of earlier wake-ups, which wake the loop too
            return

    def clear(self) -> None:
        """Empty the pipe behind `fd`."""
        os.read(self.fd, 4096)

    def take(self) -> bool:
        """True if an interrupt arrived since the last call."""
        is_new, self._taken = self._count > self._taken, self._count
        return is_new


class RankInterrupt:
    """SIGINT handler of a rank: raises KeyboardInterrupt while entered, that is, while the user's function runs.

    An earlier interrupt is raised on entering, since code that runs before could swallow it (`random.seed` does). A
    later interrupt has no effect. `on_taken` is called when the function handles an interrupt itself by calling `take`.
    """

    def __init__(self, on_taken: Callable[[], None] = lambda: None) -> None:
        self.was_raised = False
        self._on_taken = on_taken
        self._is_entered = False
        self._came_early = False

    def __call__(self, _number: int, _frame: FrameType | None) -> None:
        if self._is_entered:
            self._raise()
        self._came_early = True

    def __enter__(self) -> RankInterrupt:
        self._is_entered = True
        if self._came_early:
            self._raise()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_entered = False

    def take(self) -> None:
        """Record that the function's own handler received the interrupt and will return soon with a value."""
        self.was_raised = True
        self._on_taken()

    def _raise(self) -> NoReturn:
        self.was_raised = True
        raise KeyboardInterrupt


def saw_interrupt() -> bool:
    """True if SIGINT reached this rank's function, or if the function installed its own handler."""
    handler = signal.getsignal(signal.SIGINT)
    return handler.was_raised if isinstance(handler, RankInterrupt) else True
