# SPDX-License-Identifier: Apache-2.0
"""The last lines of each rank, for the error that may need them."""

from __future__ import annotations

from collections import deque

from ddpilot.launching.output.lines import Line, LineSplitter

_MAX_LINES = 200
_MAX_BYTES = 1 << 14


class Tails:
    """Keeps what ranks wrote last, past Python included."""

    def __init__(self) -> None:
        self._splitters: dict[tuple[int, str], LineSplitter] = {}
        self._lines: dict[int, deque[str]] = {}

    def feed(self, rank: int, stream: str, data: bytes) -> None:
        """Take what a rank wrote; of a lot only the end is looked at, since cutting lines is what costs."""
        splitter = self._splitters.setdefault((rank, stream), LineSplitter())
        kept = self._lines.setdefault(rank, deque(maxlen=_MAX_LINES))
        kept.extend(piece.text for piece in splitter.feed(data[-_MAX_BYTES:]) if isinstance(piece, Line))

    def last_lines(self, rank: int) -> tuple[str, ...]:
        """The last lines of a rank, oldest first."""
        return tuple(self._lines.get(rank, ()))

    def forget(self, rank: int) -> None:
        """The rank was restarted: what its last process wrote, also of an unfinished line, is not the new one's."""
        self._lines.pop(rank, None)
        self._splitters = {key: splitter for key, splitter in self._splitters.items() if key[0] != rank}
