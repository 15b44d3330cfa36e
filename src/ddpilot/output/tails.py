# SPDX-License-Identifier: Apache-2.0
"""Keep the last lines of each rank's output for error messages."""

from __future__ import annotations

from collections import deque

from ddpilot.output.lines import LineSplitter, texts_of

_MAX_LINES = 200
_MAX_BYTES = 1 << 14


class Tails:
    """Keeps the last 200 lines that each rank wrote, including output that bypasses Python."""

    def __init__(self) -> None:
        self._splitters: dict[tuple[int, str], LineSplitter] = {}
        self._lines: dict[int, deque[str]] = {}

    def feed(self, rank: int, stream: str, data: bytes) -> None:
        """Add output of a rank. Only the last 16 KiB of `data` are split into lines, which is the expensive part."""
        splitter = self._splitters.setdefault((rank, stream), LineSplitter())
        kept = self._lines.setdefault(rank, deque(maxlen=_MAX_LINES))
        kept.extend(texts_of(splitter.feed(data[-_MAX_BYTES:])))

    def last_lines(self, rank: int) -> tuple[str, ...]:
        """Return the last lines of a rank, oldest first."""
        return tuple(self._lines.get(rank, ()))

    def forget(self, rank: int) -> None:
        """Discard the output of a rank that was restarted, including an unfinished line."""
        self._lines.pop(rank, None)
        self._splitters = {key: splitter for key, splitter in self._splitters.items() if key[0] != rank}
