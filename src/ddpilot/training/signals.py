# SPDX-License-Identifier: Apache-2.0
"""Signals that ask for an end of training set a flag; what to do about it is decided by all ranks together."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from ddpilot.launching.interrupts import RankInterrupt

_SIGNALS = tuple(
    number for name in ("SIGINT", "SIGTERM", "SIGUSR1") if (number := getattr(signal, name, None)) is not None
)


class StopSignals:
    """While entered, SIGINT, SIGTERM and SIGUSR1 call `tell` with their name and nothing else: no collective.

    A rank of a launch says to its parent, besides, that it took SIGINT, and will end by itself.

    A second SIGINT is for those who cannot wait for the step: it does what it would do without this. SIGTERM and
    SIGUSR1 are left alone where other code handles them. Does nothing outside the main thread. Can be entered again
    inside itself.
    """

    def __init__(self, tell: Callable[[str], None] | None = None) -> None:
        self._tell = tell
        self._untold: list[str] = []
        self._depth = 0
        self._was_interrupted = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        self._depth += 1
        if self._depth > 1 or threading.current_thread() is not threading.main_thread():
            return self
        self._was_interrupted = False
        for number in _SIGNALS:
            before = signal.getsignal(number)
            if callable(before) if number == signal.SIGINT else before == signal.SIG_DFL:
                self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        if self._depth or threading.current_thread() is not threading.main_thread():
            return
        for number, before in self._previous.items():
            # Another handler may have come in between: that one is no longer ours to replace.
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, before)
        self._previous.clear()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._was_interrupted:
            self._previous[number](number, frame)
            return
        if number == signal.SIGINT:
            self._was_interrupted = True
            if isinstance(before := self._previous[number], RankInterrupt):
                before.take()  # the function was told: what it returns is wanted
        name = signal.Signals(number).name
        if self._tell is None:
            self._untold.append(name)
        else:
            self._tell(name)

    def tell_to(self, tell: Callable[[str], None]) -> None:
        """Call `tell` from now on, and now with what came while there was nobody to be told."""
        self._tell = tell
        while self._untold:
            tell(self._untold.pop(0))
