# SPDX-License-Identifier: Apache-2.0
"""Apply the stop button, pressed once or again, and SIGTERM or SIGUSR1 to the ranks of a launch."""

from __future__ import annotations

from collections.abc import Sequence

from ddpilot.launching.function_launch.shutdown import TAKEN_GRACE_S, Ladder
from ddpilot.launching.interrupts import InterruptCatcher
from ddpilot.launching.rank_server.handles import RankHandle


class Stopping:
    """Starts steps of `ladder` for what `interrupts` has caught. Times are in seconds of the monotonic clock."""

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
        """True if a rank reported that it continues to the end of its update."""

    def press(self, now: float, *, is_first: bool) -> None:
        """Handle a press of the stop button: the first one interrupts the ranks, a later one kills them."""
        if is_first:
            self._interrupted_at_s = now
            self._ladder.start_interrupted(now, self._grace_s)
        else:
            self._interrupted_at_s = None
            self._ladder.start_impatient(now)

    def set_grace(self, now: float) -> None:
        """Extend the grace period of ranks that finish their update, unless a rank they would wait for is lost."""
        if self._interrupted_at_s is None:
            return
        grace_s, at_s = self._grace_s, self._interrupted_at_s
        has_lost = any(each.returned is None and (each.raised or not each.is_live) for each in self._handles)
        # A report after the grace period comes from a rank that was stuck until the process group was aborted.
        is_patient = self.has_taken and not has_lost and (self._is_patient or now < at_s + grace_s)
        if is_patient and not self._is_patient:
            self._ladder.wait_longer(at_s + grace_s, at_s + max(grace_s, TAKEN_GRACE_S))
        elif self._is_patient and not is_patient:
            self._ladder.free_at(now + grace_s)
        self._is_patient = is_patient

    def pass_on(self, now: float, *, is_ending: bool) -> None:
        """Pass a caught SIGTERM or SIGUSR1 on to the ranks, unless the launch is ending anyway."""
        if self._interrupts.stop is not None and not self._has_passed_on:
            self._has_passed_on = True
            if not is_ending:
                self._ladder.start_stopped(now, self._interrupts.stop)
