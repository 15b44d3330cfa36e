# SPDX-License-Identifier: Apache-2.0
"""Adapters between a session and `Watcher`: its ranks as seen by the watcher, and the findings of one cell."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import dropwhile
from pathlib import Path

from ddpilot.errors import RankError, RecordError, WatchError
from ddpilot.findings.text import render_ranks
from ddpilot.launching.rank_reports import Exited, Raised
from ddpilot.record.flight_ring.log import Collective, RankLog
from ddpilot.record.flight_ring.reader import count_begun_in, find_waiting, read_newest
from ddpilot.record.hook import ring_path
from ddpilot.session.kernels.states import RankStates
from ddpilot.watch.companion import Watcher

_AFTER_S = 3.0
_WAITS_S = 2.0
_INTERVAL_S = 1.0


class WatchedRank:
    """One rank of a session, whose program is the current cell. `pid` returns the process id, also after its end."""

    def __init__(self, rank: int, states: RankStates, pid: Callable[[int], int | None]) -> None:
        self.rank = rank
        self._states = states
        self._pid = pid

    @property
    def pid(self) -> int | None:
        """Process id, also after the process has ended."""
        return self._pid(self.rank)

    @property
    def exited(self) -> Exited | None:
        """Exit status of its process; None while it is running."""
        return self._states.exited.get(self.rank)

    @property
    def raised(self) -> Raised | None:
        """The exception that the cell raised on this rank; None if it raised none."""
        return self._states.raised.get(self.rank)

    @property
    def has_returned(self) -> bool:
        """True if the cell has ended on this rank without an error."""
        return self.exited is None and self.raised is None and self.rank not in self._states.busy


class FindingsObserver:
    """Reports the findings of `watcher` through `note` while the cell `name` runs on all ranks.

    `since_s`: the start of the cell (monotonic clock); `sources`: its text, by the file name in its code objects.
    """

    def __init__(
        self, watcher: Watcher, name: str, since_s: float, sources: Mapping[str, str], note: Callable[[str], None]
    ) -> None:
        self._watcher = watcher
        self._note = note
        watcher.resume(name, int(since_s * 1e9), {file: as_counted(text) for file, text in sources.items()})

    def look(self, busy: Sequence[int], now_s: float) -> WatchError | None:  # noqa: ARG002 - for other observers
        """Show new findings; return the error to end the cell with, if any. Called at least twice per second."""
        return self._watcher.take(self._note)

    def explain(self, error: RankError) -> None:
        """Add the findings to the error with which the cell ends."""
        self._watcher.explain(error)

    def close(self, *, is_ok: bool) -> WatchError | None:
        """The cell is over: if it succeeded, show new findings; return the error to end the cell with, if any."""
        return self._watcher.pause(self._note, is_ok=is_ok)


def as_counted(code: str) -> str:
    """Return the code of a cell without leading blank lines, so that line numbers match IPython's."""
    return "".join(dropwhile(lambda line: not line.strip(), code.splitlines(keepends=True)))


class SubsetObserver:
    """Checks once per second, starting three seconds into a cell, and calls `note` at most once.

    `ranks`: the ranks that run the cell; `others`: the remaining ranks; `folder`: the folder of their flight rings;
    `name`: the name of the cell, such as "Cell In[7]".
    """

    def __init__(
        self, ranks: Iterable[int], others: Iterable[int], *, folder: Path, name: str, note: Callable[[str], None]
    ) -> None:
        self._ranks = tuple(ranks)
        self._others = frozenset(others)
        self._folder = folder
        self._name = name
        self._note = note
        self._due_s: float | None = None

    def look(self, busy: Sequence[int], now_s: float) -> None:
        """Warn if one of the `busy` ranks has been in such a collective for at least two seconds."""
        if self._due_s is None:
            self._due_s = now_s + _AFTER_S
        if now_s < self._due_s:
            return
        self._due_s = now_s + _INTERVAL_S
        stuck: dict[tuple[str, str], list[int]] = {}
        for rank, pending in self._pending(busy, now_s):
            missing = self._missing(pending)
            if missing:
                stuck.setdefault((self._describe(pending), self._need(pending, missing)), []).append(rank)
        if stuck:
            (where, need), ranks = next(iter(stuck.items()))
            self._due_s = float("inf")
            self._note(
                f"{render_ranks(ranks)} wait{'s' * (len(ranks) == 1)} in {where}, {need}, but the cell runs on "
                f"{render_ranks(self._ranks)} only: interrupt it and run it on all ranks"
            )

    def explain(self, error: RankError) -> None:
        """Do nothing: a cell that runs on some of the ranks treats ranks differently on purpose."""

    def close(self, *, is_ok: bool) -> None:
        """Do nothing."""

    def _pending(self, busy: Sequence[int], now_s: float) -> Iterator[tuple[int, Collective]]:
        for rank in busy:
            log = self._read(rank)
            pending = find_waiting(log) if log is not None else None
            if pending is not None and now_s - pending.start_ns / 1e9 >= _WAITS_S:
                yield rank, pending

    def _missing(self, pending: Collective) -> frozenset[int]:
        """Return the ranks outside the cell that `pending` needs; none if one of them may already have begun it."""
        group = pending.group
        if group is None or not group.ranks:
            return frozenset()
        needed = frozenset(group.ranks)
        if pending.is_p2p:
            needed = frozenset() if pending.peer is None else frozenset({group.ranks[pending.peer]})
        missing = needed & self._others
        return frozenset() if any(self._may_have_begun(rank, pending) for rank in missing) else missing

    def _may_have_begun(self, rank: int, pending: Collective) -> bool:
        log, group = self._read(rank), pending.group
        num_begun = count_begun_in(log, group.name) if log is not None and group is not None else None
        if num_begun is None or pending.seq is None:
            return not pending.is_watched
        return num_begun > pending.seq

    def _read(self, rank: int) -> RankLog | None:
        try:
            return read_newest(ring_path(self._folder, rank))
        except (RecordError, OSError):  # no ring: collectives are not recorded
            return None

    def _describe(self, pending: Collective) -> str:
        line = pending.line
        if line is None or not line.file:
            return f"{pending.op} of {self._name}"
        place = line.file if line.file.startswith("Cell In[") else f"{self._name}, {line.file}"
        return f"{pending.op} of {place}, line {line.line}"

    def _need(self, pending: Collective, missing: frozenset[int]) -> str:
        if pending.is_p2p:
            return f"which {render_ranks(missing)} must answer"
        return f"which {'every rank' if missing == self._others else render_ranks(missing)} must call"


CellObserver = FindingsObserver | SubsetObserver
"""Watches from outside what the ranks of a cell do together."""
