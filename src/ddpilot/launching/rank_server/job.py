# SPDX-License-Identifier: Apache-2.0
"""One launch inside the rank server: start its store and ranks, signal them, reap them.

The store process serves torch's TCPStore on a socket that the parent bound to loopback.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing.process
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import psutil

from ddpilot.launching.rank_environment import LAUNCH_VARIABLE, python_command
from ddpilot.launching.rank_reports import Exited
from ddpilot.launching.rank_server.fork_safety import outlive_stops
from ddpilot.launching.shipping import fd_socket
from ddpilot.module_names import FORKED_RANK, RANK_JOB

STORE = -1
"""Pseudo rank of the store process in requests and answers."""

StartProcess = Callable[[Callable[[], Any], list[str], list[int]], int]


@dataclass(frozen=True)
class Start:
    """Request to start a process: a rank (descriptors: control, stdout, stderr) or STORE (descriptor: listener)."""

    rank: int


@dataclass(frozen=True)
class Signal:
    """Request to send signal `number` to `ranks`: to their process groups, or if not `group` to their processes."""

    ranks: tuple[int, ...]
    number: int
    group: bool = True


@dataclass(frozen=True)
class Finish:
    """Request to kill all remaining processes; answered by `Finished`."""


@dataclass(frozen=True)
class Started:
    """Answer: the rank's process was started."""

    rank: int
    pid: int


@dataclass(frozen=True)
class NotStarted:
    """Answer: the operating system could not create the rank's process."""

    rank: int
    reason: str


@dataclass(frozen=True)
class Finished:
    """Answer: all processes of the launch have exited."""


class Job:
    """The processes of one launch, killed when the launch ends. It ends when the parent closes its end of `channel`.

    `folder`: removed then, even if the parent was killed; None if the launch has none.
    """

    def __init__(self, launch_id: str, folder: str | None, channel: socket.socket, start_process: StartProcess) -> None:
        self.launch_id = launch_id
        self._channel = channel
        self._start_process = start_process
        self._ranks: dict[int, int] = {}  # pid: rank
        self._ending = False
        self._folders = [folder] if folder is not None else []
        self._processes_folder: str | None = None
        # multiprocessing creates a folder in each process that needs one, and leaves it if that process is killed.
        with contextlib.suppress(OSError):
            self._processes_folder = tempfile.mkdtemp(prefix="pymp-")
            self._folders.append(self._processes_folder)

    def owns(self, pid: int) -> bool:
        """True if `pid` is this launch's store or one of its ranks and has not been reaped."""
        return pid in self._ranks

    @property
    def pids(self) -> set[int]:
        """Process ids that have not been reaped."""
        return set(self._ranks)

    @property
    def has_ended(self) -> bool:
        """True if the launch was asked to end and all recorded processes have been reaped."""
        return self._ending and not self._ranks

    def close(self) -> None:
        """Remove the folders of the launch and report `Finished` to the parent."""
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(fd_socket.Closed, OSError):
            fd_socket.send(self._channel, Finished())
        self._channel.close()

    def handle(self, request: Any, fds: list[int]) -> None:
        """Execute a request of the parent."""
        if isinstance(request, Start):
            self._start(request.rank, fds)
        elif isinstance(request, Signal):
            for pid, rank in self._ranks.items():
                if rank in request.ranks:
                    _signal(pid, request.number, request.group)
        elif isinstance(request, Finish):
            self.abandon()

    def _start(self, rank: int, fds: list[int]) -> None:
        folder = self._processes_folder
        try:
            pid = self._start_process(functools.partial(_run, rank, fds, folder), _argv(rank, fds, folder), fds)
        except OSError as error:  # no process or no memory left
            self._tell(NotStarted(rank, str(error)))
            return
        self._ranks[pid] = rank
        self._tell(Started(rank, pid))

    def abandon(self) -> None:
        """Kill all remaining processes at once."""
        self._ending = True
        for pid in self._ranks:
            _signal(pid, signal.SIGKILL, True)

    def end_process_group(self, pid: int) -> None:
        """Kill the process group of an exited rank. `pid` has not been reaped, so it cannot have been reused."""
        _signal(pid, signal.SIGKILL, True)

    def on_exit(self, pid: int, status: int, peak_memory_bytes: int, now: float) -> None:
        """Record that a process of this launch was reaped, and report its exit to the parent."""
        rank = self._ranks.pop(pid)
        if not self._ending:
            self._tell(Exited(rank=rank, status=status, peak_memory_bytes=peak_memory_bytes, time_s=now))

    def _tell(self, message: Any) -> None:
        with contextlib.suppress(fd_socket.Closed):  # the parent is gone: the closed channel ends this launch
            fd_socket.send(self._channel, message)


def _signal(pid: int, number: int, group: bool) -> None:
    with contextlib.suppress(ProcessLookupError):
        (os.killpg if group else os.kill)(pid, number)


def kill_orphans(recorded: set[int], launch_id: str | None) -> int:
    """Kill adopted children of this process that are not `recorded`, and return their number.

    `launch_id`: kill only children of that launch, because a different launch is still running; None kills all.
    """
    found = 0
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if child.pid in recorded or child.status() == psutil.STATUS_ZOMBIE:
                continue
            if launch_id is None or child.environ().get(LAUNCH_VARIABLE) == launch_id:
                child.kill()
                found += 1
    return found


def _run(rank: int, fds: list[int], folder: str | None) -> None:
    keep_files_in(folder)
    if rank == STORE:
        run_store(*fds)
    from ddpilot.launching.rank_server.rank import run_rank

    run_rank(*fds)


def keep_files_in(folder: str | None) -> None:
    """Make multiprocessing put its files into `folder`, in this process and in the processes it starts."""
    multiprocessing.process.current_process()._config["tempdir"] = folder  # type: ignore[attr-defined]


def _argv(rank: int, fds: list[int], folder: str | None) -> list[str]:
    module, name = (RANK_JOB, "run_store") if rank == STORE else (FORKED_RANK, "run_rank")
    keep = f"from {RANK_JOB} import keep_files_in; keep_files_in({folder!r})"
    return python_command(f"{keep}; from {module} import {name}; {name}(*{fds!r})")


def run_store(listen_fd: int) -> NoReturn:
    """Serve the store until this process is killed."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    from ddpilot.group.store import host_on

    with socket.socket(fileno=os.dup(listen_fd)) as listener:
        host, port = listener.getsockname()
    store = host_on(listen_fd, functools.partial(TCPStore, host, port, None, True, wait_for_workers=False))
    outlive_stops()
    while store is not None:
        signal.pause()
    raise AssertionError("unreachable")


def bind_listener() -> socket.socket:
    """A socket that listens on a free port of 127.0.0.1; binding it here reserves the port for the store."""
    return socket.create_server(("127.0.0.1", 0), backlog=1024)
