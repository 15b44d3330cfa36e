# SPDX-License-Identifier: Apache-2.0
"""Read a rank's ring again and again: each time only what is new, and what was not over before."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from ddpilot.errors import RecordError
from ddpilot.record.agreement import REDUCING
from ddpilot.record.log import Collective, GroupOfRanks, RankLog
from ddpilot.record.reading import read_ring

NUM_HELD = 2048
"""Collectives of a rank that are held at most: what its reduce-ops and ends are still to come for is far less."""

_NUM_REREAD = 512
"""An older one that never ends is not read again, or each look would read all since."""

_LATE_NS = 300_000_000
"""So long after its start what a collective reduces has been written."""

_SETTLED_NS = 1_000_000_000
"""After so long the ends and the reduce-op of a collective that was over have been written."""

_NUM_WRITERS = 7
"""More records are not being written at one moment."""

Key = tuple[str, int, int, tuple[int, ...]]
"""One incarnation of a group."""


class LogReader:
    """What the ring at `path` holds, as far as it still matters: `forget` says what does not."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._held: dict[int, Collective] = {}
        self._started_ns = self._read_ns = 0
        self.fault = ""
        """Why there is nothing to read any more; empty where there is, and before the rank has begun."""

    def read(self) -> RankLog | None:
        """The log with the collectives that are held, oldest first; None while there is none that can be read."""
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
        if log.started_ns != self._started_ns:  # the rank was started anew
            self._held, self._started_ns = {}, log.started_ns
            log = read_ring(self._path, newest=NUM_HELD) if newest else log
        self._held.update((entry.index, entry) for entry in log.collectives)
        for index in sorted(self._held)[:-NUM_HELD]:
            del self._held[index]
        return replace(log, collectives=tuple(self._held[index] for index in sorted(self._held)))

    def _may_change(self, entry: Collective) -> bool:
        """Whether it was not over, or so new that its reduce-op was not there yet. Decoding it again takes longest."""
        if entry.state == "begun":
            return True
        return entry.reduce_op is None and entry.op in REDUCING and entry.start_ns > self._read_ns - _LATE_NS

    def forget(self, passed: dict[Key, int], now_ns: int, num_kept: int) -> None:
        """Let go of what all ranks of its group have `passed`, but for the newest `num_kept`."""
        for index in sorted(self._held)[:-num_kept]:
            entry = self._held[index]
            is_settled = entry.state != "begun" and now_ns - entry.start_ns > _SETTLED_NS
            if is_settled and (entry.seq is None or entry.seq < passed.get(key_of(entry), -1)):
                del self._held[index]


def describe_fault(error: RecordError | OSError, *, has_been_read: bool) -> str:
    """Why a file cannot be read that a rank writes; empty where it has not been made yet."""
    if isinstance(error, FileNotFoundError):
        return "the file is gone, deleted or moved away" if has_been_read else ""
    return error.found if isinstance(error, RecordError) else str(error.strerror or error)


def passed_by_all(logs: Iterable[RankLog]) -> dict[Key, int]:
    """By group: the number up to which every one of its ranks that `logs` are of has begun its collectives."""
    reached: dict[Key, dict[int, int]] = {}
    for log in logs:
        by_group: dict[int, tuple[GroupOfRanks | None, int]] = {}  # its key is hashed once: ranks may be thousands
        for entry in log.collectives:
            if entry.seq is not None:
                number = id(entry.group)
                known = by_group.get(number)
                if known is None or known[1] < entry.seq:
                    by_group[number] = entry.group, entry.seq
        for group, seq in by_group.values():
            by_rank = reached.setdefault(_key_of_group(group), {})
            by_rank[log.rank] = max(by_rank.get(log.rank, -1), seq)
    return {key: min(by_rank.values()) for key, by_rank in reached.items()}


def key_of(entry: Collective) -> Key:
    """The group of `entry`."""
    return _key_of_group(entry.group)


def _key_of_group(group: GroupOfRanks | None) -> Key:
    return ("", 0, 0, ()) if group is None else (group.name, group.attempt, group.incarnation, group.ranks)
