# SPDX-License-Identifier: Apache-2.0
"""Show a line once when several ranks print it, without ever changing the order of one rank's lines."""

from __future__ import annotations

import bisect
import heapq
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

WINDOW_S = 0.05
"""How long a line waits for the same line from other ranks."""

_MAX_WAITING = 2000
_NOWHERE = (0, -1)


@dataclass
class Waiting:
    """A line on its way to the screen, and the ranks that printed it.

    `place`: how many lines stand above it, then the rank that was first to print it. So ranks that print as many lines
    as each other, some of them different, have the lines that are the same at the same height.
    """

    stream: str
    text: str
    since_s: float
    place: tuple[int, int]
    ranks: list[int] = field(default_factory=list)
    is_shown: bool = False


class Collapser:
    """Collects lines of `num_ranks` ranks, whatever their numbers. Times: seconds of any clock that never goes back."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._heap: list[tuple[tuple[int, int], Waiting]] = []
        self._by_age: deque[Waiting] = deque()
        self._by_text: dict[tuple[str, str], list[Waiting]] = {}  # each list by place
        self._last: dict[int, tuple[int, int]] = {}  # by rank

    def add(self, rank: int, stream: str, text: str, now_s: float) -> None:
        """Take a line: join the same line of other ranks if that comes after all that this rank has printed."""
        same = self._by_text.setdefault((stream, text), [])
        last = self._last.get(rank, _NOWHERE)
        # A rank may print one line thousands of times, so no search from the start.
        index = bisect.bisect_right(same, last, key=lambda each: each.place)
        if index < len(same):
            entry = same[index]
        else:
            entry = Waiting(stream, text, now_s, (last[0] + 1, rank))
            heapq.heappush(self._heap, (entry.place, entry))
            self._by_age.append(entry)
            bisect.insort(same, entry, key=lambda each: each.place)
        entry.ranks.append(rank)
        self._last[rank] = entry.place

    def ready(self, now_s: float) -> Iterator[Waiting]:
        """The lines that need not wait any longer, in order."""
        while self._heap:
            is_complete = len(self._heap[0][1].ranks) == self._num_ranks
            due = self.next_due_s()
            is_due = due is not None and now_s >= due
            if not is_complete and not is_due and len(self._heap) <= _MAX_WAITING:
                return
            yield self._pop()

    def flush(self) -> Iterator[Waiting]:
        """Everything that waits, in order."""
        while self._heap:
            yield self._pop()

    def next_due_s(self) -> float | None:
        """When the line that has waited longest is due; None if none waits."""
        while self._by_age and self._by_age[0].is_shown:
            self._by_age.popleft()
        return self._by_age[0].since_s + WINDOW_S if self._by_age else None

    def _pop(self) -> Waiting:
        _, entry = heapq.heappop(self._heap)
        entry.is_shown = True
        same = self._by_text[entry.stream, entry.text]
        same.remove(entry)
        if not same:
            del self._by_text[entry.stream, entry.text]
        return entry
