# SPDX-License-Identifier: Apache-2.0
"""Fork safely: check that the rank server may be forked, and set up the process that was forked from it.

A fork after ``cuInit`` breaks CUDA in the child. A fork while other threads run can leave a lock locked forever (an
OpenMP pool that has run one parallel region hangs the child's first one).
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import threading

from ddpilot.launching.interrupts import STOPS

_CUDA_ERROR_NOT_INITIALIZED = 3


class CleanWatch:
    """Detects which import started threads or initialized CUDA. `dirty`: a description of it, or None."""

    def __init__(self) -> None:
        self.dirty: str | None = None
        self._num_threads = 0

    def begin(self) -> None:
        """Record the current number of threads as the baseline, after importing torch."""
        self._num_threads = count_threads()

    def check(self, module: str) -> None:
        """Set `dirty` if importing `module`, the last import, made forking unsafe."""
        if self.dirty is None and cuda_driver_in_use():
            self.dirty = f"importing `{module}` initialised the CUDA driver"
        elif self.dirty is None and count_threads() > self._num_threads:
            names = ", ".join(thread.name for thread in threading.enumerate()[1:]) or "not Python's"
            extra = count_threads() - self._num_threads
            self.dirty = f"importing `{module}` started {extra} thread{'s' * (extra > 1)} ({names})"


_FORK_SAFE = ("jemalloc_bg_thd",)
"""Names of threads that may run during a fork. jemalloc, which `pyarrow` and thereby `pandas` load, holds its own locks
while the process forks, and releases them in the child, where it runs without this thread."""


def count_threads() -> int:
    """Number of threads of this process that make a fork unsafe, on Linux including those that Python did not start."""
    if sys.platform != "linux":
        return threading.active_count()
    return sum(_thread_name(number) not in _FORK_SAFE for number in os.listdir("/proc/self/task"))


def _thread_name(number: str) -> str:
    """Name of the thread for the kernel; empty if it has ended meanwhile."""
    try:
        with open(f"/proc/self/task/{number}/comm") as file:
            return file.read().strip()
    except OSError:
        return ""


def cuda_driver_in_use() -> bool:
    """True if ``cuInit`` was called in this process; determined without calling it."""
    if sys.platform != "linux":
        return False
    with open("/proc/self/maps") as maps:
        if "libcuda.so" not in maps.read():
            return False
    context = ctypes.c_void_p()
    driver = ctypes.CDLL("libcuda.so.1")
    return bool(driver.cuCtxGetCurrent(ctypes.byref(context)) != _CUDA_ERROR_NOT_INITIALIZED)


_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LINE_BUFFERED = 1  # _IOLBF of the C library

STACKS_SIGNAL = getattr(signal, "SIGRTMIN", signal.SIGUSR1) + 5
"""Signal at which a rank prints its main thread's Python stack. SIGUSR1 is left to Slurm and the user."""


def become_process_of(server_pid: int) -> None:
    """Create an own process group, ask to be killed when the server dies, and reset signal handlers.

    SIGINT stays blocked until the rank has a handler that keeps an early interrupt for the user's function.

    The parent-death signal fires when the *thread* that forked exits, so the server forks from its main thread.
    """
    os.setpgid(0, 0)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != server_pid:
        os._exit(1)
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGPIPE, *STOPS):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # Python's default
    signal.pthread_sigmask(signal.SIG_SETMASK, [signal.SIGINT])


def outlive_stops() -> None:
    """Ignore SIGTERM and SIGUSR1, which schedulers send to every process of a job: ranks still need this process.

    The process ends with its parent instead. A handler is used because SIG_IGN would be inherited by its children.
    """
    for number in STOPS:
        signal.signal(number, lambda number, frame: None)


def adopt_orphans() -> None:
    """Become the reaper of orphaned descendants, so that they can be killed. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def write_to(out_fd: int, err_fd: int) -> None:
    """Redirect stdout and stderr, also of C and C++ code, line-buffered to `out_fd` and `err_fd`; stdin is empty."""
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    for source, target in ((out_fd, 1), (err_fd, 2)):
        os.dup2(source, target)
        os.close(source)
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = open(1, "w", 1, "utf-8", "backslashreplace", closefd=False)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = open(2, "w", 1, "utf-8", "backslashreplace", closefd=False)  # type: ignore[misc]
    libc = ctypes.CDLL(None)
    stdout = ctypes.c_void_p.in_dll(libc, "stdout" if sys.platform == "linux" else "__stdoutp")
    libc.setvbuf.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
    libc.setvbuf(stdout, None, _LINE_BUFFERED, 0)
    faulthandler.enable(file=2, all_threads=False)
    # Python restores this disposition when it shuts down; the default one would kill a rank that gets the signal then.
    signal.signal(STACKS_SIGNAL, signal.SIG_IGN)
    faulthandler.register(STACKS_SIGNAL, file=2, all_threads=False)
