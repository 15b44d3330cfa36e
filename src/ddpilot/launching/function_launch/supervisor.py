# SPDX-License-Identifier: Apache-2.0
"""The parent's event loop for a running launch: output, results, failures, shutdown, and errors of the launch."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time
from collections.abc import Sequence
from typing import Any

import psutil

from ddpilot.errors import LaunchError, LaunchInterrupted, LaunchTimeoutError, RankError
from ddpilot.findings.text import render_ranks
from ddpilot.launching.failures import Failure, build_error, choose_failure
from ddpilot.launching.function_launch import supervisor
from ddpilot.launching.function_launch.shutdown import STOP_GRACE_S, Shutdown
from ddpilot.launching.interrupts import InterruptCatcher
from ddpilot.launching.observer import LaunchObserver
from ddpilot.launching.options import LaunchOptions
from ddpilot.launching.rank_environment import EXIT_REQUEUE
from ddpilot.launching.rank_reports import Exited, Raised, Returned, Taken
from ddpilot.launching.rank_server.client import RankHandle
from ddpilot.launching.rank_server.job import STORE, Finish, Finished, NotStarted, Signal, Started
from ddpilot.launching.shipping import fd_socket
from ddpilot.launching.shipping.memory_file import map_private
from ddpilot.launching.shipping.parcel import open_parcel
from ddpilot.output.pipe_reader import PipeReader

_SLOW_EXIT_NOTICE_S = 5.0
_DEATH_LIMIT_S = 2.0


class Supervisor:
    """Runs one launch to its end. `known`: definitions that the parent shipped by value, in the parcel's order."""

    def __init__(
        self,
        job: socket.socket,
        handles: Sequence[RankHandle],
        pipes: PipeReader,
        options: LaunchOptions,
        function_name: str,
        known: Sequence[object],
        interrupts: InterruptCatcher,
        observer: LaunchObserver | None = None,
    ) -> None:
        self._job = job
        self._handles = handles
        self._pipes = pipes
        self._options = options
        self._function_name = function_name
        self._known = known
        self._interrupts = interrupts
        self._observer = observer
        self._selector = selectors.DefaultSelector()
        self._failures: list[Failure] = []
        self._ending: BaseException | None = None
        self._shutdown = Shutdown(handles, self._ask, pipes.display.note, options.stop_grace_s)
        self._passed_on: signal.Signals | None = None
        self._finish_sent = self._finished = False
        self._timeout_at_s = float("inf") if options.timeout_s is None else time.monotonic() + options.timeout_s

    def run(self, answers: Sequence[Any] = ()) -> None:
        """Wait until every rank has exited. Raises RankError, LaunchTimeoutError, LaunchInterrupted or LaunchError.

        SIGTERM and SIGUSR1 are passed on; if a rank then exits with code 75 after saving, SystemExit(75) is raised.

        `answers`: messages that the rank server sent while the ranks were being started.

        When it returns or raises, all processes of the launch have exited.
        """
        with self._selector:
            self._selector.register(self._interrupts.fd, selectors.EVENT_READ, self._interrupts.clear)
            self._selector.register(self._job, selectors.EVENT_READ, self._on_job)
            if self._observer is not None:  # `take` is called in each iteration
                self._selector.register(self._observer.fd, selectors.EVENT_READ, lambda: None)
            for handle in self._handles:
                self._watch(handle)
            for message in answers:
                self._on_message(message)
            while not self._finished:
                for key, _ in self._selector.select(self._wait_s()):
                    if key.fd in self._selector.get_map():  # an earlier event may have closed it
                        key.data()
                now = time.monotonic()
                self._pipes.show(now)
                self._on_interrupts(now)
                self._pass_on_signal(now)
                self._shutdown.extend_grace(now)
                self._judge(now)
                self._check_observer(now)
                self._shutdown.run_due(now)
                self._notice_slow_exits(now)
        self._pipes.close()
        if self._ending is None and self._observer is not None:
            self._ending = self._observer.finish(self._pipes.display.note)
        if self._ending is not None:
            self._raise()

    def _raise(self) -> None:
        assert self._ending is not None
        if isinstance(self._ending, LaunchInterrupted):
            returned = [handle.returned for handle in self._handles if handle.returned is not None]
            if len(returned) == len(self._handles) and any(each.saw_interrupt for each in returned):
                return  # the function handled the interrupt by returning
            raise LaunchInterrupted(f"the launch of `{self._function_name}` was stopped: {self._describe_ends()}")
        is_requeue = isinstance(self._ending, RankError) and self._ending.exitcode == EXIT_REQUEUE
        if is_requeue and self._interrupts.stop is not None:  # the ranks have saved, and the scheduler needs the code
            self._interrupts.stop = None
            raise SystemExit(EXIT_REQUEUE) from self._ending
        raise self._ending

    def _watch(self, handle: RankHandle) -> None:
        self._selector.register(handle.control, selectors.EVENT_READ, lambda: self._on_control(handle))
        for stream, fd in handle.pipes.items():
            self._selector.register(fd, selectors.EVENT_READ, lambda stream=stream: self._on_pipe(handle, stream))

    def _wait_s(self) -> float:
        now = time.monotonic()
        dues = [self._pipes.next_due_s(), self._timeout_at_s, self._shutdown.next_due_s()]
        if self._failures and self._ending is None:
            dues.append(now + 0.02)
        return max(0.0, min([1.0, *(due - now for due in dues if due is not None)]))

    # events

    def _on_job(self) -> None:
        try:
            message, _ = fd_socket.receive(self._job)
        except fd_socket.Closed:
            message = Finished(0)
            self._await_death_with_server()
            if self._ending is None:
                self._ending = supervisor.server_ended(self._function_name)
        self._on_message(message)

    def _await_death_with_server(self) -> None:
        """Wait until the ranks of a dead server have exited; the operating system kills them."""
        limit_s = time.monotonic() + _DEATH_LIMIT_S
        pids = [handle.pid for handle in self._handles if handle.is_live and handle.pid is not None]
        while any(map(psutil.pid_exists, pids)) and time.monotonic() < limit_s:
            time.sleep(0.005)

    def _on_message(self, message: Any) -> None:
        if isinstance(message, Started) and message.rank != STORE:
            self._handles[message.rank].pid = message.pid
        elif isinstance(message, Exited) and message.rank != STORE:
            self._on_exit(self._handles[message.rank], message)
        elif isinstance(message, Exited):
            self._on_store_exit(message)
        elif isinstance(message, NotStarted):
            self._on_not_started(message)
        elif isinstance(message, Finished):
            self._finished = True

    def _on_store_exit(self, exited: Exited) -> None:
        if self._ending is None:
            self._ending = supervisor.store_ended(self._function_name, exited)
            self._shutdown.start_failed(time.monotonic())

    def _on_not_started(self, message: NotStarted) -> None:
        if self._ending is None:
            self._ending = supervisor.not_started(self._function_name, message)
        self._finish_sent = True
        self._ask(Finish())

    def _on_control(self, handle: RankHandle) -> None:
        try:
            message, fds = fd_socket.receive(handle.control)
        except fd_socket.Closed:
            self._selector.unregister(handle.control)
            return
        if fds:
            (handle.parcel,) = fds
        if isinstance(message, Returned):
            handle.returned = message
            handle.exited_notice_at_s = time.monotonic() + _SLOW_EXIT_NOTICE_S
        elif isinstance(message, Taken):
            self._shutdown.finishes_update = True
        elif isinstance(message, Raised):
            handle.raised = message
            self._add_failure(handle)

    def _on_pipe(self, handle: RankHandle, stream: str) -> None:
        if not self._pipes.read(handle.pipes[stream], handle.rank, stream, time.monotonic()):
            self._close_pipe(handle, stream)

    def _close_pipe(self, handle: RankHandle, stream: str) -> None:
        fd = handle.pipes.pop(stream)
        self._selector.unregister(fd)
        os.close(fd)

    def _on_exit(self, handle: RankHandle, exited: Exited) -> None:
        handle.control.setblocking(False)  # a process that the rank forked may keep the other end open
        while handle.control in self._selector.get_map():
            self._on_control(handle)  # messages sent before the exit
        handle.exited = exited
        for stream, fd in list(handle.pipes.items()):
            self._pipes.drain(fd, handle.rank, stream, time.monotonic())
            self._close_pipe(handle, stream)
        if handle.returned is None and handle.raised is None:
            self._add_failure(handle)
        elif handle.returned is not None and exited.signal_name is not None and self._ending is None:
            self._pipes.display.note(f"rank {handle.rank} returned, then died of {exited.signal_name} while exiting")
        if not any(each.is_live for each in self._handles):
            self._finish()

    def _add_failure(self, handle: RankHandle) -> None:
        if self._ending is not None:
            return
        error = self._open_error(handle)
        self._failures.append(
            Failure(rank=handle.rank, raised=handle.raised, exited=handle.exited, error=error, since_s=time.monotonic())
        )

    def _open_error(self, handle: RankHandle) -> BaseException | None:
        if handle.raised is None or handle.parcel is None:
            return None
        try:
            error, _ = open_parcel(map_private(handle.parcel), self._known)
        except Exception as failure:  # unpickling runs the exception's own code; the report has its text anyway
            self._pipes.display.note(f"rank {handle.rank}'s exception could not be rebuilt here: {failure!r}")
            return None
        return error if isinstance(error, BaseException) else None

    # decisions

    def _unheard(self) -> list[int]:
        failed = {failure.rank for failure in self._failures}
        silent = [handle for handle in self._handles if handle.rank not in failed and handle.returned is None]
        return [handle.pid for handle in silent if handle.is_live and handle.pid is not None]

    def _judge(self, now: float) -> None:
        if self._ending is not None:
            return
        chosen = choose_failure(self._failures, now, self._unheard)
        if chosen is not None and not self._may_be_followed(chosen, now):
            others = [failure.rank for failure in self._failures if failure is not chosen and failure.is_victim]
            returned = [handle.rank for handle in self._handles if handle.returned is not None]
            self._drain_output(chosen.rank)
            self._ending = build_error(
                chosen,
                function_name=self._function_name,
                num_ranks=len(self._handles),
                last_lines=self._pipes.last_lines(chosen.rank),
                victims=others,
                returned=returned,
            )
            if self._observer is not None:
                self._observer.explain(self._ending)
            self._shutdown.start_failed(now)
        elif now >= self._timeout_at_s:
            self._ending = late = supervisor.timed_out(self._function_name, self._handles, self._options.timeout_s)
            if self._observer is not None:
                self._observer.explain(late)
            self._shutdown.start_timed_out(now)

    def _may_be_followed(self, chosen: Failure, now: float) -> bool:
        """True while the other ranks may still exit with the requeue code too, for example in a `finally`."""
        ends = [handle.raised or handle.exited for handle in self._handles]
        is_open = any(each.is_live for each in self._handles) and all(each.returned is None for each in self._handles)
        is_requeue = all(end is None or end.exitcode == EXIT_REQUEUE for end in ends)
        return is_open and is_requeue and now - chosen.since_s <= STOP_GRACE_S

    def _check_observer(self, now: float) -> None:
        if self._observer is None:
            return
        error = self._observer.take(self._pipes.display.note)
        if error is not None and self._ending is None and not self._failures:  # a rank's failure is left to `_judge`
            self._ending = error
            self._shutdown.start_failed(now)

    def _drain_output(self, rank: int) -> None:
        """Read all pending output of a rank that raised: it wrote its last lines before it reported."""
        handle = self._handles[rank]
        for stream, fd in handle.pipes.items():
            self._pipes.drain(fd, rank, stream, time.monotonic())
            os.set_blocking(fd, True)

    def _on_interrupts(self, now: float) -> None:
        if self._finish_sent or not self._interrupts.take():
            return
        is_first = self._ending is None
        self._ending = self._ending or LaunchInterrupted()
        if is_first:
            self._shutdown.start_interrupted(now)
        else:
            self._shutdown.start_impatient(now)

    def _pass_on_signal(self, now: float) -> None:
        """Pass a caught SIGTERM or SIGUSR1 on to the ranks, once, unless the launch is ending anyway."""
        number = self._interrupts.stop
        if number is not None and self._passed_on is None and not self._finish_sent:
            self._passed_on = number
            if self._ending is None:
                self._shutdown.start_stopped(now, number)

    def _notice_slow_exits(self, now: float) -> None:
        for handle in self._handles:
            if handle.is_live and handle.exited_notice_at_s is not None and now >= handle.exited_notice_at_s:
                handle.exited_notice_at_s = None
                what = f"rank {handle.rank} returned and is still running: a thread or an exit handler"
                self._pipes.display.note(what)

    def _finish(self) -> None:
        if not self._finish_sent:
            self._finish_sent = True
            self._judge(float("inf") if self._failures else time.monotonic())
            self._ask(Finish())

    def _ask(self, request: Signal | Finish) -> None:
        try:
            fd_socket.send(self._job, request)
        except fd_socket.Closed:  # the loop reads the end of file next
            return

    def _describe_ends(self) -> str:
        return "; ".join(f"rank {handle.rank} {handle.describe_end()}" for handle in self._handles)


