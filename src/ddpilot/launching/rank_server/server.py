# SPDX-License-Identifier: Apache-2.0
"""The rank server: a process that has imported torch but not used it, and forks ranks.

The parent starts it with exec in a new session. It serves that one parent over an inherited socket and exits with it.
`multiprocessing.forkserver` is not used because there is one per process, it re-imports the user's ``__main__``,
changes the ranks' default start method, and leaves ranks behind when the parent is killed.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import selectors
import signal
import socket
import sys
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from ddpilot.launching.rank_environment import count_cores
from ddpilot.launching.rank_reports import Hello
from ddpilot.launching.rank_server.fork_safety import CleanWatch, adopt_orphans, become_process_of, outlive_stops
from ddpilot.launching.rank_server.job import Job, kill_orphans
from ddpilot.launching.shipping import fd_socket
from ddpilot.module_names import (
    FORKED_RANK,
    GROUP_TEARDOWN,
    GUARD_HOOK,
    GUARD_PROBES,
    LAUNCHER,
    RECORD_HOOK,
    RECORD_PREFORK,
)

_IMPORTS = (
    "torch",
    "torch.distributed",
    FORKED_RANK,
    RECORD_PREFORK,
    GROUP_TEARDOWN,
    *(name.partition(":")[0] for name in (RECORD_HOOK, GUARD_HOOK, *GUARD_PROBES)),
)
"""Modules that every rank uses before it calls the user's function: 0.1 s of a warm launch if each imported them."""

_LATER_IMPORTS = (LAUNCHER, "torch._dynamo", "tabulate")
"""Modules that many ranks import: where `launch` is imported too (0.1 s), in the first optimizer of a process (0.9 to
1.3 s), and in torch's exit handler after that (0.02 s; only if it is installed). The server imports them while it is
idle, and before it forks ranks of a repeated launch or more than there are cores: each would otherwise import them."""

_LOOK_S = 0.25
"""Interval, in seconds, at which the server checks during an import whether the parent has exited."""


