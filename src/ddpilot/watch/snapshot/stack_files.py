# SPDX-License-Identifier: Apache-2.0
"""Request the Python stacks of ranks, and read the files that they write in the job's folder."""

from __future__ import annotations

import linecache
import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil

from ddpilot.environments.private_files import open_own_file, read_own_text
from ddpilot.record.connecting import connecting_path
from ddpilot.record.main_thread import RUNS, WATCH_SIGNAL, StackRequest, first_stack, stacks_path
from ddpilot.watch.snapshot.model import Frame, StackView

_PAUSE_S = 0.01
_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)$')
_TEXTLESS = ("Cell In[", "<")


def take_stacks(folder: Path, pids: Mapping[int, int]) -> dict[int, StackView]:
    """Return the main thread's stack of each rank in `pids` that responds, by itself or to `WATCH_SIGNAL`, within 2 s.

    A rank that is connecting to a store has already written its stack.
    """
    asked_ns = time.monotonic_ns()
    told = {rank: _read(connecting_path(folder, rank)) for rank in pids}
    found = {
        rank: replace(parse_stack(text, pids[rank], asked_ns), is_kept=True) for rank, text in told.items() if text
    }
    rest = {rank: pid for rank, pid in pids.items() if rank not in found}
    asked = {rank: _ask(stacks_path(folder, rank), pid) for rank, pid in rest.items()}
    waiting = {rank: request for rank, request in asked.items() if request is not None}
    seen: dict[int, str] = {}
    while waiting:
        time.sleep(_PAUSE_S)
        for rank, request in list(waiting.items()):
            text = _read(stacks_path(folder, rank))
            if text and text == seen.get(rank):  # nothing was added since the last read: it is complete
                found[rank] = parse_stack(text, pids[rank], asked_ns)
            elif not text and request.wants_signal():
                _signal(pids[rank])
            if rank in found or request.is_over():
                del waiting[rank]
            seen[rank] = text
    return found


def read_stack(folder: Path, rank: int, pid: int) -> StackView | None:
    """Return the stack that `rank` wrote last; None if it was never requested."""
    path = stacks_path(folder, rank)
    text = _read(path)
    if not text:
        return None
    age_ns = max(0, time.time_ns() - os.lstat(path).st_mtime_ns)
    return parse_stack(text, pid, time.monotonic_ns() - age_ns)


def parse_stack(text: str, thread: int, taken_ns: int) -> StackView:
    """Parse the fault handler's output for one thread, whose id is `thread`."""
    lines = first_stack(text).splitlines()
    frames = (_FRAME.match(line) for line in lines)
    return StackView(
        taken_ns=taken_ns,
        threads={thread: tuple(_frame(found) for found in frames if found is not None)},
        main=thread,
        is_running=RUNS in lines,
    )


def _frame(found: re.Match[str]) -> Frame:
    file, line = found["file"], int(found["line"])
    text = "" if file.startswith(_TEXTLESS) else linecache.getline(file, line).strip()
    return Frame(file, line, found["function"], text)


def _ask(path: Path, pid: int) -> StackRequest | None:
    try:
        os.close(open_own_file(path, os.O_WRONLY | os.O_TRUNC))
    except OSError:
        return None
    request = StackRequest(path, pid)
    return request if request.has_asked else None


def _signal(pid: int) -> None:
    with suppress(OSError, psutil.Error):  # it has ended
        psutil.Process(pid).send_signal(WATCH_SIGNAL)


def _read(path: Path) -> str:
    with suppress(OSError):
        return read_own_text(path)
    return ""
