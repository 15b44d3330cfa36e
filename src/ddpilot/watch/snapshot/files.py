# SPDX-License-Identifier: Apache-2.0
"""Read the files that a rank writes in the job's folder: its ring, guard's journal, and its stacks.

Ring and journal are read repeatedly: new records, and those that were unfinished before.
"""

from __future__ import annotations

import linecache
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil

from ddpilot.environments.private_files import read_own_text
from ddpilot.errors import RecordError
from ddpilot.record.flight_ring.log import REDUCING, Collective, GroupKey, GroupOfRanks, RankLog
from ddpilot.record.flight_ring.reader import read_ring
from ddpilot.record.journal import Entry, read_journal
from ddpilot.record.main_thread import RUNS, WATCH_SIGNAL, ask_stacks, first_stack, stacks_path
from ddpilot.user_files import CodeLine
from ddpilot.watch.snapshot.model import PythonStack

NUM_HELD = 2048
"""Maximum number of collectives held per rank; far fewer can still get an end or a reduce-op."""

_NUM_REREAD = 512
"""Older unfinished collectives are not read again; otherwise each poll would read all that follow them."""

_LATE_NS = 300_000_000
"""The reduce-op of a collective has been written this long after its start."""

_SETTLED_NS = 1_000_000_000
"""The end and the reduce-op of a completed collective have been written this long after its start."""

_NUM_WRITERS = 7
"""More damaged records than this cannot be records that are just being written."""


class RingFollower:
    """The contents of the ring at `path` that are still needed; `forget` drops the rest."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._held: dict[int, Collective] = {}
        self._started_ns = self._read_ns = 0
        self.fault = ""
        """Why the ring can no longer be read; empty if it can, and before the rank has started."""

    def read(self) -> RankLog | None:
        """Return the log with the collectives that are held, oldest first; None if no ring can be read."""
        newest = max(self._held, default=0)
        again = [index for index, entry in self._held.items() if self._may_change(entry)]
        after = max(min([newest, *(index - 1 for index in again)]), newest - _NUM_REREAD)
        self._read_ns = time.monotonic_ns()
        try:
            log = read_ring(self._path, after=after) if newest else read_ring(self._path, newest=NUM_HELD)
        except (RecordError, OSError) as error:
            self.fault = describe_fault(error, has_been_read=self._started_ns > 0)
            return None
        self.fault = f"{log.num_torn} records are damaged" if log.num_torn > _NUM_WRITERS else ""
        if log.started_ns != self._started_ns:  # the rank was restarted
            self._held, self._started_ns = {}, log.started_ns
            log = read_ring(self._path, newest=NUM_HELD) if newest else log
        self._held.update((entry.index, entry) for entry in log.collectives)
        for index in sorted(self._held)[:-NUM_HELD]:
            del self._held[index]
        return replace(log, collectives=tuple(self._held[index] for index in sorted(self._held)))

    def _may_change(self, entry: Collective) -> bool:
        """True if `entry` was unfinished or may still get its reduce-op. Decoding entries again is the slowest part."""
        if entry.state == "begun":
            return True
        return entry.reduce_op is None and entry.op in REDUCING and entry.start_ns > self._read_ns - _LATE_NS

    def forget(self, passed: Mapping[GroupKey, int], now_ns: int, num_kept: int) -> None:
        """Drop collectives that all ranks of their group have `passed`, except for the newest `num_kept`."""
        for index in sorted(self._held)[:-num_kept]:
            entry = self._held[index]
            is_settled = entry.state != "begun" and now_ns - entry.start_ns > _SETTLED_NS
            is_passed = entry.seq is None or entry.group is None or entry.seq < passed.get(entry.group.key, -1)
            if is_settled and is_passed:
                del self._held[index]


def describe_fault(error: RecordError | OSError, *, has_been_read: bool) -> str:
    """Return why a file written by a rank cannot be read; empty if it does not exist yet."""
    if isinstance(error, FileNotFoundError):
        return "the file is gone, deleted or moved away" if has_been_read else ""
    return error.found if isinstance(error, RecordError) else str(error.strerror or error)


def passed_by_all(logs: Iterable[RankLog]) -> dict[GroupKey, int]:
    """Return by group the number up to which all of its ranks in `logs` have begun its collectives."""
    reached: dict[GroupKey, dict[int, int]] = {}
    for log in logs:
        by_group: dict[int, tuple[GroupOfRanks, int]] = {}  # one hash per group: it may have thousands of ranks
        for entry in log.collectives:
            if entry.seq is not None and entry.group is not None:
                number = id(entry.group)
                known = by_group.get(number)
                if known is None or known[1] < entry.seq:
                    by_group[number] = entry.group, entry.seq
        for group, seq in by_group.values():
            by_rank = reached.setdefault(group.key, {})
            by_rank[log.rank] = max(by_rank.get(log.rank, -1), seq)
    return {key: min(by_rank.values()) for key, by_rank in reached.items()}


NUM_ENTRIES_HELD = 512
"""Number of a rank's newest entries that are kept."""


