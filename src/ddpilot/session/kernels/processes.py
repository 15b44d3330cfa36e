# SPDX-License-Identifier: Apache-2.0
"""`LocalProcesses`: the rank processes of a session on this machine, forked from the rank server as for `launch`."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from ddpilot.errors import LaunchError
from ddpilot.launching.function_launch.launch import (
    find_working_directory,
    make_rank_start,
    may_fork,
    note_unsafe_fork,
)
from ddpilot.launching.nproc import resolve_nproc
from ddpilot.launching.options import LaunchOptions
from ddpilot.launching.rank_environment import default_variables, module_paths
from ddpilot.launching.rank_reports import Exited, Raised
from ddpilot.launching.rank_server.client import RankHandle, ensure_server, start_rank
from ddpilot.launching.rank_server.job import (
    STORE,
    Finish,
    Finished,
    NotStarted,
    Own,
    Signal,
    Start,
    Started,
    bind_listener,
)
from ddpilot.launching.shipping import fd_socket
from ddpilot.launching.shipping.unpicklable import ship
from ddpilot.launching.system_limits import check_open_files
from ddpilot.module_names import SESSION_MAIN, SESSION_PRELOAD
from ddpilot.output.writer import LabelledWriter
from ddpilot.session.arguments import refuse_in_a_rank
from ddpilot.session.kernels.events import Ended, Wrote
from ddpilot.session.kernels.io_thread import IOThread
from ddpilot.session.kernels.states import SERVER_GONE
from ddpilot.session.protocol.entry_points import KernelStart, serve


class RankProcesses(Protocol):
    """Starts, signals and ends the processes of ranks. Its methods are called in the hub's thread.

    It sends what the processes write (`Wrote`) and how they end (`Ended`) to the hub. A session does not assume that a
    rank is a child of its own process, nor that it runs on the same machine.
    """

    world_size: int

    @property
    def can_start(self) -> bool:
        """True if ranks can still be started after `attach`."""

    def attach(self, hub: IOThread) -> None:
        """Connect to the hub; called once, before the first `start`."""

    def add_hooks(self, hooks: tuple[str, ...], variables: Mapping[str, str]) -> None:
        """Make every rank started from now on call `hooks` first, with `variables` added to its environment."""

    def check_start(self, did: str) -> None:
        """Raise LaunchError if ranks cannot be started now. Called before any rank is ended for `did`."""

    def start(self, rank: int, generation: int) -> None:
        """Start the process of a rank that has none. `generation` is the number of times the group has been rebuilt."""

    def signal(self, ranks: Sequence[int], number: int) -> None:
        """Send a signal to the processes of `ranks`; SIGKILL goes to their whole process groups."""

    def drain(self, rank: int) -> None:
        """Send the hub everything that the rank's process has written so far. Called when a cell ends on it."""

    def pid(self, rank: int) -> int | None:
        """Return the process id; None if the rank has no process, or runs on another machine."""

    def is_live(self, rank: int) -> bool:
        """True if the rank's process was started and has not ended."""

    def close(self) -> None:
        """End all remaining processes and release all resources; a second call does nothing."""


# Not matplotlib: its import reads the backend from the environment and ties figures to a shell.
PRELOAD = (
    "ipykernel.kernelapp",
    "ipykernel.debugger",
    SESSION_MAIN,
    SESSION_PRELOAD,
)
_CHUNK_BYTES = 1 << 16
_MAX_CHUNKS = 32  # more than a pipe holds: a child process of the rank may write without end
_RESTART_VARIABLE = "TORCHELASTIC_RESTART_COUNT"


