# SPDX-License-Identifier: Apache-2.0
"""The state of a job at one moment as seen from outside: plain values, some of which may be unknown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ddpilot.record.flight_ring.log import Collective, RankLog
from ddpilot.record.journal import Entry
from ddpilot.user_files import CodeLine


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessState:
    """The process of a rank, as known to the operating system or to its parent."""

    pid: int
    host: str = ""
    """Host name; empty if unknown."""
    state: Literal["running", "ended", "unknown"] = "unknown"
    """``unknown``: on a different machine, or not inspected."""
    exitcode: int | None = None
    """The negative signal number if a signal ended it; None while it runs or if unknown."""
    signal_name: str | None = None
    """Such as ``SIGKILL``; None if no signal ended it."""
    ended_ns: int | None = None
    """When its end was observed, on CLOCK_MONOTONIC."""
    os_state: str = ""
    """The operating system's process state, such as ``R``, ``S`` or ``D``; ``T``: stopped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonStack:
    """The Python stack of a rank's main thread."""

    taken_ns: int
    """When it was taken, on CLOCK_MONOTONIC."""
    frames: tuple[CodeLine, ...] = ()
    """Innermost first."""
    child: str = ""
    """The newest child process, such as ``rsync (pid 4711)``, if the stack is in `subprocess`; else empty."""
    is_running: bool = False
    """True if the thread is known to run Python code rather than wait in a call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankException:
    """The exception that a rank raised."""

    type_name: str
    """Such as ``RuntimeError``."""
    message: str
    traceback: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSnapshot:
    """The state of one rank."""

    rank: int
    log: RankLog | None = None
    """The contents of its ring, or the newest records; None if it does not record (yet)."""
    journal: tuple[Entry, ...] = ()
    """Entries of guard, oldest first."""
    process: ProcessState = field(default_factory=lambda: ProcessState(pid=0))
    stack: PythonStack | None = None
    """None if no stack was taken or the rank did not respond."""
    error: RankException | None = None
    """The exception that ended its program or its cell; None if there was none."""
    returned: bool = False
    """True if its program or its cell ended without an error."""
    is_away: bool = False
    """True if its process has ended and a new one may start: what the old one left is ignored."""

    @property
    def collectives(self) -> Sequence[Collective]:
        """The collectives of its log, oldest first; empty if there is no log."""
        return self.log.collectives if self.log is not None else ()

    @property
    def has_closed_log(self) -> bool:
        """True if it has closed its recording, as at the end of its program."""
        return self.log is not None and self.log.closed_ns is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSnapshot:
    """The state of all ranks at one moment."""

    world_size: int
    ranks: Mapping[int, RankSnapshot]
    """By rank; unknown ranks may be missing."""
    now_ns: int
    """When this was gathered, on CLOCK_MONOTONIC of the machine that gathered it."""
    name: str = ""
    """The job's name, as it is displayed."""
    since_ns: int = 0
    """Anything older is ignored: earlier cells of a session, or an earlier attempt of torchrun."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Sources that cannot be read from a file here, such as cells, by the file name that their lines have."""
