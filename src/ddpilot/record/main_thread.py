# SPDX-License-Identifier: Apache-2.0
"""Let a rank write its Python stack into a file on request from another process.

A thread of the rank writes it as soon as it gets the GIL: the frames of a thread that is running Python code cannot be
read from outside, nor from a signal handler in C. `faulthandler` tries, and about one signal in a hundred then ends a
busy process with SIGSEGV (Python 3.11 to 3.13). It is used only if the thread cannot answer: while native code blocks
or computes with the GIL held, frames do not change.
"""

from __future__ import annotations

import _thread
import faulthandler
import opcode
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from ddpilot.environments.private_files import is_own_process, open_own_fifo, open_own_file
from ddpilot.environments.running_frames import reading_frames

WATCH_SIGNAL = getattr(signal, "SIGRTMIN", signal.SIGUSR1) + 6
"""Requests a stack from the fault handler. A real-time signal, as SIGUSR1 and SIGUSR2 are left to the user and
Slurm."""

_ANSWER_S = 0.3
"""Seconds within which a rank answers if its GIL is free."""

_HELD_S = 0.2
"""CPU seconds after which a main thread has held the GIL throughout: Python code releases it every 5 ms."""

_LIMIT_S = 2.0
_MAX_FRAMES = 100
_CALL_NOTHING = ("JUMP_BACKWARD", "JUMP_ABSOLUTE", "RESUME")
RUNS = "  (runs Python code)"
"""Last line of the stack of a thread that was interrupted at an instruction where the GIL can be taken, such as the end
of a loop body: the same line each time, however fast the thread moves."""

_HEADER = "Stack (most recent call first):"  # the fault handler's


def stacks_path(folder: str | os.PathLike[str], rank: int) -> Path:
    """Return the path of the file in the ring's folder to which `rank` writes its stacks."""
    return Path(folder) / f"rank{rank}.stacks"


def answer_with_stacks(path: Path) -> None:
    """Append the main thread's stack to `path`, which is created or truncated, at each `StackRequest` from now on.

    Only the main thread's: the fault handler reads it at rest, but other threads while they run. Raises `OSError` if
    the file cannot be created.
    """
    fd = open_own_file(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    if threading.current_thread() is threading.main_thread():
        # Effective once Python removes its handlers at exit: the default action would end a rank that is asked then.
        signal.signal(WATCH_SIGNAL, signal.SIG_IGN)
    faulthandler.register(WATCH_SIGNAL, file=fd, all_threads=False)
    with suppress(OSError):  # a file system without named pipes
        fifo = _fifo_path(path)
        with suppress(FileNotFoundError):
            fifo.unlink()
        os.mkfifo(fifo, 0o600)
        # Also open for writing: otherwise each request ends with EOF.
        requests = os.open(fifo, os.O_RDWR | os.O_CLOEXEC)
        _thread.start_new_thread(_answer, (requests, fd, threading.main_thread().ident))


def _fifo_path(path: Path) -> Path:
    return path.with_suffix(".ask")


def _answer(requests: int, fd: int, main: int | None) -> None:
    while os.read(requests, 1):
        frame = sys._current_frames().get(main or 0)
        lines, is_running = [_HEADER], frame is not None and _is_running(frame)
        with reading_frames():
            while frame is not None and len(lines) <= _MAX_FRAMES:
                code = frame.f_code
                lines.append(f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}')
                frame = frame.f_back
        frame = None  # do not keep the frame's locals alive until the next request
        lines += [RUNS] * is_running
        with suppress(OSError):  # no space
            os.write(fd, ("\n".join(lines) + "\n").encode(errors="backslashreplace"))


def _is_running(frame: FrameType) -> bool:
    """True if `frame` is at an instruction that calls nothing: the thread runs Python code and waits for nothing."""
    code, at = frame.f_code.co_code, frame.f_lasti
    return 0 <= at < len(code) and opcode.opname[code[at]] in _CALL_NOTHING


def first_stack(text: str) -> str:
    """Return the first stack in `text`: a rank that was asked in both ways may have answered twice."""
    before, header, after = text.partition(_HEADER)
    return before + header + after.partition(_HEADER)[0]


class StackRequest:
    """Requests the stack of process `pid`, a rank that writes to `path`. `has_asked`: True if the rank can be asked."""

    def __init__(self, path: Path, pid: int) -> None:
        self._pid = pid
        self._before = _read_main_thread(pid)
        self._since_s = time.monotonic()
        self._is_signalled = False
        self.has_asked = is_answering(pid)
        with suppress(OSError):
            fifo = open_own_fifo(_fifo_path(path))
            try:
                self.has_asked = os.write(fifo, b"?") == 1
            finally:
                os.close(fifo)

    def wants_signal(self) -> bool:
        """True once, if `WATCH_SIGNAL` should be sent: the thread does not answer, and the frames do not change."""
        if self._is_signalled or not self._is_at_rest() or not is_answering(self._pid):
            return False
        self._is_signalled, self._since_s = True, time.monotonic()
        return True

    def is_over(self) -> bool:
        """True if no answer is expected any more."""
        waited_s = time.monotonic() - self._since_s
        if self._is_signalled:
            return waited_s > _ANSWER_S
        now = _read_main_thread(self._pid)
        return waited_s > (_LIMIT_S if now is not None and now.state == "R" else 2 * _ANSWER_S)

    def _is_at_rest(self) -> bool:
        now, before = _read_main_thread(self._pid), self._before
        if now is None or before is None:
            return False
        is_blocked = now.state in "SD" and now.cpu_s == before.cpu_s
        return (is_blocked and time.monotonic() - self._since_s > _ANSWER_S) or now.cpu_s - before.cpu_s > _HELD_S


class _MainThread(NamedTuple):
    """The state of a process's main thread in /proc. `state`: "R" (running), "S" (sleeping), ..."""

    state: str
    cpu_s: float


def _read_main_thread(pid: int) -> _MainThread | None:
    try:
        text = Path(f"/proc/{pid}/task/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(") ")[2].split()  # the preceding name may contain anything
    return _MainThread(fields[0], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"))


def is_answering(pid: int) -> bool:
    """True if this user owns process `pid` and it handles `WATCH_SIGNAL`, which would otherwise end it. Linux only."""
    if not is_own_process(pid):
        return False
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    caught = next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")), 0)
    return bool(caught >> (WATCH_SIGNAL - 1) & 1)
