# SPDX-License-Identifier: Apache-2.0
"""`RankStates`: state of each rank of a session: alive or dead, busy or idle, and what its last cell raised."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

from ddpilot.errors import LaunchError, RankError
from ddpilot.findings.text import render_ranks
from ddpilot.launching.first_failure import describe_exit
from ddpilot.launching.rank_reports import Exited, Raised
from ddpilot.launching.spawning import Ended

_END_GRACE_S = 2.0

STORE_GONE = "the process of the session's store ended"
START_OVER = "`%ddp stop`, then `%ddp start` (a new `Session`) starts from scratch"
"""Fix shown if no rank can be started any more."""


class RankStates:
    """State of `world_size` ranks. To modify it, hold `EventRouter.lock` or have the turn."""

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

    @property
    def blocked(self) -> str:
        """The reason why no rank can enter a process group now; "" if all can."""
        if self.store_end:
            return f"{self.store_end}; {START_OVER}"
        ranks = sorted(self.dead) or sorted(self.device_errors)
        if not ranks:
            return ""
        verb, its = ("is", "its device") if len(ranks) == 1 else ("are", "their devices")
        state = f"{verb} dead" if self.dead else f"cannot use {its}"
        restart = f"`%ddp restart {' '.join(map(str, ranks))}`, `session.restart({ranks[0]})`"
        return f"{render_ranks(ranks)} {state}; restart {_them(ranks)} ({restart})"

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


def describe_end(ended: Ended, was_killed: bool, last_lines: Sequence[str]) -> str:
    """Return the predicate of a sentence about the rank. `was_killed`: True if ddpilot killed it."""
    if ended.exited is None or ended.reason:
        return ended.reason
    if was_killed:
        return "was killed by ddpilot because it did not respond"
    if ended.exited.signal_name is None:
        return f"exited with code {ended.exited.exitcode}"
    how, _ = describe_exit(ended.exited, "the session", last_lines)
    return how


def describe_store_end(ended: Ended) -> str:
    """Describe the end of the session's store, which ranks need to form a group, or of the session's own thread."""
    if ended.exited is None:
        return ended.reason
    status = ended.exited
    how = f"was killed by {status.signal_name}" if status.signal_name else f"exited with code {status.exitcode}"
    return f"{STORE_GONE} (it {how}): no process group can be formed any more; variables are kept"


def make_dead_error(did: str, ranks: Sequence[int], dead: Mapping[int, str], *, can_restart: bool) -> LaunchError:
    """Build the error for `did`, which needs `ranks`. `dead` has the cause of death of each of them."""
    again = f"`%ddp restart {' '.join(map(str, ranks))}` starts {_them(ranks)} again, and so does `session.restart`"
    return LaunchError(
        did,
        found="; ".join(f"rank {rank} is dead: it {dead[rank]}" for rank in ranks),
        fix=again if can_restart else START_OVER,
        rank=ranks[0],
    )


def blame_dead(error: RankError, dead: Mapping[int, str]) -> None:
    """Rewrite `error` to name the dead ranks that the failed rank needed. `dead` has their causes of death by rank."""
    needed = ", ".join(f"rank {rank}, which is dead (it {dead[rank].partition(';')[0]})" for rank in sorted(dead))
    error.found = f"rank {error.rank} needed {needed}"
    error.fix = f"`%ddp restart {' '.join(map(str, sorted(dead)))}` brings {_them(sorted(dead))} back"
    error.others = ""
    error.args = (error.render(),)


def describe_death(rank: int, reason: str, respawns: bool) -> str:
    """Describe the death of a rank while no cell was running on it."""
    again = "the next cell restarts it" if respawns else f"`%ddp restart {rank}` brings it back"
    return f"rank {rank} {reason}; its variables are lost, {again}"


def describe_device_error(rank: int, text: str, respawns: bool) -> str:
    """Describe a rank whose device accepts no more work. `text` is the error that the device returns."""
    again = "it is restarted" if respawns else f"`%ddp restart {rank}` starts it again"
    where = "; `CUDA_LAUNCH_BLOCKING=1` in `env` shows the line that caused it" if "CUDA" in text else ""
    return (
        f"rank {rank}: its device has failed and accepts no more work ({text}); the device's memory is lost, "
        f"{again}{where}"
    )


def describe_absent(dead: Mapping[int, str], live: Sequence[int]) -> str:
    """Describe why a cell runs on the ranks in `live` only: the other ranks are dead."""
    ranks = sorted(dead)
    causes = ", ".join(f"rank {rank} is dead (it {dead[rank].partition(';')[0]})" for rank in ranks)
    again = f"`%ddp restart {' '.join(map(str, ranks))}` brings {_them(ranks)} back"
    return f"{causes}: this cell runs on {render_ranks(live)}; {again}"


def _them(ranks: Sequence[int]) -> str:
    return "it" if len(ranks) == 1 else "them"
