# SPDX-License-Identifier: Apache-2.0
"""`Standing`: state of each rank of a session: alive or dead, busy or idle, and what its last cell raised."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from ddpilot.launching.rank_reports import Exited, Raised
from ddpilot.session.endings import describe_end
from ddpilot.session.kernels.events import Ended

_END_GRACE_S = 2.0


class Standing:
    """State of `world_size` ranks. To modify it, hold `Attention.switch` or have the turn."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._killed: set[int] = set()
        self.dead: dict[int, str] = {}
        """By dead rank: how its process ended, as a predicate such as "was killed by SIGKILL"."""
        self.busy: dict[int, tuple[int | None, float]] = {}
        """By busy rank: the number of the cell that it runs (None: a request), and the time at which it started."""
        self.since_s: dict[int, float] = {}
        """By rank: the time since which it has been idle or dead."""
        self.raised: dict[int, Raised] = {}
        """By rank: the exception raised there by the current or most recent cell."""
        self.device_errors: dict[int, str] = {}
        """By live rank: the error with which its device answers every call. Such a rank cannot join a group."""
        self.store_end = ""
        """How the process of the session's store ended, and the consequence; "" while it is running."""
        self.exited: dict[int, Exited] = {}
        """By dead rank: the exit status of its process, if known."""

    @property
    def live(self) -> tuple[int, ...]:
        """The live ranks."""
        return tuple(rank for rank in range(self._world_size) if rank not in self.dead)

    @property
    def unusable(self) -> list[int]:
        """Ranks that cannot join a group, because they are dead or their device has failed."""
        return sorted({*self.dead, *self.device_errors})

    def note_start(self, rank: int) -> None:
        """Record that the rank's process is starting."""
        self.dead.pop(rank, None)
        self.device_errors.pop(rank, None)
        self.exited.pop(rank, None)
        self.since_s[rank] = time.monotonic()

    def note_work(self, ranks: Iterable[int], number: int | None, now_s: float) -> None:
        """Record that a cell (or with None a request) starts on `ranks`."""
        self.raised.clear()
        self.busy.update(dict.fromkeys(ranks, (number, now_s)))

    def set_idle(self, rank: int) -> None:
        """Record that the rank's part of the cell is over."""
        if self.busy.pop(rank, None) is not None:
            self.since_s[rank] = time.monotonic()

    def set_all_idle(self) -> None:
        """Record that no rank is running anything."""
        self.since_s.update(dict.fromkeys(self.busy, time.monotonic()))
        self.busy.clear()

    def note_kill(self, ranks: Sequence[int]) -> None:
        """Record that ddpilot is about to kill these ranks."""
        self._killed.update(ranks)

    def note_end(self, ended: Ended, last_lines: Sequence[str]) -> None:
        """Record that the rank's process has ended. `last_lines` are its last lines of output."""
        rank = ended.rank
        self.dead[rank] = describe_end(ended, rank in self._killed, last_lines)
        self._killed.discard(rank)
        self.device_errors.pop(rank, None)
        self.since_s[rank] = time.monotonic()
        if ended.exited is not None:
            self.exited[rank] = ended.exited

    def await_ends(self, ranks: Sequence[int]) -> None:
        """Wait up to two seconds for `ranks`, which were asked to end, to run their exit handlers."""
        limit_s = time.monotonic() + _END_GRACE_S
        while any(rank not in self.dead for rank in ranks) and time.monotonic() < limit_s:
            time.sleep(0.005)
