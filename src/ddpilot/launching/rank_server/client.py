# SPDX-License-Identifier: Apache-2.0
"""The parent's side of rank servers (start, reuse, detect stale ones, stop) and of the ranks that they fork."""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import IO

import psutil

from ddpilot.errors import LaunchError
from ddpilot.launching.rank_environment import LAUNCH_VARIABLE, SERVER_VARIABLE, import_time_variables, python_command
from ddpilot.launching.rank_reports import Hello
from ddpilot.launching.shipping import fd_socket
from ddpilot.module_names import RANK_SERVER

_COUNT_BY_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""With it, a module that asks on import whether there is a GPU gets its answer without ``cuInit``, after which the
server could not be forked. Not set in the ranks."""

_MAX_WARM = 2
_START_LIMIT_S = 120.0


@dataclass(frozen=True, kw_only=True)
class ServerKey:
    """What a server cannot change after it has started. A different key needs a different server."""

    executable: str
    variables: tuple[tuple[str, str], ...]
    preload: tuple[str, ...]
    may_fork: bool


class RankServer:
    """A running rank server of this process."""

    def __init__(self, key: ServerKey, environ: Mapping[str, str]) -> None:
        self.key = key
        self.owner_pid = os.getpid()
        self._lock = threading.Lock()
        self._num_jobs = 0
        self._is_retired = False
        self._channel, theirs = socket.socketpair()
        try:
            with tempfile.TemporaryFile() as log, theirs:
                self._process = self._start(theirs, log, environ)
                theirs.close()
                try:
                    self.hello = self._wait_for_hello(log)
                except BaseException:  # KeyboardInterrupt included: leave no half-started server behind
                    self._kill()
                    raise
        except BaseException:
            self._channel.close()
            raise

    def _start(self, theirs: socket.socket, log: IO[bytes], environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
        arguments = (theirs.fileno(), os.getpid(), self.key.preload, self.key.may_fork)
        return subprocess.Popen(
            python_command(f"sys.argv[:] = ['ddpilot']; from {RANK_SERVER} import serve; serve(*{arguments!r})"),
            env={_COUNT_BY_NVML: "1", **environ, SERVER_VARIABLE: "1"},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._process.pid

    def _wait_for_hello(self, log: IO[bytes]) -> Hello:
        self._channel.settimeout(_START_LIMIT_S)
        try:
            hello, _ = fd_socket.receive(self._channel)
        except (fd_socket.Closed, TimeoutError) as error:
            self._kill()
            log.seek(0)
            tail = log.read().decode(errors="replace")[-3000:]
            raise LaunchError(
                "starting the rank server",
                found=f"it exited with code {self._process.returncode} before it was ready; its output:\n{tail}",
                fix='Check that `python -c "import torch"` works in this environment',
            ) from error
        self._channel.settimeout(None)
        assert isinstance(hello, Hello)
        if hello.failed is not None:
            name, text = hello.failed
            raise LaunchError(
                "importing the modules of `preload`",
                found=f"`{name}` cannot be imported in the rank server:\n{text}",
                fix="Correct the name, or leave it out of `preload`",
            )
        return hello

    @contextlib.contextmanager
    def job(
        self, launch_id: str, num_ranks: int, folder: str | None, is_repeated: bool = False
    ) -> Iterator[socket.socket]:
        """Context manager of one launch; yields its channel. Raises fd_socket.Closed if the server has exited.

        `folder`: removed by the server when the ranks have ended, even if this process is killed. `is_repeated`: see
        `LaunchOptions`.
        """
        ours, theirs = socket.socketpair()
        with ours:
            with theirs, self._lock:
                fd_socket.send(self._channel, (launch_id, num_ranks, folder, is_repeated), [theirs.fileno()])
                self._num_jobs += 1
            try:
                yield ours
            finally:
                if self._process.poll() is not None:
                    _kill_marked(launch_id)
                with self._lock:
                    self._num_jobs -= 1
                    is_last = self._is_retired and self._num_jobs == 0
                if is_last:
                    self.stop()

    def retire(self) -> None:
        """Stop the server as soon as no launch is running on it."""
        with self._lock:
            self._is_retired = True
            is_idle = self._num_jobs == 0
        if is_idle:
            self.stop()

    def is_running(self) -> bool:
        """False after the server's process has exited, or once it has been retired."""
        return not self._is_retired and self._process.poll() is None

    def is_fresh(self) -> bool:
        """True if the files of the modules that the server imported have not changed since."""
        for path, known in self.hello.files.items():
            try:
                stat = os.stat(path)
            except OSError:
                return False
            if (stat.st_mtime_ns, stat.st_size) != known:
                return False
        return True

    def describe_end(self) -> str:
        """Describe how the server exited, waiting up to 2 s for it."""
        try:
            return f"exit code {self._process.wait(timeout=2)}"
        except subprocess.TimeoutExpired:
            return "it closed its connection and is still running"

    def _kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._channel.close()

    def stop(self) -> None:
        """Stop the server and every process it runs."""
        self._is_retired = True  # if interrupted, it is not used again
        self._channel.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _kill_marked(launch_id: str) -> None:
    """Kill a launch's processes that moved to their own sessions. Used if the server, which would do it, is dead."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(LAUNCH_VARIABLE) == launch_id:
                process.kill()


class _Servers:
    """The warm servers of this process, ordered by last use, the most recent last."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.warm: list[RankServer] = []

    def get(self, key: ServerKey, environ: Mapping[str, str]) -> RankServer:
        """Return the warm server of this `key`, or start it. If interrupted, it leaves every server in the list."""
        with self.lock:
            # A server that was started before this process was forked belongs to the process that forked.
            self.warm = [server for server in self.warm if server.owner_pid == os.getpid()]
            # Only the files of the server that is wanted are looked at: a thousand and more.
            stale = [each for each in self.warm if not each.is_running() or (each.key == key and not each.is_fresh())]
            others = [each for each in self.warm if each not in stale and each.key != key]
            found = next((each for each in self.warm if each not in stale and each.key == key), None)
            found = found or RankServer(key, environ)
            self.warm = [*stale, *others, found]
            for server in [*stale, *others[: max(0, len(others) + 1 - _MAX_WARM)]]:
                server.retire()
                self.warm.remove(server)
            return found

    def stop_all(self) -> None:
        with self.lock:
            for server in self.warm:
                if server.owner_pid == os.getpid():
                    server.stop()
            self.warm.clear()


_servers = _Servers()
atexit.register(_servers.stop_all)


def ensure_server(environ: Mapping[str, str], preload: tuple[str, ...], may_fork: bool) -> RankServer:
    """Return a warm server for this environment, or start one (about 1 s). Raises LaunchError if it cannot start."""
    variables = tuple(import_time_variables(environ).items())
    key = ServerKey(executable=sys.executable, variables=variables, preload=preload, may_fork=may_fork)
    return _servers.get(key, environ)


def server_pids() -> tuple[int, ...]:
    """Process ids of this process's warm rank servers."""
    return tuple(server.pid for server in _servers.warm if server.owner_pid == os.getpid())


def stop_servers() -> None:
    """Stop this process's rank servers. The next launch starts a new one."""
    _servers.stop_all()
