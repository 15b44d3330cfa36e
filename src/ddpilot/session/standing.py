# SPDX-License-Identifier: Apache-2.0
"""How each rank of a session stands: alive or dead, at work or idle, and how what ran there ended."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from ddpilot.launching.local.report import Exited, Raised
from ddpilot.session.endings import describe_end
from ddpilot.session.events import Ended

_END_GRACE_S = 2.0


class Standing:
    """What is known of `world_size` ranks. Who changes it holds the attention's switch, or has the attention."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._killed: set[int] = set()
        self.dead: dict[int, str] = {}
        """By rank: of what it died; empty while all ranks live."""
        self.busy: dict[int, tuple[int | None, float]] = {}
        """By rank: the number of the cell that runs there (None: a request) and since when."""
        self.since_s: dict[int, float] = {}
        """By rank: since when it is idle, or dead."""
        self.raised: dict[int, Raised] = {}
        """By rank: what the cell that runs, or ran last, raised there."""
        self.device_errors: dict[int, str] = {}
        """By rank that lives: what its device answers to everything; such a rank can be in no group."""
        self.store_end = ""
        """How the process of the session's store ended, and what follows; empty while it lives."""
        self.exited: dict[int, Exited] = {}
        """By rank: how its process ended; empty while all ranks live."""

    @property
    def live(self) -> tuple[int, ...]:
        """The ranks that live."""
        return tuple(rank for rank in range(self._world_size) if rank not in self.dead)

    @property
    def unusable(self) -> list[int]:
        """The ranks that no group can have: they are dead, or their device has failed."""
        return sorted({*self.dead, *self.device_errors})

    def note_start(self, rank: int) -> None:
        """The rank's process is starting."""
        self.dead.pop(rank, None)
        self.device_errors.pop(rank, None)
        self.exited.pop(rank, None)
        self.since_s[rank] = time.monotonic()

    def note_work(self, ranks: Iterable[int], number: int | None, now_s: float) -> None:
        """A cell, or with None a request, begins on `ranks`."""
        self.raised.clear()
        self.busy.update(dict.fromkeys(ranks, (number, now_s)))

    def set_idle(self, rank: int) -> None:
        """The rank's part of what runs is over."""
        if self.busy.pop(rank, None) is not None:
            self.since_s[rank] = time.monotonic()

    def set_all_idle(self) -> None:
        """Nothing runs any more."""
        self.since_s.update(dict.fromkeys(self.busy, time.monotonic()))
        self.busy.clear()

    def note_kill(self, ranks: Sequence[int]) -> None:
        """Remember that these are about to be killed by ddpilot itself."""
        self._killed.update(ranks)

    def note_end(self, ended: Ended, last_lines: Sequence[str]) -> None:
        """The rank's process has ended; `last_lines`: what it wrote last."""
        rank = ended.rank
        self.dead[rank] = describe_end(ended, rank in self._killed, last_lines)
        self._killed.discard(rank)
        self.device_errors.pop(rank, None)
        self.since_s[rank] = time.monotonic()
        if ended.exited is not None:
            self.exited[rank] = ended.exited

    def await_ends(self, ranks: Sequence[int]) -> None:
        """Give `ranks`, which were asked to end, two seconds for their exit handlers."""
        limit_s = time.monotonic() + _END_GRACE_S
        while any(rank not in self.dead for rank in ranks) and time.monotonic() < limit_s:
            time.sleep(0.005)
