# SPDX-License-Identifier: Apache-2.0
"""A cell whose ranks have called different collectives, which none of them can know: read from their rings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from ddpilot.errors import RecordError
from ddpilot.findings.words import render_ranks
from ddpilot.record.comparing import Difference, find_difference
from ddpilot.record.hook import ring_path
from ddpilot.record.log import Collective, RankLog
from ddpilot.record.reading import read_ring

_AFTER_S = 2.0
_INTERVAL_S = 1.0
_NUM_NEWEST = 512


class Desync:
    """Looks every second, two seconds into a cell at the earliest, until there is something to `note`: once.

    `folder`: of the ranks' rings; `since_s`: when the cell began, on the monotonic clock; what is older is not said.
    """

    def __init__(self, ranks: Iterable[int], *, folder: Path, since_s: float, note: Callable[[str], None]) -> None:
        self._ranks = tuple(ranks)
        self._folder = folder
        self._since_ns = int(since_s * 1e9)
        self._note = note
        self._due_s = since_s + _AFTER_S

    def look(self, busy: Sequence[int], now_s: float) -> None:
        """Say it where the ranks differ while some of them are `busy`."""
        if now_s < self._due_s or not busy:
            return
        self._due_s = now_s + _INTERVAL_S
        text = self.explain()
        if text:
            self._due_s = float("inf")
            self._note(f"{text}; press stop, and let all ranks call the same")

    def explain(self) -> str:
        """Where the ranks differ, in words; empty where they do not."""
        difference = find_difference(self._read())
        if difference is None or max(entry.start_ns for entry in difference.by_rank.values()) < self._since_ns:
            return ""
        return describe_difference(difference)

    def _read(self) -> Iterator[RankLog]:
        for rank in self._ranks:
            try:
                yield read_ring(ring_path(self._folder, rank), newest=_NUM_NEWEST)
            except (RecordError, OSError):  # nothing is recorded there
                continue


def describe_difference(difference: Difference) -> str:
    """One sentence without its end: which collective, what each rank called, and from which line."""
    name = "default group" if difference.group.name == "0" else f"group {difference.group.name!r}"
    sides = []
    for value, ranks in difference.clash.said:
        entry = difference.by_rank[ranks[0]]
        what = entry.op if difference.clash.aspect == "op" else f"{entry.op} ({value})"
        sides.append(f"{render_ranks(ranks)} called {what}{_where(entry)}")
    return f"collective {difference.seq} of the {name} is not the same on all ranks: {', '.join(sides)}"


def _where(entry: Collective) -> str:
    bucket = ""
    if entry.ddp is not None and entry.ddp.index is not None:
        bucket = f" for gradient bucket {entry.ddp.index}"
    elif entry.ddp is not None:
        bucket = f" for DDP's {entry.ddp.what}"
    line = entry.line
    if line is None or not line.file:
        return bucket
    text = f" ({line.text})" if line.text else ""
    return f"{bucket} in {line.file}, line {line.line}{text}"
