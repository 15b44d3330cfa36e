# SPDX-License-Identifier: Apache-2.0
"""Show other processes where a rank's main thread is: its Python stack, and calls that start a process group.

A thread of the rank writes it as soon as it gets the GIL: the frames of a thread that is running Python code cannot be
read from outside, nor from a signal handler in C. `faulthandler` tries, and about one signal in a hundred then ends a
busy process with SIGSEGV (Python 3.11 to 3.13). It is used only if the thread cannot answer: while native code blocks
or computes with the GIL held, frames do not change.
"""

from __future__ import annotations

import _thread
import faulthandler
import inspect
import opcode
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

from ddpilot.environments.interpreter import main_frame, reading_frames
from ddpilot.environments.private_files import is_own_process, open_own_fifo, open_own_file, read_own_text

WATCH_SIGNAL = getattr(signal, "SIGRTMIN", signal.SIGUSR1) + 6
"""Requests a stack from the fault handler. A real-time signal, as SIGUSR1 and SIGUSR2 are left to the user and
Slurm."""

_ANSWER_S = 0.3
"""Seconds within which a rank answers if its GIL is free."""

_HELD_S = 0.2
"""CPU seconds after which a main thread has held the GIL throughout: Python code releases it every 5 ms."""

_LIMIT_S = 2.0
_PAUSE_S = 0.01
_THREAD_NAME = "ddpilot-stacks"  # at most 15 characters
_MAX_FRAMES = 100
_CALL_NOTHING = ("JUMP_BACKWARD", "JUMP_ABSOLUTE", "RESUME")
RUNS = "  (runs Python code)"
"""Last line of the stack of a thread that was interrupted at an instruction where the GIL can be taken, such as the end
of a loop body: the same line each time, however fast the thread moves."""

HEADER = "Stack (most recent call first):"
"""First line of a stack that was requested, as the fault handler writes it."""


def stacks_path(folder: str | os.PathLike[str], rank: int) -> Path:
    """Return the path of the file in the ring's folder to which `rank` writes its stacks."""
    return Path(folder) / f"rank{rank}.stacks"


def answer_with_stacks(path: Path) -> None:
    """Append the main thread's stack to `path`, which is created or truncated, at each request from now on.

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
    with suppress(OSError):
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(_THREAD_NAME)
    while os.read(requests, 1):
        frame = sys._current_frames().get(main or 0)
        runs = f"{RUNS}\n" if frame is not None and _is_running(frame) else ""
        text = f"{HEADER}\n{_render(frame)}{runs}"
        frame = None  # do not keep the frame's locals alive until the next request
        with suppress(OSError):  # no space
            os.write(fd, text.encode(errors="backslashreplace"))


def _render(frame: FrameType | None) -> str:
    """Format the calls that led to `frame`, innermost first, as the fault handler does."""
    lines: list[str] = []
    with reading_frames():
        while frame is not None and len(lines) < _MAX_FRAMES:
            code = frame.f_code
            lines.append(f'  File "{code.co_filename}", line {frame.f_lineno or 0} in {code.co_name}\n')
            frame = frame.f_back
    return "".join(lines)


def _is_running(frame: FrameType) -> bool:
    """True if `frame` is at an instruction that calls nothing: the thread runs Python code and waits for nothing."""
    code, at = frame.f_code.co_code, frame.f_lasti
    return 0 <= at < len(code) and opcode.opname[code[at]] in _CALL_NOTHING


def ask_stacks(
    folder: str | os.PathLike[str], pids: Mapping[int, int], send_signal: Callable[[int], object]
) -> dict[int, str]:
    """Return the main thread's stack of each rank in `pids` that responds within 2 s.

    `send_signal` sends `WATCH_SIGNAL` to a rank that does not answer by itself.
    """
    asked = {rank: _StackRequest(stacks_path(folder, rank), pid) for rank, pid in pids.items()}
    waiting = {rank: request for rank, request in asked.items() if request.has_asked}
    found: dict[int, str] = {}
    seen: dict[int, str] = {}
    while waiting:
        time.sleep(_PAUSE_S)
        for rank, request in list(waiting.items()):
            text = _read(stacks_path(folder, rank))
            if text and text == seen.get(rank):  # nothing was added since the last read: it is complete
                found[rank] = first_stack(text)
            elif not text and request.wants_signal():
                send_signal(rank)
            if rank in found or request.is_over():
                del waiting[rank]
            seen[rank] = text
    return found


def _read(path: Path) -> str:
    with suppress(OSError):
        return read_own_text(path)
    return ""


def first_stack(text: str) -> str:
    """Return the first stack in `text`: a rank that was asked in both ways may have answered twice."""
    before, header, after = text.partition(HEADER)
    return before + header + after.partition(HEADER)[0]


class _StackRequest:
    """Clears `path` and requests the stack of process `pid`, a rank that writes to it.

    `has_asked`: True if the rank can be asked.
    """

    def __init__(self, path: Path, pid: int) -> None:
        self._pid = pid
        self._before = _read_main_thread(pid)
        self._since_s = time.monotonic()
        self._is_signalled = False
        self.has_asked = False
        with suppress(OSError):
            os.close(open_own_file(path, os.O_WRONLY | os.O_TRUNC))
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
        if now.cpu_s - before.cpu_s > _HELD_S:
            return True
        is_blocked = now.state in "SD" and now.cpu_s == before.cpu_s
        return is_blocked and time.monotonic() - self._since_s > _ANSWER_S and not _is_answer_due(self._pid)


class _MainThread(NamedTuple):
    """The state of a process's main thread in /proc. `state`: "R" (running), "S" (sleeping), ..."""

    state: str
    cpu_s: float


