# SPDX-License-Identifier: Apache-2.0
"""The parent's event loop for a running launch: output, results, failures, and the steps that end its ranks."""

from __future__ import annotations

import functools
import selectors
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ddpilot.errors import LaunchError, LaunchInterrupted, LaunchTimeoutError, RankError
from ddpilot.findings.text import render_ranks
from ddpilot.launching.first_failure import RankEnd, build_error, choose_failure, may_be_followed
from ddpilot.launching.interrupts import Escalation, InterruptCatcher
from ddpilot.launching.observer import LaunchObserver
from ddpilot.launching.options import LaunchOptions
from ddpilot.launching.rank_environment import EXIT_REQUEUE
from ddpilot.launching.rank_reports import Raised, Returned, Taken
from ddpilot.launching.rank_server.fork_safety import STACKS_SIGNAL
from ddpilot.launching.rank_server.job import STORE, Started
from ddpilot.launching.shipping import fd_socket
from ddpilot.launching.shipping.pickling import open_parcel
from ddpilot.launching.spawning import SERVER_GONE, Ended, RankSpawner, Reported, SpawnerEvent, Wrote
from ddpilot.output.pipe_reader import PipeReader
from ddpilot.user_files import collect_sources

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


_SLOW_EXIT_NOTICE_S = 5.0


@dataclass
class LaunchedRank(RankEnd):
    """State of one rank of a launch."""

    returned: Returned | None = None
    has_ended: bool = False
    parcel: memoryview | None = None
    """The parcel with the rank's value or exception."""

    exit_notice_at_s: float | None = None

    @property
    def has_returned(self) -> bool:
        return self.returned is not None

    def describe_end(self) -> str:
        return "returned" if self.has_returned else super().describe_end()


