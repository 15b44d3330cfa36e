# SPDX-License-Identifier: Apache-2.0
"""`Shutdown`: end the ranks of a launch step by step, after a failure, a timeout, Ctrl-C or a scheduler's signal."""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable

from ddpilot.findings.text import render_ranks
from ddpilot.launching.escalation import Escalation
from ddpilot.launching.rank_server.fork_safety import STACKS_SIGNAL
from ddpilot.launching.spawning import RankSpawner

_TERM_GRACE_S = 1.0
_FREE_GRACE_S = 1.0
_STACKS_S = 0.3
STOP_GRACE_S = 30.0
"""Seconds that ranks have after a scheduler's signal, and after the first rank exited to be requeued."""

_UPDATE_GRACE_S = 60.0
"""Seconds that ranks have after Ctrl-C to finish an update and stop together; an update is seldom longer."""


class Shutdown:
    """The steps that end a launch. Times are in seconds of the monotonic clock.

    `note` shows a notice; `grace_s`: see `LaunchOptions.stop_grace_s`.
    """

    def __init__(self, spawner: RankSpawner, note: Callable[[str], None], grace_s: float) -> None:
        self._spawner = spawner
        self._note = note
        self._grace_s = grace_s
        self._steps = Escalation()
        self._interrupted_at_s: float | None = None
        self._waits_for_update = False
        self.finishes_update = False
        """True if a rank has reported that it continues to the end of its update."""

    def start_failed(self, now_s: float) -> None:
        """After a rank failed: SIGTERM to the other ranks, SIGKILL 1 s later."""
        self._steps.start((now_s, self._terminate), (now_s + _TERM_GRACE_S, self._kill))

    def start_timed_out(self, now_s: float) -> None:
        """After a timeout: the ranks print their Python stacks, then as in `start_failed`."""
        self.start_failed(now_s + _STACKS_S)
        self._steps.add(now_s, functools.partial(self._signal, STACKS_SIGNAL))

    def start_interrupted(self, now_s: float) -> None:
        """After Ctrl-C: SIGINT; `grace_s` later the ranks' process group is aborted; SIGKILL 1 s after that."""
        self._interrupted_at_s = now_s
        is_short = self._grace_s < _UPDATE_GRACE_S
        longer = f", or {_UPDATE_GRACE_S:g} s where they train to the end of an update" if is_short else ""
        ranks = render_ranks(self._live())
        self._note(f"interrupting {ranks}; they have {self._grace_s:g} s{longer} (interrupt again to kill them now)")
        self._steps.start((now_s, functools.partial(self._signal, signal.SIGINT)))
        self._free_at(now_s + self._grace_s)

    def start_impatient(self, now_s: float) -> None:
        """After a second Ctrl-C: SIGKILL at once."""
        self._interrupted_at_s = None
        self._steps.start((now_s, self._say_kill))

    def start_stopped(self, now_s: float, number: signal.Signals) -> None:
        """After a scheduler's signal to the parent: pass it on to the ranks, SIGKILL 30 s later."""
        self._note(f"{number.name} to {render_ranks(self._live())}; they have {STOP_GRACE_S:g} s")
        pass_on = functools.partial(self._signal, number)
        self._steps.start((now_s, pass_on), (now_s + STOP_GRACE_S, self._say_kill))

    def extend_grace(self, now_s: float, *, has_lost: bool) -> None:
        """After Ctrl-C: give ranks that finish their update more time, unless they wait for a rank that is lost."""
        if self._interrupted_at_s is None:
            return
        grace_ends_s = self._interrupted_at_s + self._grace_s
        # A report after the grace period comes from a rank that was stuck until the process group was aborted.
        waits = self.finishes_update and not has_lost and (self._waits_for_update or now_s < grace_ends_s)
        if waits and not self._waits_for_update:
            until_s = self._interrupted_at_s + max(self._grace_s, _UPDATE_GRACE_S)
            self._free_at(until_s)
            if grace_ends_s < until_s:
                self._steps.add(grace_ends_s, self._say_waiting)
        elif self._waits_for_update and not waits:
            self._free_at(now_s + self._grace_s)
        self._waits_for_update = waits

    def next_due_s(self) -> float | None:
        """Time of the next step, or None if no step is left."""
        return self._steps.due_s

    def run_due(self, now_s: float) -> None:
        """Take the steps that are due, for the ranks that are still running."""
        if self._live():
            self._steps.run_due(now_s)
        else:
            self._steps.clear()

    def _free_at(self, at_s: float) -> None:
        self._steps.discard(self._say_waiting, self._free, self._say_kill)
        self._steps.add(at_s, self._free)
        self._steps.add(at_s + _FREE_GRACE_S, self._say_kill)

    def _live(self) -> tuple[int, ...]:
        return tuple(filter(self._spawner.is_live, range(self._spawner.world_size)))

    def _signal(self, number: int, _now_s: float) -> None:
        self._spawner.signal(self._live(), number, group=False)

    def _say_waiting(self, _now_s: float) -> None:
        self._note(f"{render_ranks(self._live())}: still finishing the update (interrupt again to kill them now)")

    def _free(self, _now_s: float) -> None:
        self._note(f"{render_ranks(self._live())} did not exit; aborting the process group")
        self._spawner.free(self._live())

    def _terminate(self, _now_s: float) -> None:
        self._spawner.signal(self._live(), signal.SIGTERM, group=True)

    def _kill(self, _now_s: float) -> None:
        self._spawner.signal(self._live(), signal.SIGKILL, group=True)

    def _say_kill(self, now_s: float) -> None:
        self._note(f"killing {render_ranks(self._live())}")
        self._kill(now_s)
