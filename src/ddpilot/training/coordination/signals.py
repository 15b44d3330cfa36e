# SPDX-License-Identifier: Apache-2.0
"""Signals that request the end of training: they set a flag, and all ranks decide together when to stop."""

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
    """Context in which SIGINT, SIGTERM and SIGUSR1 only call `tell` with their name; no collective runs in a handler.

    A launched rank also reports to its parent that it handled SIGINT and will exit by itself.

    A second SIGINT calls the previous handler, to stop at once. SIGTERM and SIGUSR1 are left unchanged if other code
    handles them. Does nothing outside the main thread. Reentrant.
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
            # A handler that was installed in the meantime is kept.
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
                before.take()  # the function handles it, and its return value is wanted
        name = signal.Signals(number).name
        if self._tell is None:
            self._untold.append(name)
        else:
            self._tell(name)

    def tell_to(self, tell: Callable[[str], None]) -> None:
        """Call `tell` for future signals, and now for those received while there was no callback."""
        self._tell = tell
        while self._untold:
            tell(self._untold.pop(0))