class Supervisor:
    """Runs one launch to its end. `known`: definitions that the parent shipped by value, in the parcel's order."""

    def __init__(
        self,
        spawner: RankSpawner,
        pipes: PipeReader,
        options: LaunchOptions,
        function_name: str,
        known: Sequence[object],
        interrupts: InterruptCatcher,
        observer: LaunchObserver,
    ) -> None:
        self._spawner = spawner
        self._ranks = [LaunchedRank(rank=rank) for rank in range(spawner.world_size)]
        self._pipes = pipes
        self._options = options
        self._function_name = function_name
        self._known = known
        self._interrupts = interrupts
        self._observer = observer
        self._selector = selectors.DefaultSelector()
        self._failures: list[LaunchedRank] = []
        self._ending: BaseException | None = None
        self._shutdown = Shutdown(spawner, pipes.display.note, options.stop_grace_s)
        self._passed_on: signal.Signals | None = None
        self._has_given_up = False
        self._timeout_at_s = float("inf") if options.timeout_s is None else time.monotonic() + options.timeout_s

    def run(self, parcel: int) -> list[memoryview]:
        """Start the ranks with `parcel`, wait until they have exited, and return the parcels with their values.

        Raises RankError, LaunchTimeoutError, LaunchInterrupted or LaunchError. SIGTERM and SIGUSR1 are passed on; if a
        rank then exits with code 75 after saving, SystemExit(75) is raised. When it returns or raises, all processes of
        the launch have exited.
        """
        try:
            with self._selector:
                self.watch(self._interrupts.fd, self._interrupts.clear)
                try:
                    self._start(parcel)
                    self._supervise()
                except fd_socket.Closed as error:
                    raise self._server_exited() from error
                finally:
                    self._spawner.close()
            self._pipes.close()
            if self._ending is None:
                self._ending = self._observer.finish(self._pipes.display.note)
            if self._ending is not None:
                self._raise()
            return [each.parcel for each in self._ranks if each.parcel is not None]
        finally:
            for each in self._ranks:
                each.parcel = None  # this object and the spawner refer to each other, and last until a collection

    def _start(self, parcel: int) -> None:
        self._spawner.attach(self, self._on_event)
        sources = collect_sources()
        for each in self._ranks:
            self._spawner.start(each.rank, parcel, self._function_name, sources=sources)
        if self._observer.fd is not None:
            self.watch(self._observer.fd, lambda: None)  # `take` is called in each iteration
        self._observer.begin(self._ranks, {name: "".join(lines) for name, lines in sources.items()})

    def _server_exited(self) -> LaunchError:
        return LaunchError(
            f"starting {len(self._ranks)} ranks of `{self._function_name}`",
            found=self._spawner.describe_end(),
            fix="Launch again, which starts a new one. If it happens again, the usual cause is too little memory",
        )

    def _supervise(self) -> None:
        while not self._is_over():
            for key, _ in self._selector.select(self._wait_s()):
                if key.fd in self._selector.get_map():  # an earlier event may have closed it
                    key.data()
            if self._is_over():
                break
            now = time.monotonic()
            self._pipes.show(now)
            self._on_interrupts(now)
            self._pass_on_signal(now)
            has_lost = any(each.returned is None and (each.raised or each.has_ended) for each in self._ranks)
            self._shutdown.extend_grace(now, has_lost=has_lost)
            self._judge(now)
            self._check_observer(now)
            self._shutdown.run_due(now)
            self._notice_slow_exits(now)
        self._judge(float("inf") if self._failures else time.monotonic())

    def _is_over(self) -> bool:
        return self._has_given_up or all(each.has_ended for each in self._ranks)

    def _raise(self) -> None:
        assert self._ending is not None
        if isinstance(self._ending, LaunchInterrupted):
            returned = [each.returned for each in self._ranks if each.returned is not None]
            if len(returned) == len(self._ranks) and any(each.saw_interrupt for each in returned):
                return  # the function handled the interrupt by returning
            ends = "; ".join(f"rank {each.rank} {each.describe_end()}" for each in self._ranks)
            raise LaunchInterrupted(f"the launch of `{self._function_name}` was stopped: {ends}")
        is_requeue = isinstance(self._ending, RankError) and self._ending.exitcode == EXIT_REQUEUE
        if is_requeue and self._interrupts.stop is not None:  # the ranks have saved, and the scheduler needs the code
            self._interrupts.stop = None
            raise SystemExit(EXIT_REQUEUE) from self._ending
        raise self._ending

    def _wait_s(self) -> float:
        now = time.monotonic()
        dues = [self._pipes.next_due_s(), self._timeout_at_s, self._shutdown.next_due_s()]
        if self._failures and self._ending is None:
            dues.append(now + 0.02)
        return max(0.0, min([1.0, *(due - now for due in dues if due is not None)]))

    # the event loop of the spawner

    def watch(self, source: Any, ready: Callable[[], object]) -> None:
        self._selector.register(source, selectors.EVENT_READ, ready)

    def unwatch(self, source: Any) -> None:
        if source in self._selector.get_map():
            self._selector.unregister(source)

    def _on_event(self, event: SpawnerEvent) -> None:
        if isinstance(event, Wrote):
            self._pipes.feed(event.rank, event.stream, event.data, time.monotonic())
        elif isinstance(event, Started):
            self._ranks[event.rank].pid = event.pid
        elif isinstance(event, Reported):
            self._on_report(self._ranks[event.rank], event)
        elif event.rank == STORE:
            self._on_store_end(event)
        else:
            self._on_end(self._ranks[event.rank], event)

    def _on_report(self, rank: LaunchedRank, reported: Reported) -> None:
        if reported.parcel is not None:
            rank.parcel = reported.parcel
        if isinstance(reported.report, Returned):
            rank.returned = reported.report
            rank.exit_notice_at_s = time.monotonic() + _SLOW_EXIT_NOTICE_S
        elif isinstance(reported.report, Raised):
            rank.raised = reported.report
            self._add_failure(rank)
        elif isinstance(reported.report, Taken):
            self._shutdown.finishes_update = True

    def _on_store_end(self, ended: Ended) -> None:
        if self._ending is None:
            self._ending = store_ended(self._function_name, ended)
            self._shutdown.start_failed(time.monotonic())

    def _on_end(self, rank: LaunchedRank, ended: Ended) -> None:
        rank.exited, rank.has_ended = ended.exited, True
        self._pipes.finish(rank.rank, time.monotonic())
        if ended.reason == SERVER_GONE:
            self._ending = self._ending or server_ended(self._function_name)
        elif ended.exited is None:
            self._ending = self._ending or not_started(self._function_name, ended)
            self._has_given_up = True  # the other ranks would wait for this one
        elif rank.returned is None and rank.raised is None:
            self._add_failure(rank)
        elif rank.returned is not None and ended.exited.signal_name is not None and self._ending is None:
            self._pipes.display.note(
                f"rank {rank.rank} returned, then died of {ended.exited.signal_name} while exiting"
            )

    def _add_failure(self, rank: LaunchedRank) -> None:
        if self._ending is None:
            rank.error, rank.since_s = self._open_error(rank), time.monotonic()
            self._failures.append(rank)

    def _open_error(self, rank: LaunchedRank) -> BaseException | None:
        if rank.raised is None or rank.parcel is None:
            return None
        try:
            error, _ = open_parcel(rank.parcel, self._known)
        except Exception as failure:  # unpickling runs the exception's own code; the report has its text anyway
            self._pipes.display.note(f"rank {rank.rank}'s exception could not be rebuilt here: {failure!r}")
            return None
        return error if isinstance(error, BaseException) else None

    # decisions

    def _silent_pids(self) -> list[int]:
        failed = {failure.rank for failure in self._failures}
        silent = [each for each in self._ranks if each.rank not in failed and each.returned is None]
        return [each.pid for each in silent if not each.has_ended and each.pid is not None]

    def _judge(self, now: float) -> None:
        if self._ending is not None:
            return
        chosen = choose_failure(self._failures, now, self._silent_pids)
        if chosen is not None and not may_be_followed(self._ranks, now - chosen.since_s, STOP_GRACE_S):
            others = [failure.rank for failure in self._failures if failure is not chosen and failure.is_victim]
            if not chosen.has_ended:
                self._spawner.drain(chosen.rank)  # it wrote its last lines before it reported
            self._ending = build_error(
                chosen,
                function_name=self._function_name,
                num_ranks=len(self._ranks),
                last_lines=self._pipes.last_lines(chosen.rank),
                victims=others,
                returned=[each.rank for each in self._ranks if each.has_returned],
            )
            self._observer.explain(self._ending)
            self._shutdown.start_failed(now)
        elif now >= self._timeout_at_s:
            self._ending = late = timed_out(self._function_name, self._ranks, self._options.timeout_s)
            self._observer.explain(late)
            self._shutdown.start_timed_out(now)

    def _check_observer(self, now: float) -> None:
        error = self._observer.take(self._pipes.display.note)
        if error is not None and self._ending is None and not self._failures:  # a rank's failure is left to `_judge`
            self._ending = error
            self._shutdown.start_failed(now)

    def _on_interrupts(self, now: float) -> None:
        if not self._interrupts.take():
            return
        if self._ending is None:
            self._ending = LaunchInterrupted()
            self._shutdown.start_interrupted(now)
        else:
            self._shutdown.start_impatient(now)

    def _pass_on_signal(self, now: float) -> None:
        """Pass a caught SIGTERM or SIGUSR1 on to the ranks, once, unless the launch is ending anyway."""
        number = self._interrupts.stop
        if number is not None and self._passed_on is None:
            self._passed_on = number
            if self._ending is None:
                self._shutdown.start_stopped(now, number)

    def _notice_slow_exits(self, now: float) -> None:
        for each in self._ranks:
            if not each.has_ended and each.exit_notice_at_s is not None and now >= each.exit_notice_at_s:
                each.exit_notice_at_s = None
                what = f"rank {each.rank} returned and is still running: a thread or an exit handler"
                self._pipes.display.note(what)


