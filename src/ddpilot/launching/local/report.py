# SPDX-License-Identifier: Apache-2.0
"""What a rank process tells its parent about its end, and what the server tells about processes."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class RankStart:
    """Everything a rank needs before it runs the function; the parcel's descriptor comes beside it."""

    launch_id: str
    rank: int
    environ: dict[str, str]
    working_directory: str
    sys_path: list[str]
    argv: list[str]
    main: dict[str, str]
    """What the parent's ``__main__`` says of itself: `__file__`, and `__package__` for imports relative to it."""

    num_threads: int
    hooks: tuple[str, ...]
    """Functions "module:name" that are called with this value in the rank before the user's function."""

    sources: dict[str, list[str]]
    function_name: str


@dataclass(frozen=True)
class Returned:
    """The function returned; the parcel with its value comes beside it."""

    time_s: float
    saw_interrupt: bool = False
    """Whether SIGINT reached the function, which took it as its cue to return."""


@dataclass(frozen=True)
class Taken:
    """SIGINT reached the function, which goes on to a place where it can end, such as the end of an update."""


@dataclass(frozen=True, kw_only=True)
class Raised:
    """The function raised. `time_s` is of the machine's monotonic clock. A parcel with the exception may be beside."""

    time_s: float
    type_name: str
    message: str
    traceback: str
    is_victim: bool
    interrupted: bool
    exitcode: int


@dataclass(frozen=True, kw_only=True)
class Exited:
    """A rank process ended. `status` as os.wait gives it."""

    rank: int
    status: int
    peak_memory_bytes: int
    time_s: float

    @property
    def signal_name(self) -> str | None:
        """The signal that killed it, such as "SIGKILL"."""
        number = self.status & 0x7F
        if number == 0:
            return None
        return next((each.name for each in signal.Signals if each.value == number), f"signal {number}")

    @property
    def exitcode(self) -> int:
        """The exit code, or minus the signal's number."""
        return -(self.status & 0x7F) or self.status >> 8


@dataclass(frozen=True, kw_only=True)
class Hello:
    """The server's first words. `dirty` says what makes forking unsafe, None where it is safe."""

    pid: int
    dirty: str | None
    failed: tuple[str, Any] | None
    """A preloaded module that could not be imported, and its traceback."""

    files: dict[str, tuple[int, int]]
    """Files of the imported modules with (mtime in ns, size in bytes)."""
