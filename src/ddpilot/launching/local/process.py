# SPDX-License-Identifier: Apache-2.0
"""What a process that was just forked from the rank server does before anything else."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys

from ddpilot.launching.interrupts import STOPS

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LINE_BUFFERED = 1  # _IOLBF of the C library

STACKS_SIGNAL = getattr(signal, "SIGRTMIN", signal.SIGUSR1) + 5
"""A rank prints the Python stack of its main thread when it gets this; SIGUSR1 is Slurm's and the user's."""


def become_process_of(server_pid: int) -> None:
    """Own process group; killed when the server dies; the signals' default actions.

    The death signal fires when the *thread* that forked ends, so the server forks from its main thread.
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
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # as in every Python process
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def outlive_stops() -> None:
    """Do nothing at SIGTERM and SIGUSR1: a scheduler sends them to every process of a job, and ranks need this one.

    It ends with its parent. Not by SIG_IGN, which a process that it starts would inherit.
    """
    for number in STOPS:
        signal.signal(number, lambda number, frame: None)


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parent ends, so that it can end them."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def write_to(out_fd: int, err_fd: int) -> None:
    """Send stdout and stderr, C and C++ code's too, to `out_fd` and `err_fd` line by line; stdin is empty."""
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
    # What is left when Python takes its handlers back as it ends: the default would end a rank that is asked then.
    signal.signal(STACKS_SIGNAL, signal.SIG_IGN)
    faulthandler.register(STACKS_SIGNAL, file=2, all_threads=False)
