# SPDX-License-Identifier: Apache-2.0
"""`ddpilot run`, `profile` and `scale` in a network namespace, forked from this process.

They import torch, which takes a process of its own 1.5 s; these commands only start ranks, which are processes of their
own in any case.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import select
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from typing import IO

from ddpilot.cli.app import main

_LIBC = ctypes.CDLL(None, use_errno=True)
_NEW_NETWORK, _NEW_MOUNTS = 0x40000000, 0x00020000
_RECURSIVE_SLAVE = 0x4000 | 0x80000
_DETACH = 2


class ForkedProcess:
    """A child of this process, with what tests use of `subprocess.Popen`."""

    def __init__(self, pid: int, stdout: IO[str]) -> None:
        self.pid = pid
        self.stdout = stdout
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit status, minus the signal's number where one ended it; None while it runs."""
        if self.returncode is None:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            if found:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """The exit status. Raises TimeoutExpired after `timeout` seconds."""
        if self.poll() is None:
            pidfd = os.pidfd_open(self.pid)
            try:
                select.select([pidfd], [], [], timeout)
            finally:
                os.close(pidfd)
        status = self.poll()
        if status is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout)
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)


def fork_command(words: Sequence[str], namespace: str, environ: Mapping[str, str]) -> ForkedProcess:
    """Run `ddpilot` with `words` in the network `namespace`, with its output in one stream."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        _run(words, namespace, environ, writer)
    os.close(writer)
    return ForkedProcess(pid, os.fdopen(reader, "r"))


def _run(words: Sequence[str], namespace: str, environ: Mapping[str, str], writer: int) -> None:
    """In the child: enter the namespace, and be the command."""
    atexit._clear()  # what this process registered is not the command's
    status = 70
    try:
        for fd in (1, 2):
            os.dup2(writer, fd)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w", buffering=1), open(2, "w", buffering=1)
        _enter(namespace)
        os.environ.clear()
        os.environ.update(environ)
        tempfile.tempdir = None
        sys.argv = ["ddpilot", *words]
        main()
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:  # noqa: BLE001 - shown, and the process ends
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _enter(namespace: str) -> None:
    """As `ip netns exec` does: the network, and a /sys that shows its interfaces."""
    network = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    _check(namespace, _LIBC.setns(network, _NEW_NETWORK))
    _check(namespace, _LIBC.unshare(_NEW_MOUNTS))
    _check(namespace, _LIBC.mount(b"", b"/", b"none", ctypes.c_ulong(_RECURSIVE_SLAVE), None))
    _check(namespace, _LIBC.umount2(b"/sys", _DETACH))
    _check(namespace, _LIBC.mount(namespace.encode(), b"/sys", b"sysfs", ctypes.c_ulong(0), None))
    os.close(network)


def _check(namespace: str, status: int) -> None:
    if status != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"entering the namespace {namespace}: {os.strerror(number)}")
