# SPDX-License-Identifier: Apache-2.0
"""The parent's view of one rank of a launch."""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import dataclass, field

from ddpilot.launching.local import wire
from ddpilot.launching.local.jobs import Start
from ddpilot.launching.local.report import Exited, Raised, RankStart, Returned


@dataclass
class RankHandle:
    """Channels to one rank process and what is known of it."""

    rank: int
    control: socket.socket
    pipes: dict[str, int]
    """The parent's ends of its "stdout" and "stderr", while they are open."""

    pid: int | None = None
    returned: Returned | None = None
    raised: Raised | None = None
    exited: Exited | None = None
    parcel: list[int] = field(default_factory=list)
    """Descriptors of the parcel with its value or exception."""

    exited_notice_at_s: float | None = None

    @property
    def is_live(self) -> bool:
        """Whether its process has not been reaped."""
        return self.exited is None

    @property
    def has_returned(self) -> bool:
        """Whether its function returned."""
        return self.returned is not None

    def describe_end(self) -> str:
        """How it ended, as the rest of a sentence that begins with the rank."""
        if self.returned is not None:
            return "returned"
        if self.raised is not None:
            return "ended at KeyboardInterrupt" if self.raised.interrupted else f"raised {self.raised.type_name}"
        if self.exited is None:
            return "was never started"
        return f"was ended by {self.exited.signal_name or f'exit code {self.exited.exitcode}'}"

    def close(self) -> None:
        """Close everything that is still open."""
        self.control.close()
        wire.close_all([*self.pipes.values(), *self.parcel])
        self.pipes.clear()
        self.parcel.clear()


def start_rank(job: socket.socket, start: RankStart, parcel: list[int]) -> RankHandle:
    """Ask the server for the process of one rank, and give it what it needs. Raises wire.Closed without a server."""
    control, theirs = socket.socketpair()
    handle = RankHandle(start.rank, control, {})
    writers: list[int] = []
    try:
        for stream in ("stdout", "stderr"):
            handle.pipes[stream], writer = os.pipe()
            writers.append(writer)
        wire.send(job, Start(start.rank), [theirs.fileno(), *writers])
        with contextlib.suppress(wire.Closed):  # there is no such process (any more): the server says why
            wire.send(control, start, parcel)
    except BaseException:
        handle.close()
        raise
    finally:
        theirs.close()
        wire.close_all(writers)
    return handle
