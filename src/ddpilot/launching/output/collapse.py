# SPDX-License-Identifier: Apache-2.0
"""Show a line once when several ranks print it, without ever changing the order of one rank's lines."""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

WINDOW_S = 0.05
"""How long a line waits for the same line from other ranks."""

_MAX_WAITING = 2000


@dataclass
class Waiting:
    """A line on its way to the screen, and the ranks that printed it."""

    stream: str
    text: str
    since_s: float
    number: int
    ranks: list[int] = field(default_factory=list)


class Collapser:
    """Collects lines of `num_ranks` ranks, whatever their numbers. Times: seconds of any clock that never goes back."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._queue: deque[Waiting] = deque()
        self._by_text: dict[tuple[str, str], list[Waiting]] = {}  # each list by number
        self._last_number: dict[int, int] = {}
        self._count = 0

    def add(self, rank: int, stream: str, text: str, now_s: float) -> None:
        """Take a line: join the same line of other ranks if that comes after all that this rank has printed."""
        same = self._by_text.setdefault((stream, text), [])
        # A rank may print one line thousands of times, so no search from the start.
        place = bisect.bisect_right(same, self._last_number.get(rank, -1), key=lambda each: each.number)
        if place < len(same):
            entry = same[place]
        else:
            entry = Waiting(stream, text, now_s, self._count)
            self._count += 1
            self._queue.append(entry)
            same.append(entry)
        entry.ranks.append(rank)
        self._last_number[rank] = entry.number

    def ready(self, now_s: float) -> Iterator[Waiting]:
        """The lines that need not wait any longer, in order."""
        while self._queue:
            head = self._queue[0]
            is_complete = len(head.ranks) == self._num_ranks
            if not is_complete and now_s - head.since_s < WINDOW_S and len(self._queue) <= _MAX_WAITING:
                return
            yield self._pop()

    def flush(self) -> Iterator[Waiting]:
        """Everything that waits, in order."""
        while self._queue:
            yield self._pop()

    def next_due_s(self) -> float | None:
        """When the first waiting line is due; None if none waits."""
        return self._queue[0].since_s + WINDOW_S if self._queue else None

    def _pop(self) -> Waiting:
        entry = self._queue.popleft()
        same = self._by_text[entry.stream, entry.text]
        same.remove(entry)
        if not same:
            del self._by_text[entry.stream, entry.text]
        return entry
