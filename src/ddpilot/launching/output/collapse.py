# SPDX-License-Identifier: Apache-2.0
"""Merge identical lines of several ranks without changing the order of any rank's lines."""

from __future__ import annotations

import bisect
import heapq
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

WINDOW_S = 0.05
"""Seconds that a line waits for the same line from other ranks."""

_MAX_WAITING = 2000
_NOWHERE = (0, -1)


@dataclass(eq=False, slots=True)
class Waiting:
    """A line waiting to be shown, and the ranks that printed it.

    `place` is its sort key: the number of lines above it, then the first rank that printed it. If ranks print the same
    number of lines, some of which differ, identical lines therefore have the same height.
    """

    stream: str
    text: str
    since_s: float
    place: tuple[int, int]
    ranks: list[int]
    is_shown: bool = False


class Collapser:
    """Collects lines of `num_ranks` ranks, numbered in any way. Times are seconds of any monotonic clock."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._rows: dict[int, list[Waiting]] = {}  # by height, each sorted by place
        self._heights: list[int] = []  # heap of the keys of `_rows`
        self._num_waiting = 0
        self._by_age: deque[Waiting] = deque()
        self._by_text: dict[tuple[str, str], list[Waiting]] = {}  # each sorted by place
        self._last: dict[int, tuple[int, int]] = {}  # by rank

    def add(self, rank: int, stream: str, text: str, now_s: float) -> None:
        """Add a line; merge it with the same line of other ranks if that is below all lines of this rank."""
        last = self._last.get(rank, _NOWHERE)
        same = self._by_text.get((stream, text))
        entry = None if same is None else _first_after(same, last)
        if entry is not None:
            entry.ranks.append(rank)
            self._last[rank] = entry.place
            return
        height = last[0] + 1
        place = self._last[rank] = (height, rank)
        entry = Waiting(stream, text, now_s, place, [rank])
        self._by_age.append(entry)
        self._num_waiting += 1
        if same is None:
            self._by_text[stream, text] = [entry]
        else:
            _insert(same, entry)
        row = self._rows.get(height)
        if row is None:
            self._rows[height] = [entry]
            heapq.heappush(self._heights, height)
        else:
            _insert(row, entry)

    def ready(self, now_s: float) -> Iterator[Waiting]:
        """Yield, in order, the lines that need not wait any longer, and remove them."""
        while self._heights:
            is_complete = len(self._rows[self._heights[0]][0].ranks) == self._num_ranks
            if not is_complete and self._num_waiting <= _MAX_WAITING:
                due_s = self.next_due_s()
                if due_s is None or now_s < due_s:
                    return
            yield self._pop()

    def flush(self) -> Iterator[Waiting]:
        """Yield and remove all waiting lines, in order."""
        while self._heights:
            yield self._pop()

    def next_due_s(self) -> float | None:
        """When the oldest waiting line is due; None if no line is waiting."""
        by_age = self._by_age
        while by_age and by_age[0].is_shown:
            by_age.popleft()
        return by_age[0].since_s + WINDOW_S if by_age else None

    def _pop(self) -> Waiting:
        height = self._heights[0]
        row = self._rows[height]
        entry = row.pop(0)
        if not row:
            del self._rows[height]
            heapq.heappop(self._heights)
        entry.is_shown = True
        self._num_waiting -= 1
        same = self._by_text[entry.stream, entry.text]
        del same[0]  # `entry` is the topmost waiting line, so it is the first one with its text
        if not same:
            del self._by_text[entry.stream, entry.text]
        return entry


def _place(entry: Waiting) -> tuple[int, int]:
    return entry.place


def _first_after(entries: list[Waiting], place: tuple[int, int]) -> Waiting | None:
    """First of `entries` below `place`. Uses bisection, since a rank may print the same line thousands of times."""
    if entries[-1].place <= place:
        return None
    return entries[bisect.bisect_right(entries, place, key=_place)]


def _insert(entries: list[Waiting], entry: Waiting) -> None:
    if entries[-1].place < entry.place:
        entries.append(entry)
    else:
        bisect.insort(entries, entry, key=_place)
