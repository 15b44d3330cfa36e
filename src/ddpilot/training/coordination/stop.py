# SPDX-License-Identifier: Apache-2.0
"""Joint decisions of all ranks (stop, save a checkpoint), exchanged in a small all_reduce every few updates."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ddpilot.group.accelerator import wire_device
from ddpilot.group.process_group import Group
from ddpilot.group.protocol import GroupLike

REASONS = ("asked", "time", "SIGINT", "SIGTERM", "SIGUSR1")
"""Reasons for a joint stop, in the order of their flags in the all_reduce."""

INTERVAL_S = 0.1
"""Target interval between two exchanges, in seconds; updates that take longer each have an exchange."""
MAX_INTERVAL = 32
"""Maximum number of updates between two exchanges: updates may suddenly take longer than those before."""


@dataclass(frozen=True)
class Decision:
    """The result of one exchange; the same on all ranks."""

    count: float
    """Sum of the counts that the ranks sent."""
    num_bad: int
    """Number of ranks whose loss is not finite."""
    reasons: tuple[str, ...]
    """Those of `REASONS` that some rank sent; if any, all ranks stop after this update."""
    saves: bool = False
    """True if some rank asked for a checkpoint."""
    more: tuple[float, ...] = ()
    """Sums of the further numbers that the ranks sent."""


class Decider:
    """Collects this rank's flags and exchanges them with the other ranks.

    `max_time_s`: seconds after `start` at which training ends, None for no limit. A flag that is set after an exchange
    began is sent with the next one. All ranks exchange with the same updates: the interval follows from the duration of
    the updates, which is all-reduced with the flags. `clock`: returns seconds since any fixed time.
    """

    def __init__(
        self, group: GroupLike, max_time_s: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._group = group
        self._clock = clock
        self._max_time_s = max_time_s
        self._deadline: float | None = None
        self._asked: set[str] = set()
        self._asks_save = self._decided_save = False
        self._sent: list[float] | None = None
        self._handle: dist.Work | None = None
        self._flags: torch.Tensor | None = None
        self._interval = 1
        self._num_updates = 0
        self._since_s = clock()
        self.reasons: tuple[str, ...] = ()
        """Reasons for the joint stop; empty while there is none."""

    def start(self) -> None:
        """Start the time limit at the first call; later calls have no effect. Not collective."""
        if self._deadline is None and self._max_time_s is not None:
            self._deadline = self._clock() + self._max_time_s

    def ask(self, reason: str) -> None:
        """Request a stop of all ranks, for one of `REASONS`. Not collective; safe in a signal handler."""
        self._asked.add(reason)

    def ask_save(self) -> None:
        """Request a checkpoint of all ranks after an update. Not collective."""
        self._asks_save = True

    def take_save(self) -> bool:
        """True if a checkpoint was decided since the last call. The same on every rank; not collective."""
        decided, self._decided_save = self._decided_save, False
        return decided

    def agree(self, reason: str) -> None:
        """Record a reason that every rank records at the same point, so that no exchange is needed."""
        self._add((reason,))

    def next_update(self) -> bool:
        """Count an update. True if the ranks exchange their flags with it; the same on all ranks."""
        self._num_updates += 1
        return self._num_updates >= self._interval

    def begin(self, *, count: float = 0.0, is_bad: bool = False, more: Sequence[float] = ()) -> None:
        """Send this rank's flags; `finish` returns the result. Collective. At most one exchange may be in flight.

        `more`: further numbers to sum, the same number of them on every rank.
        """
        now_s = self._clock()
        if self._deadline is not None and now_s > self._deadline:
            self._asked.add("time")
        pace_s = (now_s - self._since_s) / max(self._num_updates, 1)
        wants = (self._asks_save, *(reason in self._asked for reason in REASONS))
        self._sent = [count, float(is_bad), pace_s, *map(float, wants), *more]
        self._asks_save = False
        if self._group.world_size == 1:
            return
        self._flags = torch.tensor(self._sent, dtype=torch.float64, device=wire_device(self._group))
        if isinstance(self._group, Group):
            self._handle = dist.all_reduce(self._flags, group=self._group.process_group, async_op=True)
        else:
            self._group.all_reduce(self._flags)

    @property
    def is_under_way(self) -> bool:
        """True while an exchange is in flight, from `begin` to `finish`."""
        return self._sent is not None

    def finish(self) -> Decision:
        """Return the result of the exchange in flight. Collective if none is in flight: it then begins one."""
        if self._sent is None:
            self.begin()
        if self._handle is not None:
            self._handle.wait()
        assert self._sent is not None  # set by begin()
        count, num_bad, pace_s, num_saves, *rest = self._sent if self._flags is None else self._flags.tolist()
        flags, more = rest[: len(REASONS)], tuple(rest[len(REASONS) :])
        self._sent = self._flags = self._handle = None
        self._set_interval(pace_s / self._group.world_size)
        reasons = tuple(reason for reason, flag in zip(REASONS, flags, strict=True) if flag)
        decision = Decision(count, round(num_bad), reasons, bool(num_saves), more)
        self._decided_save |= decision.saves
        self._add(decision.reasons)
        return decision

    def _add(self, reasons: tuple[str, ...]) -> None:
        if reasons:
            self.reasons = tuple(reason for reason in REASONS if reason in {*self.reasons, *reasons})

    def _set_interval(self, pace_s: float) -> None:
        # All ranks compute it from the same sum. It grows slowly, since the first updates predict later ones poorly.
        self._num_updates, self._since_s = 0, self._clock()
        fitting = int(INTERVAL_S / pace_s) if pace_s > INTERVAL_S / MAX_INTERVAL else MAX_INTERVAL
        alone = self._group.world_size == 1
        self._interval = 1 if alone else max(1, min(fitting, 2 * self._interval))
