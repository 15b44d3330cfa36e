# SPDX-License-Identifier: Apache-2.0
"""Messages from a rank to its parent (start, outcome) and from the rank server (process exits)."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class RankStart:
    """Everything that a rank needs before it runs the function. Sent with the parcel's descriptors."""

    launch_id: str
    rank: int
    environ: dict[str, str]
    working_directory: str
    sys_path: list[str]
    argv: list[str]
    main: dict[str, str]
    """`__file__` and `__package__` (for relative imports) of the parent's ``__main__``, if they are set."""

    num_threads: int
    hooks: tuple[str, ...]
    """Functions, as "module:name", that the rank calls with this object before the user's function."""

    sources: dict[str, list[str]]
    function_name: str


@dataclass(frozen=True)
class Returned:
    """The function returned at `time_s` (monotonic clock). Sent with the descriptors of the parcel with its value."""

    time_s: float
    saw_interrupt: bool = False
    """True if SIGINT reached the function or the function installed its own handler."""


@dataclass(frozen=True)
class Taken:
    """SIGINT reached the function, which continues to a point where it can stop, such as the end of an update."""


@dataclass(frozen=True, kw_only=True)
class Raised:
    """The function raised at `time_s` (the machine's monotonic clock). May be sent with a parcel of the exception."""

    time_s: float
    type_name: str
    message: str
    traceback: str
    is_victim: bool
    interrupted: bool
    exitcode: int


@dataclass(frozen=True, kw_only=True)
class Exited:
    """A process exited. `status`: as returned by `os.wait`; `time_s`: on the machine's monotonic clock."""

    rank: int
    status: int
    peak_memory_bytes: int
    time_s: float

    @property
    def signal_name(self) -> str | None:
        """Name of the signal that killed the process, such as "SIGKILL", or None."""
        number = self.status & 0x7F
        if number == 0:
            return None
        return next((each.name for each in signal.Signals if each.value == number), f"signal {number}")

    @property
    def exitcode(self) -> int:
        """The exit code, or minus the number of the signal that killed the process."""
        return -(self.status & 0x7F) or self.status >> 8

    def describe(self) -> str:
        """The exit as the predicate of a sentence: "exited with code 3" or "was killed by SIGKILL"."""
        name = self.signal_name
        return f"exited with code {self.exitcode}" if name is None else f"was killed by {name}"


@dataclass(frozen=True, kw_only=True)
class Hello:
    """First message of a rank server. `dirty`: what makes forking unsafe, or None."""

    pid: int
    dirty: str | None
    failed: tuple[str, Any] | None
    """Name and traceback of a preloaded module that could not be imported, or None."""

    files: dict[str, tuple[int, int]]
    """Files of the imported modules, each with its (mtime in ns, size in bytes)."""
