# SPDX-License-Identifier: Apache-2.0
"""`RankHost`: interface for starting, signalling and ending the processes of a session's ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from ddpilot.session.kernels.io_thread import Hub


class RankHost(Protocol):
    """Starts, signals and ends the processes of ranks. Its methods are called in the hub's thread.

    It sends what the processes write (`Wrote`) and how they end (`Ended`) to the hub. A session does not assume that a
    rank is a child of its own process, nor that it runs on the same machine.
    """

    world_size: int

    @property
    def can_start(self) -> bool:
        """True if ranks can still be started after `attach`."""

    def attach(self, hub: Hub) -> None:
        """Connect to the hub; called once, before the first `start`."""

    def accompany(self, hooks: tuple[str, ...], variables: Mapping[str, str]) -> None:
        """Make every rank started from now on call `hooks` first, with `variables` added to its environment."""

    def check_start(self, did: str) -> None:
        """Raise LaunchError if ranks cannot be started now. Called before any rank is ended for `did`."""

    def start(self, rank: int, generation: int) -> None:
        """Start the process of a rank that has none. `generation` is the number of times the group has been rebuilt."""

    def signal(self, ranks: Sequence[int], number: int) -> None:
        """Send a signal to the processes of `ranks`; SIGKILL goes to their whole process groups."""

    def drain(self, rank: int) -> None:
        """Send the hub everything that the rank's process has written so far. Called when a cell ends on it."""

    def pid(self, rank: int) -> int | None:
        """Return the process id; None if the rank has no process, or runs on another machine."""

    def is_live(self, rank: int) -> bool:
        """True if the rank's process was started and has not ended."""

    def close(self) -> None:
        """End all remaining processes and release all resources; a second call does nothing."""
