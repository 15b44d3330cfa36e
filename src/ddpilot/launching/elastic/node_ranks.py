# SPDX-License-Identifier: Apache-2.0
"""The processes of this node's ranks: poll for exits and reports, list failures, terminate process groups."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from ddpilot.launching.elastic.rank_main import REPORT_KEY
from ddpilot.launching.first_failure import RankEnd, may_be_followed
from ddpilot.launching.rank_environment import EXIT_REQUEUE
from ddpilot.launching.rank_reports import Exited, Raised

FAILED_GRACE_S = 1.0
"""Seconds between SIGTERM and SIGKILL for the remaining ranks after one failed."""

STUCK_EXIT_S = 5.0
"""Seconds that a rank whose script raised may take to exit, for its threads and exit handlers."""

_NOTICE_AFTER_S = 0.3
_KILL_LIMIT_S = 5.0
_PAUSE_S = 0.01


@dataclass(kw_only=True)
class NodeRank(RankEnd):
    """One rank's process. `report`: file in which the rank reports its exception."""

    process: subprocess.Popen[bytes]
    report: Path
    has_group: bool = True
    """True while processes of its process group remain. Once it was empty, the number may have been reused."""

    def __post_init__(self) -> None:
        self.pid = self.process.pid

    @property
    def is_live(self) -> bool:
        """True until the process has been reaped."""
        return self.exited is None

    def poll(self) -> None:
        """Reap the process if it has exited, and read its report if it exists."""
        if self.exited is None and self.process.returncode is None:
            pid, status, usage = os.wait4(self.process.pid, os.WNOHANG)
            if pid:
                now, unit = time.monotonic(), 1 if sys.platform == "darwin" else 1024
                self.process.returncode = os.waitstatus_to_exitcode(status)
                self.exited = Exited(
                    rank=self.rank, status=status, peak_memory_bytes=usage.ru_maxrss * unit, time_s=now
                )
                self.since_s = self.since_s or now
        if self.exited is not None:
            self.has_group = self.has_group and _has_members(self.process.pid)
        if self.raised is None and self.report.exists():
            self.raised = read_report(self.report)
            self.since_s = self.since_s or (time.monotonic() if self.raised is not None else 0.0)


class NodeRanks:
    """All ranks of this node in one attempt. `note` shows a notice."""

    def __init__(self, ranks: Sequence[NodeRank], note: Callable[[str], None]) -> None:
        self._ranks = ranks
        self._note = note

    def poll(self) -> None:
        """Poll all processes for exits and reports."""
        for each in self._ranks:
            each.poll()

    def is_leaving(self, rank: NodeRank) -> bool:
        """True if `rank` raised and may still be exiting. Shows a notice when its time is over (5 s)."""
        if not rank.is_live or rank.raised is None:
            return False
        if time.monotonic() - rank.since_s <= STUCK_EXIT_S:
            return True
        self._note(
            f"rank {rank.rank} {rank.describe_end()} and has not exited after {STUCK_EXIT_S:g} s because of a "
            "thread or an exit handler; terminating all ranks"
        )
        return False

    @property
    def live(self) -> tuple[int, ...]:
        """The ranks whose process is running."""
        return tuple(each.rank for each in self._ranks if each.is_live)

    def silent_pids(self) -> list[int]:
        """Process ids of the ranks that have neither exited, as far as is known, nor reported."""
        return [each.process.pid for each in self._ranks if each.is_live and each.raised is None]

    @property
    def want_requeue(self) -> bool:
        """True if every rank exited with the code that asks for a requeue."""
        return bool(self._ranks) and all(
            each.exited is not None and each.exited.exitcode == EXIT_REQUEUE for each in self._ranks
        )

    def are_leaving(self, since_s: float, limit_s: float) -> bool:
        """True while ranks may still follow one that exited with the requeue code at `since_s` (monotonic clock)."""
        return may_be_followed(self._ranks, time.monotonic() - since_s, limit_s)

    @property
    def succeeded(self) -> tuple[int, ...]:
        """The ranks that exited with code 0."""
        return tuple(each.rank for each in self._ranks if each.has_returned)

    def failures(self) -> list[NodeRank]:
        """The ranks that raised, exited with a nonzero code, or were killed."""
        return [each for each in self._ranks if not each.has_returned and (each.raised or each.exited)]

    def end(self, number: signal.Signals, grace_s: float, while_waiting: Callable[[], None] | None = None) -> None:
        """Send `number` to every rank's process group, wait, and kill after `grace_s` seconds what has not exited.

        Groups of ranks that have exited get the signals too, since workers may remain in them. `while_waiting` is
        called once if this takes longer than 0.3 s.
        """
        since_s = time.monotonic()
        self._signal(number)
        while self._remain() and (waited_s := time.monotonic() - since_s) < grace_s:
            if while_waiting is not None and waited_s > _NOTICE_AFTER_S:
                while_waiting()
                while_waiting = None
            time.sleep(_PAUSE_S)
        self.kill()

    def kill(self) -> None:
        """Send SIGKILL to the remaining process groups and wait for the ranks, at most 5 s."""
        self._signal(signal.SIGKILL)
        deadline_s = time.monotonic() + _KILL_LIMIT_S
        # Do not wait for the groups: in a container, orphans may never be reaped, and zombies keep a group alive.
        while self._remain() and self.live and time.monotonic() < deadline_s:
            time.sleep(_PAUSE_S)

    def describe_ends(self) -> str:
        """How each rank ended: "rank 0 exited with code 0; rank 1 was killed by SIGTERM"."""
        return "; ".join(f"rank {each.rank} {each.describe_end()}" for each in self._ranks)

    def _remain(self) -> bool:
        self.poll()
        return any(each.is_live or each.has_group for each in self._ranks)

    def _signal(self, number: signal.Signals) -> None:
        for each in self._ranks:
            if not each.has_group:
                continue
            with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: PermissionError for a zombie group
                os.killpg(each.process.pid, number)


def _has_members(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def read_report(path: Path) -> Raised | None:
    """The exception that a rank reported in `path`; None without a report, and for a report of torch's `record`."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))[REPORT_KEY]
    except (OSError, ValueError, KeyError):
        return None
    return Raised(**{field.name: report[field.name] for field in fields(Raised)})