class LocalProcesses:
    """A `RankProcesses` for this machine.

    `kernel_start` is called for each rank that starts and returns its `KernelStart`.
    """

    def __init__(self, options: LaunchOptions, kernel_start: Callable[[], KernelStart]) -> None:
        self._kernel_start = kernel_start
        self._directory = find_working_directory("starting a session")
        self._sys_path = module_paths()
        self._environ: Mapping[str, str] = {**default_variables(stays=True), **os.environ, **options.env}
        self._options = replace(options, preload=(*PRELOAD, *options.preload))
        self._display = LabelledWriter(options.output, None)
        self.world_size = resolve_nproc(
            options.nproc_per_node, self._environ, self._display.note, backend=options.backend
        )
        check_open_files("starting a session", self.world_size)
        self._hooks: tuple[str, ...] = ()
        self._stack = contextlib.ExitStack()
        self._handles: dict[int, RankHandle] = {}
        self._is_finished = False

    @property
    def can_start(self) -> bool:
        """True if the rank server is running."""
        return not self._is_finished

    def add_hooks(self, hooks: tuple[str, ...], variables: Mapping[str, str]) -> None:
        """Make every rank started from now on call `hooks` first, with `variables` added to its environment."""
        self._hooks = hooks
        self._environ = {**self._environ, **variables}

    def attach(self, hub: IOThread) -> None:
        """Start the session's store, and the rank server unless one is running."""
        self._hub = hub
        self._launch_id = uuid.uuid4().hex
        server = ensure_server(self._environ, self._options.preload, may_fork(self._options))
        if server.hello.dirty is not None and self._options.start_method != "spawn":
            note_unsafe_fork(server, self._options, self._display)
        self._job = self._stack.enter_context(server.job(self._launch_id, self.world_size))
        with bind_listener() as listener:
            self._port = listener.getsockname()[1]
            fd_socket.send(self._job, Start(STORE), [listener.fileno()])
        fd_socket.send(self._job, Own(str(self._kernel_start().folder)))
        hub.watch(self._job.fileno(), self._on_job)

    def check_start(self, did: str) -> None:
        """Raise LaunchError if no rank can be started because the session's working directory was removed."""
        if not os.path.isdir(self._directory):
            raise LaunchError(
                did,
                found=f"{self._directory}, the working directory of the session, was removed",
                fix="Make it again (`os.makedirs`), or stop the session and start one elsewhere",
            )

    def start(self, rank: int, generation: int) -> None:
        """Start the process of a rank that has none."""
        start = make_rank_start(
            rank,
            self._port,
            {},
            options=self._options,
            environ=self._environ,
            count=self.world_size,
            hooks=self._hooks,
            name="serve_kernel",
            launch_id=self._launch_id,
            working_directory=self._directory,
        )
        environ = {**start.environ, _RESTART_VARIABLE: str(generation)}
        start = replace(start, environ=environ, main={}, sys_path=self._sys_path)
        arguments = (self._kernel_start(),)
        parcel, _ = ship("ddpilot-kernel", {}, (serve, arguments, {}), did="starting ranks", known=None)
        try:
            handle = self._handles[rank] = start_rank(self._job, start, parcel)
        finally:
            os.close(parcel)
        self._hub.watch(handle.control.fileno(), functools.partial(self._on_control, handle))
        for stream, fd in handle.pipes.items():
            os.set_blocking(fd, False)
            self._hub.watch(fd, functools.partial(self._on_pipe, handle, stream))

    def signal(self, ranks: Sequence[int], number: int) -> None:
        """Send a signal to the processes of `ranks`; SIGKILL goes to their whole process groups."""
        with contextlib.suppress(fd_socket.Closed):  # the closed connection is handled when it is read
            fd_socket.send(self._job, Signal(tuple(ranks), number, group=number == 9))

    def drain(self, rank: int) -> None:
        """Send the hub everything that the rank's process has written so far."""
        handle = self._handles[rank]
        for stream in list(handle.pipes):
            for _ in range(_MAX_CHUNKS):
                if stream not in handle.pipes or not self._on_pipe(handle, stream):
                    break

    def pid(self, rank: int) -> int | None:
        """Return the process id of a live rank, else None."""
        handle = self._handles.get(rank)
        return handle.pid if handle is not None and handle.is_live else None

    def is_live(self, rank: int) -> bool:
        """True if the rank's process was started and has not ended."""
        handle = self._handles.get(rank)
        return handle is not None and handle.is_live

    def _on_job(self) -> None:
        try:
            message, _ = fd_socket.receive(self._job)
        except fd_socket.Closed:
            self._hub.unwatch(self._job.fileno())
            self._is_finished = True
            for rank in [rank for rank in self._handles if self.is_live(rank)]:
                self._end(self._handles[rank], None, SERVER_GONE)
            return
        if isinstance(message, Finished):
            self._is_finished = True
        elif isinstance(message, (Started, NotStarted, Exited)) and message.rank != STORE:
            handle = self._handles[message.rank]
            if isinstance(message, Started):
                handle.pid = message.pid
            elif isinstance(message, Exited):
                handle.control.setblocking(False)  # a child process of the rank may hold the other end open
                self._on_control(handle)
                self._end(handle, message, self._describe(handle))
            else:
                self._end(handle, None, f"the system gave it no process: {message.reason}")
        elif isinstance(message, Exited):
            self._hub.emit(Ended(STORE, message))

    def _describe(self, handle: RankHandle) -> str:
        if handle.raised is not None:
            return (
                f"its kernel ended with {handle.raised.type_name}: {handle.raised.message}\n{handle.raised.traceback}"
            ).rstrip()
        return ""

    def _end(self, handle: RankHandle, exited: Exited | None, reason: str) -> None:
        self.drain(handle.rank)
        handle.exited = exited or Exited(rank=handle.rank, status=0, peak_memory_bytes=0, time_s=0.0)
        self._forget(handle)
        self._hub.emit(Ended(handle.rank, exited, reason))

    def _forget(self, handle: RankHandle) -> None:
        if handle.control.fileno() != -1:
            self._hub.unwatch(handle.control.fileno())
        for fd in handle.pipes.values():
            self._hub.unwatch(fd)
        handle.close()

    def _on_control(self, handle: RankHandle) -> None:
        """Read what the process reports about its own end: whether the launched function returned or raised."""
        try:
            message, fds = fd_socket.receive(handle.control)
        except fd_socket.Closed:
            self._hub.unwatch(handle.control.fileno())
            return
        fd_socket.close_all(fds)
        if isinstance(message, Raised):
            handle.raised = message

    def _on_pipe(self, handle: RankHandle, stream: str) -> bool:
        fd = handle.pipes[stream]
        try:
            data = os.read(fd, _CHUNK_BYTES)
        except BlockingIOError:  # no data; the pipe may stay open in a child of a process that has ended
            return False
        if data:
            self._hub.emit(Wrote(handle.rank, stream, data))
            return True
        self._hub.unwatch(fd)
        os.close(handle.pipes.pop(stream))
        return False

    def close(self) -> None:
        """End all remaining processes and wait until they have exited."""
        if not hasattr(self, "_job"):
            return
        self._job.settimeout(10.0)
        if self._job.fileno() != -1:
            self._hub.unwatch(self._job.fileno())
            self._finish()
        for handle in self._handles.values():
            self._forget(handle)
        self._stack.close()

    def _finish(self) -> None:
        with contextlib.suppress(fd_socket.Closed, TimeoutError, socket.timeout):
            if not self._is_finished:
                fd_socket.send(self._job, Finish())
            while not self._is_finished:
                message, _ = fd_socket.receive(self._job)
                self._is_finished = isinstance(message, Finished)


def warm_up() -> None:
    """Start the rank server for the first session of this process, unless it is running. Takes a second or two.

    Raises LaunchError for the same reasons as starting a session.
    """
    refuse_in_a_rank()
    options = LaunchOptions()
    ensure_server({**default_variables(stays=True), **os.environ, **options.env}, PRELOAD, may_fork(options))
