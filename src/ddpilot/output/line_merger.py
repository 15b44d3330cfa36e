# SPDX-License-Identifier: Apache-2.0
"""Merge identical lines of several ranks without changing the order of any rank's lines."""

from __future__ import annotations

import bisect
import heapq
from collections import deque
from collections.abc import Iterable
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


class Collapser:
    """Collects lines of `num_ranks` ranks, numbered in any way. Times are seconds of any monotonic clock."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._begun: dict[int, deque[Waiting]] = {}
        """Waiting lines by the rank that printed them first: each sorted by place, and by age."""
        self._tops: list[tuple[int, int]] = []  # heap of the places of the first line of each of them
        self._num_waiting = 0
        self._by_text: dict[str, dict[str, list[Waiting]]] = {}
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
            entry = Waiting(stream, text, now_s, last, [rank])
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

    def ready(self, now_s: float) -> list[Waiting]:
        """Remove and return, in order, the lines that need not wait any longer."""
        found: list[Waiting] = []
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

    def flush(self) -> list[Waiting]:
        """Remove and return all waiting lines, in order."""
        return [self._pop() for _ in range(self._num_waiting)]

    def next_due_s(self) -> float | None:
        """When the oldest waiting line is due; None if no line is waiting."""
        oldest_s = min((begun[0].since_s for begun in self._begun.values() if begun), default=None)
        return None if oldest_s is None else oldest_s + WINDOW_S

    def _pop(self) -> Waiting:
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


def _place(entry: Waiting) -> tuple[int, int]:
    return entry.place


def _first_after(entries: list[Waiting], place: tuple[int, int]) -> int:
    """Index of the first of `entries` below `place`. Uses bisection: a rank may print one line thousands of times."""
    if entries[0].place > place:
        return 0
    return len(entries) if entries[-1].place <= place else bisect.bisect_right(entries, place, key=_place)


def _insert(entries: list[Waiting], entry: Waiting) -> None:
    if entries[-1].place < entry.place:
        entries.append(entry)
    else:
        bisect.insort(entries, entry, key=_place)


def _remove(by_text: dict[str, list[Waiting]], same: list[Waiting], index: int) -> None:
    if len(same) == 1:
        del by_text[same[0].text]
    else:
        del same[index]