class JournalFollower:
    """Reads the journal at `path` incrementally. `held`: its newest entries, oldest first."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._after = self._pid = 0
        self.held: deque[Entry] = deque(maxlen=NUM_ENTRIES_HELD)
        self.fault = ""
        """Why the journal can no longer be read; empty if it can."""

    def read(self) -> tuple[Entry, ...]:
        """Return the entries since the last call; empty if there is no journal (yet)."""
        try:
            journal = read_journal(self._path, after=self._after)
            if journal.pid != self._pid and self._after:  # the rank was restarted
                journal = read_journal(self._path)
        except (RecordError, OSError) as error:
            self.fault = describe_fault(error, has_been_read=self._pid > 0)
            return ()
        self.fault = ""
        entries = journal.entries
        self._after = max((entry.index for entry in entries), default=self._after if journal.pid == self._pid else 0)
        self._pid = journal.pid
        self.held.extend(entries)
        return entries


_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)$')
_TEXTLESS = ("Cell In[", "<")


StackSource = Callable[[Sequence[int]], Mapping[int, PythonStack]]
"""Returns the stack of each rank that responds."""


def take_stacks(folder: Path, pids: Mapping[int, int]) -> dict[int, PythonStack]:
    """Return the main thread's stack of each rank in `pids` that responds, by itself or to a signal, within 2 s."""

    def send_signal(rank: int) -> None:
        with suppress(OSError, psutil.Error):  # it has ended
            psutil.Process(pids[rank]).send_signal(WATCH_SIGNAL)

    asked_ns = time.monotonic_ns()
    return {rank: parse_stack(text, asked_ns) for rank, text in ask_stacks(folder, pids, send_signal).items()}


def read_stack(folder: Path, rank: int) -> PythonStack | None:
    """Return the stack that `rank` wrote last; None if it was never requested."""
    path = stacks_path(folder, rank)
    try:
        text, age_ns = read_own_text(path), max(0, time.time_ns() - os.lstat(path).st_mtime_ns)
    except OSError:
        return None
    return parse_stack(first_stack(text), time.monotonic_ns() - age_ns) if text else None


def parse_stack(text: str, taken_ns: int) -> PythonStack:
    """Parse the fault handler's output for one thread."""
    lines = text.splitlines()
    frames = (_FRAME.match(line) for line in lines)
    found = tuple(_frame(frame) for frame in frames if frame is not None)
    return PythonStack(taken_ns=taken_ns, frames=found, is_running=RUNS in lines)


def _frame(found: re.Match[str]) -> CodeLine:
    file, line = found["file"], int(found["line"])
    text = "" if file.startswith(_TEXTLESS) else linecache.getline(file, line).strip()
    return CodeLine(file, line, found["function"], text)