def serve(channel_fd: int, parent_pid: int, preload: tuple[str, ...], may_fork: bool) -> NoReturn:
    """Import torch and `preload`, send `Hello`, and serve until the parent exits."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # the parent's thread may block SIGCHLD, which reports ranks' exits
    gc.disable()  # importing torch creates no garbage: saves a tenth of the time to the first launch
    channel = socket.socket(fileno=channel_fd)
    channel.set_inheritable(False)  # ranks that are exec'ed must not inherit it
    adopt_orphans()
    clean = CleanWatch()
    failed = None
    for name in _IMPORTS:
        importlib.import_module(name)
    if "numpy" in sys.modules:
        importlib.import_module("numpy.random")  # each rank seeds it
    clean.begin()
    for name in preload:
        try:
            importlib.import_module(name)
        except BaseException:  # a module may raise anything; the parent raises an error with the traceback
            failed = (name, traceback.format_exc())
            break
        clean.check(name)
    hello = Hello(pid=os.getpid(), dirty=clean.dirty, failed=failed, files=_files_of_modules())
    try:
        fd_socket.send(channel, hello)
        Server(channel, parent_pid, clean, may_fork and clean.dirty is None).run()
    except fd_socket.Closed:
        _end()
    except Forked as forked:
        run = forked.run
    run()  # outside the handler, so that the server's exception is not the context of the user's exceptions
    os._exit(70)


def _end() -> NoReturn:
    """Run the exit handlers of imported modules, such as removing a temporary folder, and exit."""
    atexit._run_exitfuncs()
    os._exit(0)


def _leave_finalizers_to_server() -> None:
    """In a child: disable the finalizers that the server's imports registered.

    torch's roughly 130 finalizers take 25 ms, and a module's temporary folder must be removed by the server only.
    """
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False


def _files_of_modules() -> dict[str, tuple[int, int]]:
    found = {}
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None)
        if isinstance(path, str) and path.endswith(".py") and os.path.exists(path):
            stat = os.stat(path)
            found[path] = (stat.st_mtime_ns, stat.st_size)
    return found


class Forked(BaseException):
    """Raised in a child to unwind the server's stack, so that a rank's stack shows only the rank. `run`: its main."""

    def __init__(self, run: Callable[[], Any]) -> None:
        super().__init__()
        self.run = run


class Server:
    """The server's event loop: requests of launches, exits of child processes, exit of the parent."""

    def __init__(self, channel: socket.socket, parent_pid: int, clean: CleanWatch, may_fork: bool) -> None:
        self._channel = channel
        self._clean = clean
        self._may_fork = may_fork
        self._jobs: dict[socket.socket, Job] = {}
        self._later_imports = list(_LATER_IMPORTS) if may_fork else []
        self._selector = selectors.DefaultSelector()
        self._selector.register(channel, selectors.EVENT_READ, self._on_channel)
        self._wake_reader, self._wake_writer = os.pipe()
        self._parent_fd = os.pidfd_open(parent_pid) if hasattr(os, "pidfd_open") else None
        self._parent_pid = parent_pid

    def run(self) -> NoReturn:
        """Run the loop. SIGCHLD wakes it through a pipe."""
        os.set_blocking(self._wake_writer, False)
        os.set_blocking(self._wake_reader, False)
        signal.set_wakeup_fd(self._wake_writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # inherited by ranks, which unblock it themselves
        outlive_stops()
        self._selector.register(self._wake_reader, selectors.EVENT_READ, self._on_child)
        if self._parent_fd is not None:  # a child that the parent forked may keep its socket open after its death
            self._selector.register(self._parent_fd, selectors.EVENT_READ, self._on_parent_end)
        gc.enable()
        gc.freeze()
        while True:
            idle = not self._jobs
            # The first job follows `Hello` immediately and must not wait for an import, nor must one after another.
            events = self._selector.select(0.3 if idle and self._later_imports else 0.5)
            for key, _ in events:
                key.data()
            if self._parent_fd is None and os.getppid() != self._parent_pid:
                self._on_parent_end()
            if not events and idle and self._later_imports:
                self._import_next()
            self._sweep()

    def _import_next(self) -> None:
        name = self._later_imports.pop(0)
        gc.disable()  # as in `serve`: saves a seventh of the time
        with self._exiting_with_parent(), contextlib.suppress(ImportError):  # the rank that needs it raises
            importlib.import_module(name)
        gc.enable()
        self._clean.check(name)
        self._may_fork = self._may_fork and self._clean.dirty is None
        gc.freeze()

    @contextlib.contextmanager
    def _exiting_with_parent(self) -> Iterator[None]:
        """Exit soon after the parent although the body, which may take seconds, keeps the loop from noticing."""

        def look(_number: int, _frame: object) -> None:
            if os.getppid() != self._parent_pid:
                self._on_parent_end()

        before = signal.signal(signal.SIGALRM, look)
        signal.setitimer(signal.ITIMER_REAL, _LOOK_S, _LOOK_S)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    def _on_channel(self) -> None:
        try:
            (launch_id, num_ranks, folder, is_repeated), (fd,) = fd_socket.receive(self._channel)
        except fd_socket.Closed:
            self._on_parent_end()
        while self._later_imports and (is_repeated or num_ranks > count_cores()):
            self._import_next()
        job_channel = socket.socket(fileno=fd)
        self._jobs[job_channel] = Job(launch_id, folder, job_channel, self._start_process)
        self._selector.register(job_channel, selectors.EVENT_READ, lambda: self._on_job(job_channel))

    def _on_job(self, channel: socket.socket) -> None:
        try:
            request, fds = fd_socket.receive(channel)
        except fd_socket.Closed:
            self._jobs[channel].abandon()
            self._selector.unregister(channel)
            return
        self._jobs[channel].handle(request, fds)  # in a child this raises Forked, so the descriptors stay open
        fd_socket.close_all(fds)

    def _on_child(self) -> None:
        while True:
            try:
                os.read(self._wake_reader, 4096)
            except BlockingIOError:
                break
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            now = time.monotonic()
            owner = next((job for job in self._jobs.values() if job.owns(ended.si_pid)), None)
            if owner is not None:
                owner.end_process_group(ended.si_pid)
            _, status, usage = os.wait4(ended.si_pid, 0)
            if owner is not None:
                owner.on_exit(ended.si_pid, status, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024), now)

    def _sweep(self) -> None:
        for channel, job in list(self._jobs.items()):
            if not job.has_ended:
                continue
            recorded = set().union(*(each.pids for each in self._jobs.values()))
            if kill_orphans(recorded, job.launch_id if len(self._jobs) > 1 else None):
                continue  # their exits wake the loop again
            del self._jobs[channel]
            if channel in self._selector.get_map():
                self._selector.unregister(channel)
            job.close()

    def _on_parent_end(self) -> NoReturn:
        for job in self._jobs.values():
            job.abandon()
        deadline = time.monotonic() + 2.0
        while self._jobs and time.monotonic() < deadline:
            self._on_child()
            self._sweep()
            time.sleep(0.005)
        _end()

    def _start_process(self, run: Callable[[], Any], argv: list[str], fds: list[int]) -> int:
        """Fork `run`, or exec a fresh interpreter with `argv` if forking is not safe. Returns the process id."""
        server_pid = os.getpid()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # OpenBLAS has a thread, and survives a fork
            pid = os.fork()
        if pid:
            with contextlib.suppress(PermissionError, ProcessLookupError):  # the child has done it, or has exited
                os.setpgid(pid, pid)
            return pid
        try:
            become_process_of(server_pid)
            if not self._may_fork:
                for fd in fds:
                    os.set_inheritable(fd, True)
                os.execv(sys.executable, argv)
            self._close_in_child()
        except BaseException:
            traceback.print_exc()
            os._exit(70)
        raise Forked(run)

    def _close_in_child(self) -> None:
        """Close the server's sockets and pipes in a child, and leave the server's exit handlers to the server."""
        _leave_finalizers_to_server()
        self._selector.close()
        for channel in (self._channel, *self._jobs):
            channel.close()
        for fd in (self._wake_reader, self._wake_writer, self._parent_fd):
            if fd is not None:
                os.close(fd)
