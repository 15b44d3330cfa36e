# SPDX-License-Identifier: Apache-2.0
"""The parent's handle of one rank: its channels, its reports and its exit status."""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import dataclass

from ddpilot.launching.rank_reports import Exited, Raised, RankStart, Returned
from ddpilot.launching.rank_server.job import Start
from ddpilot.launching.shipping import fd_socket


@dataclass
class RankHandle:
    """Channels to one rank's process, and what the process reported."""

    rank: int
    control: socket.socket
    pipes: dict[str, int]
    """The parent's ends of the "stdout" and "stderr" pipes that are still open."""

    pid: int | None = None
    returned: Returned | None = None
    raised: Raised | None = None
    exited: Exited | None = None
    parcel: int | None = None
    """File descriptor of the parcel with the rank's value or exception."""

    exited_notice_at_s: float | None = None

    @property
    def is_live(self) -> bool:
        """True until the process has been reaped."""
        return self.exited is None

    @property
    def has_returned(self) -> bool:
        """True if the rank's function returned."""
        return self.returned is not None

    def describe_end(self) -> str:
        """How the rank ended, as the predicate of a sentence whose subject is the rank."""
        if self.returned is not None:
            return "returned"
        if self.raised is not None:
            return "ended at KeyboardInterrupt" if self.raised.interrupted else f"raised {self.raised.type_name}"
        if self.exited is None:
            return "was never started"
        return f"was ended by {self.exited.signal_name or f'exit code {self.exited.exitcode}'}"

    def close(self) -> None:
        """Close all file descriptors that are still open."""
        self.control.close()
        fd_socket.close_all([*self.pipes.values(), *([] if self.parcel is None else [self.parcel])])
        self.pipes.clear()
        self.parcel = None


def start_rank(job: socket.socket, start: RankStart, parcel: int) -> RankHandle:
    """Ask the server to start a rank, and send it the `start` message. Raises wire.Closed if the server is gone."""
    control, theirs = socket.socketpair()
    handle = RankHandle(start.rank, control, {})
    writers: list[int] = []
    try:
        for stream in ("stdout", "stderr"):
            handle.pipes[stream], writer = os.pipe()
            writers.append(writer)
        fd_socket.send(job, Start(start.rank), [theirs.fileno(), *writers])
        with contextlib.suppress(fd_socket.Closed):  # the process was not started or has exited: the server reports why
            fd_socket.send(control, start, [parcel])
    except BaseException:
        handle.close()
        raise
    finally:
        theirs.close()
        fd_socket.close_all(writers)
    return handle
