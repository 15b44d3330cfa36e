# SPDX-License-Identifier: Apache-2.0
"""Show lines that have no newline yet, such as those of `print(".", end="", flush=True)` in a loop, while they grow."""

from __future__ import annotations

from ddpilot.output.lines import LineSplitter
from ddpilot.output.screen import Screen

_AFTER_S = 0.12
"""Seconds to wait for a newline: on a busy machine, complete lines of `print` also arrive in pieces."""

_MAX_CHARS = 100
"""Maximum length: a line that is redrawn in place has to fit into the window."""

Source = tuple[int, str, bool]
"""Rank, stream, and True if the output bypassed Python."""


class OpenLineSplitter(LineSplitter):
    """A `LineSplitter` that also gives access to the unfinished line."""

    @property
    def unfinished(self) -> str:
        """The current line if it has no newline yet; "" if there is none, or if it is a progress bar."""
        if b"\r" in self._pending:
            return ""
        return self._pending[-4 * _MAX_CHARS :].decode(errors="replace")[-_MAX_CHARS:]


class UnfinishedLines:
    """Draws the unfinished line of the lowest rank that has one. Times are seconds of the monotonic clock."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._waiting: dict[Source, tuple[str, float]] = {}  # text, and the time at which to draw it
        self._drawn: tuple[Source, str] | None = None

    def update(self, source: Source, text: str, now_s: float) -> None:
        """Set the unfinished line of a source to `text`; "" if the line has ended."""
        if text:
            _, due_s = self._waiting.get(source, ("", now_s + _AFTER_S))
            self._waiting[source] = text, due_s
            return
        self._waiting.pop(source, None)
        if self._drawn is not None and self._drawn[0] == source:
            self.erase()

    def erase(self) -> None:
        """Remove the line that is drawn: a progress bar or the complete line replaces it."""
        if self._drawn is not None:
            self._screen.unfinished(self._drawn[0][1], "")
            self._drawn = None

    def draw(self, now_s: float) -> bool:
        """Draw the line if it is due. Return True if anything changed."""
        wanted = self._wanted()
        if wanted is None or wanted == self._drawn or self._waiting[wanted[0]][1] > now_s:
            return False
        source, text = self._drawn = wanted
        self._waiting[source] = text, now_s + _AFTER_S
        self._screen.unfinished(source[1], text, source[0])
        return True

    def next_due_s(self) -> float | None:
        """Return when to call `draw` next; None if nothing is pending."""
        wanted = self._wanted()
        return None if wanted is None or wanted == self._drawn else self._waiting[wanted[0]][1]

    def _wanted(self) -> tuple[Source, str] | None:
        source = min(self._waiting, default=None)
        return None if source is None else (source, self._waiting[source][0])