def _is_answer_due(pid: int) -> bool:
    """True if the thread that answers runs or waits for a processor.

    A signal would then interrupt a main thread that waits with the GIL free. If it connects to a store, torch takes
    that for an error, starts over and waits longer, or gives up if its timeout has expired.
    """
    try:
        tasks = [task.read_text() for task in Path(f"/proc/{pid}/task").glob("*/stat")]
        return any(f"({_THREAD_NAME}) {state}" in task for task in tasks for state in "RD")
    except OSError:
        return True


def _read_stat(task: Path) -> list[str]:
    """Return the fields of /proc after the thread's name, which may contain anything."""
    return (task / "stat").read_text().rpartition(") ")[2].split()


def _read_main_thread(pid: int) -> _MainThread | None:
    try:
        fields = _read_stat(Path(f"/proc/{pid}/task/{pid}"))
    except OSError:
        return None
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


_CHECK_NS = 1_000_000_000
_THIS_MACHINE = ("localhost", "127.", "::1")


class PendingInit(NamedTuple):
    """A call of init_process_group that has not returned."""

    since_ns: int
    """Time at which it was first seen, on CLOCK_MONOTONIC."""
    world_size: int
    rank: int
    is_closed: bool
    """True if only ranks of this job can join: they meet in their launcher's store, on this machine, and this process
    has no children that could be ranks too. False during the first second."""


class InitFinder:
    """Finds a call of `init_process_group` on the main thread's stack; polled by one thread."""

    def __init__(self, init_process_group: Any) -> None:
        self._code: CodeType = inspect.unwrap(init_process_group).__code__
        self._since_ns = self._checked_ns = 0
        self._is_closed = False

    def find(self, now_ns: int) -> PendingInit | None:
        """Return the call that the main thread is in; None without one, or before its rank and size are resolved."""
        with reading_frames():
            frame = self._find_frame()
            arguments = None if frame is None else frame.f_locals
        if arguments is None:
            self._since_ns = 0
            return None
        self._since_ns = self._since_ns or now_ns
        world_size, rank = arguments.get("world_size"), arguments.get("rank")
        if not (isinstance(world_size, int) and isinstance(rank, int) and world_size > 0 and rank >= 0):
            return None
        if now_ns - max(self._since_ns, self._checked_ns) > _CHECK_NS:
            self._checked_ns = now_ns
            self._is_closed = _meets_in_own_store(arguments.get("init_method")) and not _has_children()
        return PendingInit(self._since_ns, world_size, rank, self._is_closed and self._checked_ns > self._since_ns)

    def _find_frame(self) -> FrameType | None:
        frame = main_frame()
        while frame is not None and frame.f_code is not self._code:
            frame = frame.f_back
        return frame


def _has_children() -> bool:
    import psutil  # imported here, as few ranks wait this long

    return bool(psutil.Process().children())


def _meets_in_own_store(init_method: object) -> bool:
    is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_here = os.environ.get("MASTER_ADDR", "").startswith(_THIS_MACHINE)
    return isinstance(init_method, str) and init_method.startswith("env://") and is_agents and is_here
