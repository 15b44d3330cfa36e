# SPDX-License-Identifier: Apache-2.0
"""Start, signal and end the processes of ranks: the interface `RankSpawner`, and `ForkedRanks` for this machine.

Launches and sessions see a rank as events and bytes, never as a socket or a process of their own, so that a spawner may
start ranks on other machines.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import psutil

from ddpilot.errors import LaunchError
from ddpilot.launching.options import LaunchOptions
from ddpilot.launching.rank_environment import NodePlacement, choose_num_threads, module_paths, rank_variables
from ddpilot.launching.rank_reports import Exited, Raised, RankStart, Returned, Taken
from ddpilot.launching.rank_server import job
from ddpilot.launching.rank_server.client import ensure_server
from ddpilot.launching.shipping import fd_socket
from ddpilot.launching.shipping.memory_file import map_private

_CHUNK_BYTES = 1 << 16
_MAX_CHUNKS = 32
"""Maximum number of chunks to read at once: a child process that a rank has left behind may write forever."""
_MAX_UNANSWERED = 16
_DEATH_LIMIT_S = 2.0
_FINISH_LIMIT_S = 10.0

SERVER_GONE = "ended with the rank server"
"""Reason of `Ended` for the ranks of a spawner whose server has exited."""


@dataclass(frozen=True)
class Wrote:
    """Bytes that a rank's process wrote to file descriptor 1 ("stdout") or 2 ("stderr")."""

    rank: int
    stream: str
    data: bytes


@dataclass(frozen=True)
class Reported:
    """A rank reported on its function. `parcel`: the value or the exception, None if it could not be pickled."""

    rank: int
    report: Returned | Raised | Taken
    parcel: memoryview | None


@dataclass(frozen=True)
class Ended:
    """A rank's process ended, after everything that it wrote and reported; or, for rank `job.STORE`, the store's.

    `exited` is None if its exit status is unknown or it was never started; `reason` adds other information, or is "".
    """

    rank: int
    exited: Exited | None
    reason: str = ""


SpawnerEvent = job.Started | Wrote | Reported | Ended


class EventLoop(Protocol):
    """A loop that waits for file descriptors."""

    def watch(self, source: Any, ready: Callable[[], object]) -> None:
        """Call `ready` whenever the file descriptor `source` is readable."""

    def unwatch(self, source: Any) -> None:
        """Stop watching `source`, if it is watched."""


@dataclass
class RankHandle:
    """Channels to one rank's process."""

    rank: int
    control: socket.socket
    pipes: dict[str, int]
    """The parent's ends of the "stdout" and "stderr" pipes that are still open."""

    pid: int | None = None
    is_live: bool = True
    """True until the process has been reaped."""

    def close(self) -> None:
        """Close all file descriptors that are still open."""
        self.control.close()
        fd_socket.close_all(self.pipes.values())
        self.pipes.clear()


class RankSpawner(Protocol):
    """The processes of `world_size` ranks. All methods are called in the thread of the event loop.

    `attach` and `start` raise fd_socket.Closed if what starts the ranks has exited.
    """

    world_size: int

    @property
    def can_start(self) -> bool:
        """True if ranks can still be started after `attach`."""

    def attach(self, loop: EventLoop, emit: Callable[[SpawnerEvent], object]) -> None:
        """Start the ranks' store and send all events to `emit`; called once, before the first `start`."""

    def add_hooks(self, hooks: tuple[str, ...], variables: Mapping[str, str]) -> None:
        """Make every rank started from now on call `hooks` first, with `variables` added to its environment."""

    def start(self, rank: int, parcel: int, name: str, *, sources: dict[str, list[str]], restart: int = 0) -> None:
        """Start the process of a rank that has none.

        `parcel`: a memory file with the function to run, which messages call `name`, and its arguments; `sources`:
        source text that has no file, by name; `restart`: how often the group has been rebuilt.
        """

    def signal(self, ranks: Sequence[int], number: int, *, group: bool) -> None:
        """Send a signal to the processes of `ranks`, or to their whole process groups."""

    def free(self, ranks: Sequence[int]) -> None:
        """Abort the process groups of torch in `ranks`, so that their collectives return with an error."""

    def drain(self, rank: int) -> None:
        """Emit everything that the rank's process has written so far."""

    def pid(self, rank: int) -> int | None:
        """Process id; None if the rank has no process, or runs on a different machine."""

    def is_live(self, rank: int) -> bool:
        """True if the rank's process was started and has not ended."""

    def describe_end(self) -> str:
        """How what starts the ranks has exited, after fd_socket.Closed was raised."""

    def close(self) -> None:
        """End all remaining processes and release all resources; a second call does nothing."""


