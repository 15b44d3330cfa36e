# SPDX-License-Identifier: Apache-2.0
"""A job as it is seen from outside at one moment: values only, also when some of them are not known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ddpilot.record.log import RankLog


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessView:
    """The process of a rank, as the operating system or its parent knows it."""

    pid: int
    host: str = ""
    """Name of the machine; empty where it is not known."""
    state: Literal["running", "ended", "unknown"] = "unknown"
    """``unknown``: on another machine, or nobody looked."""
    exitcode: int | None = None
    """Minus the signal's number where a signal ended it; None while it runs, and where nobody can say."""
    signal_name: str | None = None
    """Such as ``SIGKILL``, where a signal ended it."""
    ended_ns: int | None = None
    """When its end was seen, on CLOCK_MONOTONIC."""
    os_state: str = ""
    """Such as ``R``, ``S`` or ``D``, as the operating system says it; ``T``: stopped."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One call on a stack."""

    file: str
    line: int
    function: str
    text: str = ""
    """The source line without its indentation; empty where it is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StackView:
    """The Python stacks of a rank's threads."""

    taken_ns: int
    """When, on CLOCK_MONOTONIC."""
    threads: Mapping[int, tuple[Frame, ...]] = field(default_factory=dict)
    """Frames, innermost first, by the operating system's id of the thread; where that is not known by any number."""
    main: int = 0
    """Which of them is the main thread."""
    child: str = ""
    """The process that it has started last, such as ``rsync (pid 4711)``, where the stack is in `subprocess`."""

    is_running: bool = False
    """Whether the main thread is known to run Python code, and not to wait in a call."""

    @property
    def main_frames(self) -> tuple[Frame, ...]:
        """Of the main thread, innermost first; empty where they are not known."""
        return self.threads.get(self.main, ())


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorView:
    """What a rank raised."""

    type_name: str
    """Such as ``RuntimeError``."""
    message: str
    traceback: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankView:
    """What is known of one rank."""

    rank: int
    log: RankLog | None = None
    """What its ring holds, or its newest records; None where it does not record (yet)."""
    journal: tuple[Any, ...] = ()
    """What guard noted, oldest first: `ddpilot.record.journal.Entry`."""
    process: ProcessView = field(default_factory=lambda: ProcessView(pid=0))
    stack: StackView | None = None
    """None where none was taken, or where the rank did not answer."""
    error: ErrorView | None = None
    """What ended its program, or its cell; None where nothing did."""
    returned: bool = False
    """Its program, or its cell, came to its end without an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """What is known of all ranks at one moment."""

    world_size: int
    ranks: Mapping[int, RankView]
    """By rank; those of which nothing is known may be left out."""
    now_ns: int
    """When this was gathered, on CLOCK_MONOTONIC of the machine that gathered it."""
    name: str = ""
    """Of the job, as it should be shown."""
    since_ns: int = 0
    """What is older is not looked at: a session's earlier cells, or a torchrun's earlier attempt."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Text of the user's files that cannot be read from here, such as cells, by the name that lines have."""
