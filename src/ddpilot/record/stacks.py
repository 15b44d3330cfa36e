# SPDX-License-Identifier: Apache-2.0
"""A rank writes its Python stack into a file when it is asked by a signal, also while C++ holds Python's lock."""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
from pathlib import Path

from ddpilot.environments.own_files import is_own_process, open_own_file

WATCH_SIGNAL = getattr(signal, "SIGRTMIN", signal.SIGUSR1) + 6
"""Asks for it. A real-time signal, since SIGUSR1 and SIGUSR2 are the user's and Slurm's."""


def stacks_path(folder: str | os.PathLike[str], rank: int) -> Path:
    """Where `rank` writes its stacks, in the folder of its ring."""
    return Path(folder) / f"rank{rank}.stacks"


def answer_with_stacks(path: Path) -> None:
    """From now on write the main thread's stack to the end of `path`, a new file, at every `WATCH_SIGNAL`.

    Of the main thread alone: the fault handler reads it at rest, and others while they run. Raises `OSError` where the
    file cannot be made.
    """
    fd = open_own_file(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    if threading.current_thread() is threading.main_thread():
        # What is left when Python takes its handlers back as it ends: the default would end a rank that is asked then.
        signal.signal(WATCH_SIGNAL, signal.SIG_IGN)
    faulthandler.register(WATCH_SIGNAL, file=fd, all_threads=False)


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
