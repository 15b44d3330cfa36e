# SPDX-License-Identifier: Apache-2.0
"""How the stop button, pressed once or again, and SIGTERM reach the ranks of a launch."""

from __future__ import annotations

from collections.abc import Sequence

from ddpilot.launching.interrupts import InterruptCatcher
from ddpilot.launching.local.handles import RankHandle
from ddpilot.launching.local.ladder import TAKEN_GRACE_S, Ladder


class Stopping:
    """Starts the `ladder` that ends ranks when `interrupts` has caught something. Times are of the monotonic clock."""

    def __init__(
        self, interrupts: InterruptCatcher, ladder: Ladder, handles: Sequence[RankHandle], grace_s: float
    ) -> None:
        self._interrupts = interrupts
        self._ladder = ladder
        self._handles = handles
        self._grace_s = grace_s
        self._interrupted_at_s: float | None = None
        self._has_passed_on = self._is_patient = False
        self.has_taken = False
        """Whether a rank said that it goes on to the end of its update."""

    def press(self, now: float, *, is_first: bool) -> None:
        """The stop button was pressed; the first press asks, the next ones do not wait."""
        if is_first:
            self._interrupted_at_s = now
            self._ladder.start_interrupted(now, self._grace_s)
        else:
            self._interrupted_at_s = None
            self._ladder.start_impatient(now)

    def set_grace(self, now: float) -> None:
        """Ranks that go on to the end of their update have longer, while none has gone that they would wait for."""
        if self._interrupted_at_s is None:
            return
        grace_s, at_s = self._grace_s, self._interrupted_at_s
        has_lost = any(each.returned is None and (each.raised or not each.is_live) for each in self._handles)
        # What is said after the grace was said by a rank that had been stuck until the group was freed.
        is_patient = self.has_taken and not has_lost and (self._is_patient or now < at_s + grace_s)
        if is_patient and not self._is_patient:
            self._ladder.wait_longer(at_s + grace_s, at_s + max(grace_s, TAKEN_GRACE_S))
        elif self._is_patient and not is_patient:
            self._ladder.free_at(now + grace_s)
        self._is_patient = is_patient

    def pass_on(self, now: float, *, is_ending: bool) -> None:
        """SIGTERM or SIGUSR1, once caught, goes to the ranks, unless the launch is ending anyway."""
        if self._interrupts.stop is not None and not self._has_passed_on:
            self._has_passed_on = True
            if not is_ending:
                self._ladder.start_stopped(now, self._interrupts.stop)