_KILLED = "The usual cause is the kernel's OOM killer; launch again"


def server_ended(function_name: str) -> LaunchError:
    """Error: the rank server exited."""
    return LaunchError(f"running `{function_name}`", found="the rank server ended, and the ranks with it", fix=_KILLED)


def store_ended(function_name: str, ended: Ended) -> LaunchError:
    """Error: the store's process exited, or could not be started."""
    how = ended.reason if ended.exited is None else ended.exited.describe()
    return LaunchError(
        f"running `{function_name}`",
        found=f"the process of its store {how}, and ranks cannot join a group without it",
        fix=_KILLED,
    )


def not_started(function_name: str, ended: Ended) -> LaunchError:
    """Error: a rank's process could not be started."""
    return LaunchError(
        f"starting rank {ended.rank} of `{function_name}`",
        found=ended.reason,
        fix="Ask for fewer ranks, or free memory or processes (`ulimit -u`)",
    )


def timed_out(function_name: str, ranks: Sequence[LaunchedRank], timeout_s: float | None) -> LaunchTimeoutError:
    """Error: `timeout_s` has passed. Reports which ranks had not returned or not exited."""
    late = [each.rank for each in ranks if not each.has_returned]
    exiting = [each.rank for each in ranks if each.has_returned and not each.has_ended]
    states = [f"{render_ranks(late)} had not returned"] * bool(late)
    states += [f"{render_ranks(exiting)} had returned and still ran a thread or an exit handler"] * bool(exiting)
    return LaunchTimeoutError(
        f"running `{function_name}` on {len(ranks)} ranks",
        found=f"{', '.join(states)} after `timeout_s={timeout_s}`",
        fix="Their Python stacks are in the output above; raise the limit if they were only slow",
    )
