# SPDX-License-Identifier: Apache-2.0
"""Split streams of bytes into lines, merge identical lines of several ranks, and keep each rank's last lines."""

from __future__ import annotations

import bisect
import heapq
import re
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

_MAX_LINE_BYTES = 64 * 1024
_CURSOR_MOVES = re.compile(rb"\x1b\[\d*[A-HJK]")  # nested bars move the cursor, which would garble other ranks' lines


class Line(NamedTuple):
    """A complete line without its line break. `is_progress`: it is the last state of a progress bar."""

    text: str
    is_progress: bool = False


class Lines(NamedTuple):
    """Complete lines without their line breaks, and without the last state of a progress bar."""

    texts: list[str]


class Progress(NamedTuple):
    """Current text of a progress bar that redraws itself with carriage returns."""

    text: str


class LineSplitter:
    """Splits the bytes of one stream of one rank. Memory is bounded: a line over 64 KiB is split into pieces."""

    def __init__(self) -> None:
        self._pending = b""

    def feed(self, data: bytes) -> list[Lines | Line | Progress]:
        """The lines that `data` completes, and the current progress bar if it is unfinished."""
        without_moves = _CURSOR_MOVES.sub(b"", data)
        moved = len(without_moves) != len(data)
        complete, end, rest = (self._pending + without_moves).rpartition(b"\n")
        found: list[Lines | Line | Progress] = []
        if moved or b"\r" in complete:
            found += [_line(raw) for raw in complete.split(b"\n") if raw.strip() or not moved] if end else []
        elif end:
            found.append(Lines(complete.decode(errors="replace").split("\n")))
        while len(rest) > _MAX_LINE_BYTES and b"\r" not in rest:
            found.append(_line(rest[:_MAX_LINE_BYTES]))
            rest = rest[_MAX_LINE_BYTES:]
        if b"\r" in rest:
            shown = _last_segment(rest)
            if shown:
                found.append(Progress(shown.decode(errors="replace")))
            rest = (
                b"\r" + rest[rest.rindex(b"\r") + 1 :][-_MAX_LINE_BYTES:] if not rest.endswith(b"\r") else b"\r" + shown
            )
        self._pending = rest
        return found

    def unfinished(self, max_chars: int) -> str:
        """The end of the current line if it has no newline yet; "" if there is none, or if it is a progress bar."""
        if b"\r" in self._pending:
            return ""
        return self._pending[-4 * max_chars :].decode(errors="replace")[-max_chars:]

    def close(self) -> list[Lines | Line | Progress]:
        """The last line, if it had no line break."""
        rest, self._pending = self._pending, b""
        return [_line(rest)] if rest.strip() else []


def texts_of(pieces: Iterable[Lines | Line | Progress]) -> Iterator[str]:
    """Yield the complete lines of `pieces`."""
    for piece in pieces:
        if isinstance(piece, Lines):
            yield from piece.texts
        elif isinstance(piece, Line):
            yield piece.text


def _line(raw: bytes) -> Line:
    body = raw.rstrip(b"\r")
    text = _last_segment(body) if b"\r" in body else body
    return Line(text.decode(errors="replace"), is_progress=b"\r" in body)


def _last_segment(raw: bytes) -> bytes:
    return next((segment for segment in reversed(raw.split(b"\r")) if segment.strip()), b"")


_MAX_LINES = 200
_MAX_BYTES = 1 << 14


class TailBuffer:
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


WINDOW_S = 0.05
"""Seconds that a line waits for the same line from other ranks."""

_MAX_WAITING = 2000
_NOWHERE = (0, -1)


@dataclass(eq=False, slots=True)
class PendingLine:
    """A line waiting to be shown, and the ranks that printed it.

    `place` is its sort key: the number of lines above it, then the first rank that printed it. If ranks print the same
    number of lines, some of which differ, identical lines therefore have the same height.
    """

    stream: str
    text: str
    since_s: float
    place: tuple[int, int]
    ranks: list[int]


