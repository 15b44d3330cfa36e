# SPDX-License-Identifier: Apache-2.0
"""The processes of this node's ranks: who ended, why, who was first, and how the others are ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddpilot.launching.contract import EXIT_REQUEUE
from ddpilot.launching.elastic.reports import read_report
from ddpilot.launching.failures import Failure
from ddpilot.launching.local.report import Exited, Raised

FAILED_GRACE_S = 1.0
"""Seconds between SIGTERM and SIGKILL for the ranks that are left when one failed."""

STUCK_EXIT_S = 5.0
"""Seconds that a rank whose script raised may take to end, for its threads and exit handlers."""

_PATIENCE_S = 0.3
_GONE_LIMIT_S = 5.0
_PAUSE_S = 0.01


@dataclass
class LocalRank:
    """One rank's process. `report`: where it writes what it raised."""

    rank: int
    process: subprocess.Popen[bytes]
    report: Path
    exited: Exited | None = None
    raised: Raised | None = None
    raised_seen_s: float | None = None
    has_group: bool = True
    """Whether processes of its group are left. A number that was free once may be another's by now."""

    @property
    def pid(self) -> int:
        """Of its process."""
        return self.process.pid

    @property
    def has_returned(self) -> bool:
        """Whether it ended with code 0."""
        return self.exited is not None and self.exited.exitcode == 0

    @property
    def is_live(self) -> bool:
        """Whether its process has not been reaped."""
        return self.exited is None

    def look(self) -> None:
        """Reap the process if it has ended, and read its report if there is one."""
        if self.exited is None and self.process.returncode is None:
            pid, status, usage = os.wait4(self.process.pid, os.WNOHANG)
            if pid:
                now, unit = time.monotonic(), 1 if sys.platform == "darwin" else 1024
                self.process.returncode = os.waitstatus_to_exitcode(status)
                self.exited = Exited(
                    rank=self.rank, status=status, peak_memory_bytes=usage.ru_maxrss * unit, time_s=now
                )
        if self.exited is not None:
            self.has_group = self.has_group and _has_members(self.process.pid)
        if self.raised is None and self.report.exists():
            self.raised = read_report(self.report)
            self.raised_seen_s = time.monotonic()

    def describe_end(self) -> str:
        """How it ended, as the rest of a sentence that begins with the rank."""
        if self.raised is not None:
            if self.raised.type_name == "SystemExit":
                return f"called sys.exit with code {self.raised.exitcode}"
            return f"raised {self.raised.type_name}"
        if self.exited is None:
            return "is still there"
        if self.exited.signal_name is not None:
            return f"was ended by {self.exited.signal_name}"
        return f"exited with code {self.exited.exitcode}"


class LocalRanks:
    """All ranks of this node, of one attempt. `say` shows a line of ddpilot's own."""

    def __init__(self, ranks: Sequence[LocalRank], say: Callable[[str], None]) -> None:
        self._ranks = ranks
        self._say = say

    def look(self) -> None:
        """Take note of every process that has ended and of every exception that was reported."""
        for each in self._ranks:
            each.look()

    def is_leaving(self, rank: int) -> bool:
        """Whether `rank` has raised and may still take its time to end; says so when that time is over."""
        each = next(each for each in self._ranks if each.rank == rank)
        if not each.is_live or each.raised_seen_s is None:
            return False
        if time.monotonic() - each.raised_seen_s <= STUCK_EXIT_S:
            return True
        self._say(
            f"rank {rank} {each.describe_end()} and has not ended for {STUCK_EXIT_S:g} s: a thread or an exit handler "
            "keeps it; ending all ranks"
        )
        return False

    @property
    def live(self) -> tuple[int, ...]:
        """The ranks whose process is there."""
        return tuple(each.rank for each in self._ranks if each.is_live)

    def unheard(self) -> list[int]:
        """The process ids of the ranks that have neither ended, as far as is known, nor reported."""
        return [each.process.pid for each in self._ranks if each.is_live and each.raised is None]

    @property
    def want_requeue(self) -> bool:
        """Whether every rank has left with the exit code that asks to be started again."""
        return bool(self._ranks) and all(
            each.exited is not None and each.exited.exitcode == EXIT_REQUEUE for each in self._ranks
        )

    def are_leaving(self, since_s: float, limit_s: float) -> bool:
        """True while ranks may still follow one that left with the code for a requeue at `since_s` (monotonic).

        For `limit_s` seconds: a rank that leaves with it too may still run its `finally` or its exit handlers.
        """
        return time.monotonic() - since_s <= limit_s and bool(self.live) and all(map(_may_ask_for_requeue, self._ranks))

    @property
    def succeeded(self) -> tuple[int, ...]:
        """The ranks that ended with code 0."""
        return tuple(each.rank for each in self._ranks if each.exited is not None and each.exited.exitcode == 0)

    def report(self, rank: int) -> Path | None:
        """The file in which `rank` has written what it raised; None where it has not."""
        path = next(each.report for each in self._ranks if each.rank == rank)
        return path if path.exists() else None

    def failures(self) -> list[Failure]:
        """One for each rank that raised, exited with another code than 0, or was killed."""
        found = []
        for each in self._ranks:
            exited = each.exited
            if (exited is None and each.raised is None) or (exited is not None and exited.exitcode == 0):
                continue
            moments = [each.raised_seen_s, None if exited is None else exited.time_s]
            since_s = min(moment for moment in moments if moment is not None)
            found.append(Failure(rank=each.rank, raised=each.raised, exited=exited, error=None, since_s=since_s))
        return found

    def end(self, number: signal.Signals, grace_s: float, while_waiting: Callable[[], None] | None = None) -> None:
        """Send `number` to every rank's process group, SIGKILL `grace_s` seconds later to what is left; wait for it.

        Groups of ranks that ended by themselves get them too: workers of theirs may be left. `while_waiting` is called
        once where that takes longer than 0.3 s.
        """
        since_s = time.monotonic()
        self._signal(self._ranks, number)
        while self._are_there() and (waited_s := time.monotonic() - since_s) < grace_s:
            if while_waiting is not None and waited_s > _PATIENCE_S:
                while_waiting()
                while_waiting = None
            time.sleep(_PAUSE_S)
        self.kill()

    def kill(self) -> None:
        """SIGKILL what is left of every rank's process group, and wait for the ranks, at most 5 s."""
        self._signal(self._ranks, signal.SIGKILL)
        deadline_s = time.monotonic() + _GONE_LIMIT_S
        # Not for their groups: in a container nobody may reap what a rank left, and a group of zombies stays.
        while self._are_there() and self.live and time.monotonic() < deadline_s:
            time.sleep(_PAUSE_S)

    def describe_ends(self) -> str:
        """How each rank ended: "rank 0 exited with code 0; rank 1 was ended by SIGTERM"."""
        return "; ".join(f"rank {each.rank} {each.describe_end()}" for each in self._ranks)

    def _are_there(self) -> bool:
        for each in self._ranks:
            each.look()
        return any(each.is_live or each.has_group for each in self._ranks)

    def _signal(self, ranks: Sequence[LocalRank], number: signal.Signals) -> None:
        for each in ranks:
            if not each.has_group:
                continue
            with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS says so of a group of zombies
                os.killpg(each.process.pid, number)


def _may_ask_for_requeue(rank: LocalRank) -> bool:
    return all(end is None or end.exitcode == EXIT_REQUEUE for end in (rank.exited, rank.raised))


def _has_members(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True
