# SPDX-License-Identifier: Apache-2.0
"""The one interface behind which the ways to start a session's rank processes stand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from ddpilot.session.hub import Hub


class RankHost(Protocol):
    """Starts, signals and ends the processes of ranks; all of it is called in the hub's thread.

    It tells the hub of what the processes write (`Wrote`) and of their ends (`Ended`). A session never assumes that
    a rank is a child of its own process, nor that it runs on this machine.
    """

    world_size: int

    @property
    def can_start(self) -> bool:
        """Whether ranks can still be started, now that it was attached."""

    def attach(self, hub: Hub) -> None:
        """Begin; called once, before the first `start`."""

    def accompany(self, hooks: tuple[str, ...], variables: Mapping[str, str]) -> None:
        """Have every rank that is started from now on call `hooks` first, with `variables` in its environment."""

    def check_start(self, did: str) -> None:
        """Raise LaunchError where `did`, which starts ranks, could not: before any rank is ended for it."""

    def start(self, rank: int, generation: int) -> None:
        """Start the process of a rank that has none. `generation`: how often the group was rebuilt so far."""

    def signal(self, ranks: Sequence[int], number: int) -> None:
        """Send a signal to the processes of ranks: to the whole process group where it is SIGKILL."""

    def drain(self, rank: int) -> None:
        """Tell the hub now of what the rank's process has written so far: a cell of it is over."""

    def pid(self, rank: int) -> int | None:
        """The process id, None where the rank has none now (or on another machine)."""

    def is_live(self, rank: int) -> bool:
        """Whether the rank's process has been started and has not ended."""

    def close(self) -> None:
        """End every process that is left and give everything back; a second call does nothing."""