class LineMerger:
    """Collects lines of `num_ranks` ranks, numbered in any way. Times are seconds of any monotonic clock."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._begun: dict[int, deque[PendingLine]] = {}
        """Pending lines by the rank that printed them first: each sorted by place, and by age."""
        self._tops: list[tuple[int, int]] = []  # heap of the places of the first line of each of them
        self._num_waiting = 0
        self._by_text: dict[str, dict[str, list[PendingLine]]] = {}
        """By stream and text: lines that not all ranks have printed, each list sorted by place."""
        self._last: dict[int, tuple[int, int]] = {}  # by rank

    def add(self, rank: int, stream: str, text: str, now_s: float) -> None:
        """Add a line; merge it with the same line of other ranks if that is below all lines of this rank."""
        self.add_lines(rank, stream, (text,), now_s)

    def add_lines(self, rank: int, stream: str, texts: Iterable[str], now_s: float) -> None:
        """Add lines as `add` does."""
        begun = self._begun.setdefault(rank, deque())
        by_text = self._by_text.setdefault(stream, {})
        last, num_ranks, num_before = self._last.get(rank, _NOWHERE), self._num_ranks, len(begun)
        for text in texts:
            same = by_text.get(text)
            if same is not None:
                index = _first_after(same, last)
                if index < len(same):
                    entry = same[index]
                    last = entry.place
                    entry.ranks.append(rank)
                    if len(entry.ranks) == num_ranks:
                        _remove(by_text, same, index)
                    continue
            last = (last[0] + 1, rank)
            entry = PendingLine(stream, text, now_s, last, [rank])
            begun.append(entry)
            if num_ranks == 1:
                continue
            if same is None:
                by_text[text] = [entry]
            else:
                _insert(same, entry)
        self._last[rank] = last
        self._num_waiting += len(begun) - num_before
        if begun and not num_before:
            heapq.heappush(self._tops, begun[0].place)

    def ready(self, now_s: float) -> list[PendingLine]:
        """Remove and return, in order, the lines that need not wait any longer."""
        found: list[PendingLine] = []
        has_due = None
        while self._tops:
            entry = self._begun[self._tops[0][1]][0]
            if len(entry.ranks) < self._num_ranks and self._num_waiting <= _MAX_WAITING:
                if has_due is None:
                    due_s = self.next_due_s()
                    has_due = due_s is not None and due_s <= now_s
                if not has_due:
                    break
            if entry.since_s + WINDOW_S <= now_s:
                has_due = None
            found.append(self._pop())
        return found

    def flush(self) -> list[PendingLine]:
        """Remove and return all waiting lines, in order."""
        return [self._pop() for _ in range(self._num_waiting)]

    def next_due_s(self) -> float | None:
        """When the oldest waiting line is due; None if no line is waiting."""
        oldest_s = min((begun[0].since_s for begun in self._begun.values() if begun), default=None)
        return None if oldest_s is None else oldest_s + WINDOW_S

    def _pop(self) -> PendingLine:
        begun = self._begun[self._tops[0][1]]
        entry = begun.popleft()
        if begun:
            heapq.heapreplace(self._tops, begun[0].place)
        else:
            heapq.heappop(self._tops)
        self._num_waiting -= 1
        if len(entry.ranks) < self._num_ranks:
            by_text = self._by_text[entry.stream]
            # `entry` is the topmost waiting line, so it is the first one with its text.
            _remove(by_text, by_text[entry.text], 0)
        return entry


def _place(entry: PendingLine) -> tuple[int, int]:
    return entry.place


def _first_after(entries: list[PendingLine], place: tuple[int, int]) -> int:
    """Index of the first of `entries` below `place`. Uses bisection: a rank may print one line thousands of times."""
    if entries[0].place > place:
        return 0
    return len(entries) if entries[-1].place <= place else bisect.bisect_right(entries, place, key=_place)


def _insert(entries: list[PendingLine], entry: PendingLine) -> None:
    if entries[-1].place < entry.place:
        entries.append(entry)
    else:
        bisect.insort(entries, entry, key=_place)


def _remove(by_text: dict[str, list[PendingLine]], same: list[PendingLine], index: int) -> None:
    if len(same) == 1:
        del by_text[same[0].text]
    else:
        del same[index]