class ForkedRanks:
    """A `RankSpawner` for this machine, whose rank server forks the ranks. Starts the server unless one is running.

    `main`: `__file__` and `__package__` for the ranks' ``__main__``; `folder`: removed when the ranks have ended, even
    if this process is killed; `note` shows a notice. `placement`: if this machine is one of several nodes; then `store`
    is on node 0 the socket on which the store listens, which this object closes, and elsewhere the port; `launch_id` is
    the same on all nodes. Raises LaunchError if the server cannot be started, or cannot be forked and `options` require
    that.
    """

    def __init__(
        self,
        options: LaunchOptions,
        environ: Mapping[str, str],
        world_size: int,
        note: Callable[[str], None],
        main: dict[str, str],
        folder: str | None = None,
        *,
        placement: NodePlacement | None = None,
        store: socket.socket | int | None = None,
        launch_id: str | None = None,
    ) -> None:
        self.world_size = world_size
        self._placement = placement or NodePlacement(world_size=world_size, local_world_size=world_size)
        self._store = store
        self._options = options
        self._environ = environ
        self._main = main
        self._folder = folder
        self._directory = os.getcwd()
        self._sys_path = module_paths()
        self._hooks: tuple[str, ...] = ()
        self._launch_id = launch_id or uuid.uuid4().hex
        self._handles: dict[int, RankHandle] = {}
        self._num_unanswered = 0
        self._is_finished = False
        self._stack = contextlib.ExitStack()
        self.server = ensure_server(environ, options.preload, may_fork(options))
        if self.server.hello.dirty is not None and options.start_method != "spawn":
            _note_unsafe_fork(self.server.hello.dirty, options, note)

    @property
    def can_start(self) -> bool:
        return not self._is_finished

    def attach(self, loop: EventLoop, emit: Callable[[SpawnerEvent], object]) -> None:
        self._loop, self._emit = loop, emit
        num_ranks = self._placement.local_world_size
        self._job = self._stack.enter_context(
            self.server.job(self._launch_id, num_ranks, self._folder, self._options.is_repeated)
        )
        if isinstance(self._store, int):
            self._port = self._store
        else:
            with self._store or job.bind_listener() as listener:
                self._port = listener.getsockname()[1]
                fd_socket.send(self._job, job.Start(job.STORE), [listener.fileno()])
        loop.watch(self._job.fileno(), self._on_job)

    def add_hooks(self, hooks: tuple[str, ...], variables: Mapping[str, str]) -> None:
        self._hooks = hooks
        self._environ = {**self._environ, **variables}

    def start(self, rank: int, parcel: int, name: str, *, sources: dict[str, list[str]], restart: int = 0) -> None:
        num_threads = choose_num_threads(self._environ, self._placement.local_world_size)
        variables = rank_variables(
            launch_id=self._launch_id,
            rank=rank,
            placement=self._placement,
            master_port=self._port,
            num_threads=num_threads,
            backend=self._options.backend,
            restart=restart,
        )
        start = RankStart(
            launch_id=self._launch_id,
            rank=rank,
            environ={**self._environ, **variables},
            working_directory=self._directory,
            sys_path=self._sys_path,
            argv=list(sys.argv),
            main=self._main,
            num_threads=num_threads,
            hooks=self._hooks,
            sources=sources,
            function_name=name,
        )
        handle = self._handles[rank] = start_rank(self._job, start, parcel)
        self._loop.watch(handle.control.fileno(), functools.partial(self._on_control, handle))
        for stream, fd in handle.pipes.items():
            os.set_blocking(fd, False)
            self._loop.watch(fd, functools.partial(self._on_pipe, handle, stream))
        self._num_unanswered += 1
        # Limit unanswered requests: if both sockets were full, server and parent would block each other.
        while self._num_unanswered > _MAX_UNANSWERED and not self._is_finished:
            self._on_job()

    def signal(self, ranks: Sequence[int], number: int, *, group: bool) -> None:
        self._ask(job.Signal(tuple(ranks), number, group))

    def free(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            with contextlib.suppress(fd_socket.Closed):
                fd_socket.send(self._handles[rank].control, "free")

    def drain(self, rank: int) -> None:
        handle = self._handles[rank]
        for stream in list(handle.pipes):
            for _ in range(_MAX_CHUNKS):
                if stream not in handle.pipes or not self._on_pipe(handle, stream):
                    break

    def pid(self, rank: int) -> int | None:
        handle = self._handles.get(rank)
        return handle.pid if handle is not None and handle.is_live else None

    def is_live(self, rank: int) -> bool:
        handle = self._handles.get(rank)
        return handle is not None and handle.is_live

    def describe_end(self) -> str:
        return f"the rank server exited: {self.server.describe_end()}"

    def close(self) -> None:
        if hasattr(self, "_job") and self._job.fileno() != -1:
            self._loop.unwatch(self._job.fileno())
            self._job.settimeout(_FINISH_LIMIT_S)
            self._ask(job.Finish())
            with contextlib.suppress(fd_socket.Closed, TimeoutError, socket.timeout):
                while not self._is_finished:
                    message, _ = fd_socket.receive(self._job)
                    self._is_finished = isinstance(message, job.Finished)
        for handle in self._handles.values():
            self._release(handle)
        self._stack.close()

    def _ask(self, request: job.Signal | job.Finish) -> None:
        with contextlib.suppress(fd_socket.Closed):  # the loop reads the end of file next
            fd_socket.send(self._job, request)

    def _on_job(self) -> None:
        try:
            message, _ = fd_socket.receive(self._job)
        except fd_socket.Closed:
            self._on_server_end()
            return
        if isinstance(message, (job.Started, job.NotStarted)) and message.rank != job.STORE:
            self._num_unanswered -= 1
        if isinstance(message, job.Finished):
            self._is_finished = True
        elif isinstance(message, job.Started) and message.rank != job.STORE:
            self._handles[message.rank].pid = message.pid
            self._emit(message)
        elif isinstance(message, job.NotStarted):
            self._on_end(message.rank, None, f"the system gave it no process: {message.reason}")
        elif isinstance(message, Exited):
            self._on_end(message.rank, message, "")

    def _on_server_end(self) -> None:
        """Wait until the ranks of a server that has exited are gone too; the operating system kills them."""
        self._loop.unwatch(self._job.fileno())
        self._is_finished = True
        live = [handle for handle in self._handles.values() if handle.is_live]
        limit_s = time.monotonic() + _DEATH_LIMIT_S
        pids = [handle.pid for handle in live if handle.pid is not None]
        while any(map(psutil.pid_exists, pids)) and time.monotonic() < limit_s:
            time.sleep(0.005)
        for handle in live:
            self._on_end(handle.rank, None, SERVER_GONE)

    def _on_end(self, rank: int, exited: Exited | None, reason: str) -> None:
        if rank != job.STORE:
            handle = self._handles[rank]
            handle.control.setblocking(False)  # a child process of the rank may hold the other end open
            while handle.control.fileno() != -1 and self._on_control(handle):
                pass
            self.drain(rank)
            handle.is_live = False
            self._release(handle)
        self._emit(Ended(rank, exited, reason))

    def _release(self, handle: RankHandle) -> None:
        if handle.control.fileno() != -1:
            self._loop.unwatch(handle.control.fileno())
        for fd in handle.pipes.values():
            self._loop.unwatch(fd)
        handle.close()

    def _on_control(self, handle: RankHandle) -> bool:
        """Emit the next report of a rank. Returns False if there is none."""
        try:
            report, fds = fd_socket.receive(handle.control)
        except fd_socket.Closed:
            self._loop.unwatch(handle.control.fileno())
            return False
        try:
            parcel = map_private(fds[0]) if fds else None
        finally:
            fd_socket.close_all(fds)
        self._emit(Reported(handle.rank, report, parcel))
        return True

    def _on_pipe(self, handle: RankHandle, stream: str) -> bool:
        fd = handle.pipes[stream]
        try:
            data = os.read(fd, _CHUNK_BYTES)
        except BlockingIOError:  # no data; the pipe may stay open in a child of a process that has ended
            return False
        if data:
            self._emit(Wrote(handle.rank, stream, data))
            return True
        self._loop.unwatch(fd)
        os.close(handle.pipes.pop(stream))
        return False


def start_rank(channel: socket.socket, start: RankStart, parcel: int) -> RankHandle:
    """Ask the server to start a rank, and send the rank `start`. Raises fd_socket.Closed if the server has exited."""
    control, theirs = socket.socketpair()
    handle = RankHandle(start.rank, control, {})
    writers: list[int] = []
    try:
        for stream in ("stdout", "stderr"):
            handle.pipes[stream], writer = os.pipe()
            writers.append(writer)
        fd_socket.send(channel, job.Start(start.rank), [theirs.fileno(), *writers])
        with contextlib.suppress(fd_socket.Closed):  # the process was not started or has exited: the server reports why
            fd_socket.send(control, start, [parcel])
    except BaseException:
        handle.close()
        raise
    finally:
        theirs.close()
        fd_socket.close_all(writers)
    return handle


def may_fork(options: LaunchOptions) -> bool:
    """True if ranks may be forked when that is safe."""
    return sys.platform == "linux" and options.start_method != "spawn"


def _note_unsafe_fork(why: str, options: LaunchOptions, note: Callable[[str], None]) -> None:
    if options.start_method == "fork":
        raise LaunchError(
            'starting ranks with `start_method="fork"`',
            found=f"the rank server cannot be forked safely: {why}",
            fix="Leave that module out of `preload`, or the start method at its default",
        )
    note(f"{why}, so ranks start as fresh interpreters, which takes seconds; see `preload=`")


def find_working_directory(did: str) -> str:
    """Path of the working directory. Raises LaunchError if it was removed, since no process can start in it."""
    try:
        return os.getcwd()
    except FileNotFoundError as error:
        raise LaunchError(
            did,
            found="the working directory of this process was removed",
            fix="Change to one that exists: `os.chdir(...)`, in a notebook `%cd ...`",
        ) from error
