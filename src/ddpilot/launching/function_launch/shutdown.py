# SPDX-License-Identifier: Apache-2.0
"""Apply the stop button and signals to the ranks of a launch, and terminate them step by step at stated times."""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable, Sequence

from ddpilot.findings.text import render_ranks
from ddpilot.launching.interrupts import InterruptCatcher
from ddpilot.launching.rank_server.client import RankHandle
from ddpilot.launching.rank_server.fork import STACKS_SIGNAL
from ddpilot.launching.rank_server.job import Signal
from ddpilot.launching.shipping import fd_socket


class Stopping:
    """Starts steps of `ladder` for what `interrupts` has caught. Times are in seconds of the monotonic clock."""

    def __init__(
        self, interrupts: InterruptCatcher, ladder: Escalation, handles: Sequence[RankHandle], grace_s: float
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


_TERM_GRACE_S = 1.0
_FREE_GRACE_S = 1.0
_STACKS_S = 0.3
STOP_GRACE_S = 30.0
"""Seconds that ranks have after a scheduler's signal, and after the first rank exited to be requeued."""

TAKEN_GRACE_S = 60.0
"""Seconds that ranks have after Ctrl-C to finish an update and stop together; an update is seldom longer."""


class Escalation:
    """The scheduled steps that end a launch. `ask` sends a request to the rank server, `say` shows a notice."""

    def __init__(
        self, handles: Sequence[RankHandle], ask: Callable[[Signal], None], say: Callable[[str], None]
    ) -> None:
        self._handles = handles
        self._ask = ask
        self._say = say
        self._steps: list[tuple[float, Callable[[tuple[int, ...]], None]]] = []

    def start_failed(self, now_s: float) -> None:
        """After a rank failed: SIGTERM to the other ranks, SIGKILL 1 s later."""
        self._steps = [(now_s, self._terminate), (now_s + _TERM_GRACE_S, self._kill)]

    def start_timed_out(self, now_s: float) -> None:
        """After a timeout: the ranks print their Python stacks, then as in `start_failed`."""
        self.start_failed(now_s + _STACKS_S)
        self._steps.insert(0, (now_s, self._print_stacks))

    def start_interrupted(self, now_s: float, grace_s: float) -> None:
        """After Ctrl-C: SIGINT, `grace_s` later abort the ranks' process group, another second later SIGKILL."""
        ranks = render_ranks(self._live())
        longer = f", or {TAKEN_GRACE_S:g} s where they train to the end of an update" if grace_s < TAKEN_GRACE_S else ""
        self._say(f"interrupting {ranks}; they have {grace_s:g} s{longer} (interrupt again to kill them now)")
        self._steps = [(now_s, self._interrupt)]
        self.free_at(now_s + grace_s)

    def wait_longer(self, notice_at_s: float, until_s: float) -> None:
        """After Ctrl-C: let ranks finish their update until `until_s`; report those that still do at `notice_at_s`."""
        self.free_at(until_s)
        if notice_at_s < until_s:
            self._steps.insert(len(self._steps) - 2, (notice_at_s, self._say_waiting))

    def free_at(self, at_s: float) -> None:
        """After Ctrl-C: reschedule aborting the process group to `at_s`, and SIGKILL to one second later."""
        first = [step for step in self._steps if step[1] == self._interrupt]
        self._steps = [*first, (at_s, self._free), (at_s + _FREE_GRACE_S, self._say_kill)]

    def start_stopped(self, now_s: float, number: signal.Signals) -> None:
        """After a scheduler's signal to the parent: pass it on to the ranks, SIGKILL 30 s later."""
        self._say(f"{number.name} to {render_ranks(self._live())}; they have {STOP_GRACE_S:g} s")
        pass_on = functools.partial(self._pass_on, number)
        self._steps = [(now_s, pass_on), (now_s + STOP_GRACE_S, self._say_kill)]

    def start_impatient(self, now_s: float) -> None:
        """After a second Ctrl-C: SIGKILL at once."""
        self._steps = [(now_s, self._say_kill)]

    def next_due_s(self) -> float | None:
        """Time of the next step on the monotonic clock, or None if no step is left."""
        return self._steps[0][0] if self._steps else None

    def climb(self, now_s: float) -> None:
        """Execute the steps that are due, for the ranks that are still alive."""
        while self._steps and self._steps[0][0] <= now_s:
            _, act = self._steps.pop(0)
            live = self._live()
            if live:
                act(live)

    def _live(self) -> tuple[int, ...]:
        return tuple(handle.rank for handle in self._handles if handle.is_live)

    def _interrupt(self, live: tuple[int, ...]) -> None:
        self._ask(Signal(live, signal.SIGINT, group=False))

    def _say_waiting(self, live: tuple[int, ...]) -> None:
        self._say(f"{render_ranks(live)}: still ending after the update (interrupt again to kill them now)")

    def _free(self, live: tuple[int, ...]) -> None:
        self._say(f"{render_ranks(live)} did not end; freeing the process group under them")
        for rank in live:
            try:
                fd_socket.send(self._handles[rank].control, "free")
            except fd_socket.Closed:
                continue

    def _print_stacks(self, live: tuple[int, ...]) -> None:
        self._ask(Signal(live, STACKS_SIGNAL, group=False))

    def _pass_on(self, number: signal.Signals, live: tuple[int, ...]) -> None:
        self._ask(Signal(live, number, group=False))

    def _terminate(self, live: tuple[int, ...]) -> None:
        self._ask(Signal(live, signal.SIGTERM))

    def _kill(self, live: tuple[int, ...]) -> None:
        self._ask(Signal(live, signal.SIGKILL))

    def _say_kill(self, live: tuple[int, ...]) -> None:
        self._say(f"killing {render_ranks(live)}")
        self._kill(live)
