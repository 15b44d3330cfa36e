# SPDX-License-Identifier: Apache-2.0
"""Lines that have no end yet, such as `print(".", end="", flush=True)` in a loop: shown while they grow."""

from __future__ import annotations

from ddpilot.launching.output.lines import LineSplitter
from ddpilot.session.shown.screen import Screen

_AFTER_S = 0.12
"""So long a line waits for its end: one that `print` was about to end comes in pieces too, on a busy machine."""

_MAX_CHARS = 100
"""A line that is drawn over itself has to fit into the window."""

Source = tuple[int, str, bool]
"""Rank, stream, and whether it came past Python."""


class OpenLineSplitter(LineSplitter):
    """Also says what it holds back."""

    @property
    def unfinished(self) -> str:
        """The line that has no end yet; "" where there is none, or a bar."""
        if b"\r" in self._pending:
            return ""
        return self._pending[-4 * _MAX_CHARS :].decode(errors="replace")[-_MAX_CHARS:]


class UnfinishedLines:
    """Of all lines that have no end yet, that of the lowest rank is drawn. Times: seconds of the monotonic clock."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._waiting: dict[Source, tuple[str, float]] = {}  # the text, and when it is to be drawn
        self._drawn: tuple[Source, str] | None = None

    def update(self, source: Source, text: str, now_s: float) -> None:
        """The unfinished line of a source is now `text`, "" where it has ended."""
        if text:
            _, due_s = self._waiting.get(source, ("", now_s + _AFTER_S))
            self._waiting[source] = text, due_s
            return
        self._waiting.pop(source, None)
        if self._drawn is not None and self._drawn[0] == source:
            self.erase()

    def erase(self) -> None:
        """Take away what is drawn: a bar, or the whole line, comes in its place."""
        if self._drawn is not None:
            self._screen.unfinished(self._drawn[0][1], "")
            self._drawn = None

    def draw(self, now_s: float) -> bool:
        """Draw what is due; whether anything has changed."""
        wanted = self._wanted()
        if wanted is None or wanted == self._drawn or self._waiting[wanted[0]][1] > now_s:
            return False
        source, text = self._drawn = wanted
        self._waiting[source] = text, now_s + _AFTER_S
        self._screen.unfinished(source[1], text, source[0])
        return True

    def next_due_s(self) -> float | None:
        """When `draw` has something to do."""
        wanted = self._wanted()
        return None if wanted is None or wanted == self._drawn else self._waiting[wanted[0]][1]

    def _wanted(self) -> tuple[Source, str] | None:
        source = min(self._waiting, default=None)
        return None if source is None else (source, self._waiting[source][0])
