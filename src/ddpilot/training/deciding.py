# SPDX-License-Identifier: Apache-2.0
"""Decisions that all ranks take together: one small all_reduce per update carries every rank's flags."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ddpilot.group.process_group import Group
from ddpilot.group.protocol import GroupLike

REASONS = ("asked", "time", "SIGINT", "SIGTERM", "SIGUSR1")
"""Why training can be ended jointly, in the order of the flags on the wire."""


@dataclass(frozen=True)
class Decision:
    """What the ranks learnt from one exchange; the same on all of them."""

    count: float
    """Sum of the counts that the ranks gave."""
    num_bad: int
    """Number of ranks with a loss that is not finite."""
    reasons: tuple[str, ...]
    """Of `REASONS`, those that some rank gave: all ranks stop after this update where there is one."""
    saves: bool = False
    """Did some rank ask for a checkpoint?"""


class Decider:
    """Collects this rank's flags and exchanges them with the other ranks'.

    `max_time_s`: seconds from now after which training ends, None for no limit. A flag that comes after an exchange
    began goes with the next one.
    """

    def __init__(self, group: GroupLike, max_time_s: float | None = None) -> None:
        self._group = group
        self._deadline = None if max_time_s is None else time.monotonic() + max_time_s
        self._asked: set[str] = set()
        self._asks_save = self._decided_save = False
        self._sent: list[float] | None = None
        self._handle: dist.Work | None = None
        self._flags: torch.Tensor | None = None
        self.reasons: tuple[str, ...] = ()
        """Why all ranks stop, () while none has to."""

    def ask(self, reason: str) -> None:
        """Ask for a stop of all ranks, for one of `REASONS`. Not collective; safe in a signal handler."""
        self._asked.add(reason)

    def ask_save(self) -> None:
        """Ask for a checkpoint of all ranks after an update. Not collective."""
        self._asks_save = True

    def take_save(self) -> bool:
        """Was a checkpoint decided on, since this was asked last? The same on every rank; not collective."""
        decided, self._decided_save = self._decided_save, False
        return decided

    def begin(self, *, count: float = 0.0, is_bad: bool = False) -> None:
        """Send this rank's flags; `finish` returns the answer. Collective. At most one exchange is under way."""
        if self._deadline is not None and time.monotonic() > self._deadline:
            self._asked.add("time")
        values = [count, float(is_bad), float(self._asks_save), *(float(reason in self._asked) for reason in REASONS)]
        self._asks_save = False
        self._sent = values
        if self._group.world_size == 1:
            return
        self._flags = torch.tensor(values, dtype=torch.float64, device=self._wire_device())
        if isinstance(self._group, Group):
            self._handle = dist.all_reduce(self._flags, group=self._group.process_group, async_op=True)
        else:
            self._group.all_reduce(self._flags)

    @property
    def is_under_way(self) -> bool:
        """Has an exchange begun whose answer was not looked at?"""
        return self._sent is not None

    def finish(self) -> Decision:
        """What all ranks said in the exchange that was begun; begins one first where none was. Collective then."""
        if self._sent is None:
            self.begin()
        if self._handle is not None:
            self._handle.wait()
        assert self._sent is not None  # begin() has just made it
        count, num_bad, num_saves, *flags = self._sent if self._flags is None else self._flags.tolist()
        self._sent = self._flags = self._handle = None
        reasons = tuple(reason for reason, flag in zip(REASONS, flags, strict=True) if flag)
        decision = Decision(count, round(num_bad), reasons, bool(num_saves))
        self._decided_save |= decision.saves
        self.reasons = tuple(reason for reason in REASONS if reason in {*self.reasons, *decision.reasons})
        return decision

    def _wire_device(self) -> torch.device:
        # What Python knows needs no copy to a GPU and no wait for one, where the group can talk from the CPU too.
        return torch.device("cpu") if "gloo" in self._group.backend else self._group.device