_KILLED = "If nobody killed it, the kernel's OOM killer is the usual cause; launch again"


def server_ended(function_name: str) -> LaunchError:
    """Error: the rank server exited."""
    return LaunchError(f"running `{function_name}`", found="the rank server ended, and the ranks with it", fix=_KILLED)


def store_ended(function_name: str, exited: Exited) -> LaunchError:
    """Error: the store's process exited."""
    return LaunchError(
        f"running `{function_name}`",
        found=f"the process of its store ended with code {exited.exitcode}, and ranks cannot meet without it",
        fix=_KILLED,
    )


def not_started(function_name: str, message: NotStarted) -> LaunchError:
    """Error: a rank's process could not be started."""
    return LaunchError(
        f"starting rank {message.rank} of `{function_name}`",
        found=message.reason,
        fix="Ask for fewer ranks, or free memory or processes (`ulimit -u`)",
    )


def timed_out(function_name: str, handles: Sequence[RankHandle], timeout_s: float | None) -> LaunchTimeoutError:
    """Error: `timeout_s` has passed. Reports which ranks had not returned or not exited."""
    late = [handle.rank for handle in handles if handle.returned is None]
    exiting = [handle.rank for handle in handles if handle.returned is not None and handle.is_live]
    states = [f"{render_ranks(late)} had not returned"] * bool(late)
    states += [f"{render_ranks(exiting)} had returned and still ran a thread or an exit handler"] * bool(exiting)
    return LaunchTimeoutError(
        f"running `{function_name}` on {len(handles)} ranks",
        found=f"{', '.join(states)} after `timeout_s={timeout_s}`",
        fix="Their Python stacks are in the output above; raise the limit if they were only slow",
    )
