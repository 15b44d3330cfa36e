# SPDX-License-Identifier: Apache-2.0
"""A rank writes its Python stack into a file when it is asked to.

A thread of the rank does so, as soon as it gets the GIL: from outside, and from a signal's handler in C, frames of a
thread that runs Python code cannot be read. `faulthandler` does, and about one signal in a hundred then ends a busy
process with SIGSEGV (Python 3.11 to 3.13). It is asked only where the thread cannot answer: while C code blocks or
computes and holds the GIL, frames do not change.
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

from ddpilot.environments.own_files import is_own_process, open_own_fifo, open_own_file

WATCH_SIGNAL = getattr(signal, "SIGRTMIN", signal.SIGUSR1) + 6
"""Asks the fault handler for it. A real-time signal, since SIGUSR1 and SIGUSR2 are the user's and Slurm's."""

_ANSWER_S = 0.3
"""Seconds in which a rank whose GIL is free answers."""

_HELD_S = 0.2
"""CPU seconds of a main thread that held the GIL all the while: one that runs Python code gives it up every 5 ms."""

_LIMIT_S = 2.0
_MAX_FRAMES = 100
_CALL_NOTHING = ("JUMP_BACKWARD", "JUMP_ABSOLUTE", "RESUME")
RUNS = "  (runs Python code)"
"""Ends the stack of a thread that was interrupted where the GIL can be taken from it, such as the end of a loop's body:
the same line each time, however fast it moves."""

_HEADER = "Stack (most recent call first):"  # the fault handler's


def stacks_path(folder: str | os.PathLike[str], rank: int) -> Path:
    """Where `rank` writes its stacks, in the folder of its ring."""
    return Path(folder) / f"rank{rank}.stacks"


def answer_with_stacks(path: Path) -> None:
    """From now on write the main thread's stack to the end of `path`, a new file, whenever a `StackRequest` asks.

    Of the main thread alone: the fault handler reads it at rest, and others while they run. Raises `OSError` if the
    file cannot be made.
    """
    fd = open_own_file(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    if threading.current_thread() is threading.main_thread():
        # What is left when Python takes its handlers back as it ends: the default would end a rank that is asked then.
        signal.signal(WATCH_SIGNAL, signal.SIG_IGN)
    faulthandler.register(WATCH_SIGNAL, file=fd, all_threads=False)
    with suppress(OSError):  # of a file system without pipes
        fifo = _fifo_path(path)
        with suppress(FileNotFoundError):
            fifo.unlink()
        os.mkfifo(fifo, 0o600)
        requests = os.open(fifo, os.O_RDWR | os.O_CLOEXEC)  # also for writing: else it ends with each request
        _thread.start_new_thread(_answer, (requests, fd, threading.main_thread().ident))


def _fifo_path(path: Path) -> Path:
    return path.with_suffix(".ask")


def _answer(requests: int, fd: int, main: int | None) -> None:
    while os.read(requests, 1):
        frame = sys._current_frames().get(main or 0)
        lines, is_running = [_HEADER], frame is not None and _is_running(frame)
        while frame is not None and len(lines) <= _MAX_FRAMES:
            code = frame.f_code
            lines.append(f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}')
            frame = frame.f_back
        frame = None  # what it holds must not live until the next request
        lines += [RUNS] * is_running
        with suppress(OSError):  # no space
            os.write(fd, ("\n".join(lines) + "\n").encode(errors="backslashreplace"))


def _is_running(frame: FrameType) -> bool:
    """True if `frame` was left at an instruction that calls nothing: it runs Python code, and waits for nothing."""
    code, at = frame.f_code.co_code, frame.f_lasti
    return 0 <= at < len(code) and opcode.opname[code[at]] in _CALL_NOTHING


def first_stack(text: str) -> str:
    """The first stack in `text`: a rank that was asked in both ways may have answered twice."""
    before, header, after = text.partition(_HEADER)
    return before + header + after.partition(_HEADER)[0]


class StackRequest:
    """Asks the rank of process `pid` for its stack, which it writes to `path`; `has_asked` is False if it cannot."""

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
        """True, once, if the rank is to get `WATCH_SIGNAL`: its thread does not answer, and frames do not change."""
        if self._is_signalled or not self._is_at_rest() or not is_answering(self._pid):
            return False
        self._is_signalled, self._since_s = True, time.monotonic()
        return True

    def is_over(self) -> bool:
        """True if no answer is to be expected any more."""
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
    """What Linux says of a process's main thread. `state`: "R" (running), "S" (sleeping), ..."""

    state: str
    cpu_s: float


def _read_main_thread(pid: int) -> _MainThread | None:
    try:
        text = Path(f"/proc/{pid}/task/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(") ")[2].split()  # what comes before is its name, which may be anything
    return _MainThread(fields[0], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"))


def is_answering(pid: int) -> bool:
    """True if the process `pid` is this user's and handles `WATCH_SIGNAL`, which would end it otherwise. Linux only."""
    if not is_own_process(pid):
        return False
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    caught = next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")), 0)
    return bool(caught >> (WATCH_SIGNAL - 1) & 1)
