# SPDX-License-Identifier: Apache-2.0
"""Ask ranks for their Python stacks, and read what the fault handler wrote into the job's folder."""

from __future__ import annotations

import linecache
import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from ddpilot.environments.own_files import open_own_file, read_own_text
from ddpilot.record.connecting import connecting_path
from ddpilot.record.stacks import WATCH_SIGNAL, is_answering, stacks_path
from ddpilot.watch.view import Frame, StackView

ANSWER_LIMIT_S = 0.3
_PAUSE_S = 0.01
_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)$')
_TEXTLESS = ("Cell In[", "<")


def take_stacks(folder: Path, pids: Mapping[int, int]) -> dict[int, StackView]:
    """The stack of the main thread of each rank in `pids` that answers within 0.3 s.

    A rank that does not handle the signal is not asked: it would be ended by it. One that connects to a store says by
    itself where it is.
    """
    asked_ns = time.monotonic_ns()
    told = {rank: _read(connecting_path(folder, rank)) for rank in pids}
    found = {rank: parse_stack(text, pids[rank], asked_ns) for rank, text in told.items() if text}
    rest = {rank: pid for rank, pid in pids.items() if rank not in found}
    waiting = {rank: pid for rank, pid in rest.items() if _ask(stacks_path(folder, rank), pid)}
    seen: dict[int, str] = {}
    while waiting and time.monotonic_ns() - asked_ns < ANSWER_LIMIT_S * 1e9:
        time.sleep(_PAUSE_S)
        for rank, pid in list(waiting.items()):
            text = _read(stacks_path(folder, rank))
            if text and text == seen.get(rank):  # nothing has come since the last look: it is whole
                found[rank] = parse_stack(text, pid, asked_ns)
                del waiting[rank]
            seen[rank] = text
    return found


def read_stack(folder: Path, rank: int, pid: int) -> StackView | None:
    """The last stack that `rank` was asked for; None where it was not."""
    path = stacks_path(folder, rank)
    text = _read(path)
    if not text:
        return None
    age_ns = max(0, time.time_ns() - os.lstat(path).st_mtime_ns)
    return parse_stack(text, pid, time.monotonic_ns() - age_ns)


def parse_stack(text: str, thread: int, taken_ns: int) -> StackView:
    """What the fault handler wrote of the one thread with the number `thread`."""
    frames = (_FRAME.match(line) for line in text.splitlines())
    return StackView(
        taken_ns=taken_ns,
        threads={thread: tuple(_frame(found) for found in frames if found is not None)},
        main=thread,
    )


def _frame(found: re.Match[str]) -> Frame:
    file, line = found["file"], int(found["line"])
    text = "" if file.startswith(_TEXTLESS) else linecache.getline(file, line).strip()
    return Frame(file, line, found["function"], text)


def _ask(path: Path, pid: int) -> bool:
    if not is_answering(pid):
        return False
    try:
        os.close(open_own_file(path, os.O_WRONLY | os.O_TRUNC))
        psutil.Process(pid).send_signal(WATCH_SIGNAL)
    except (OSError, psutil.Error):
        return False
    return True


def _read(path: Path) -> str:
    with suppress(OSError):
        return read_own_text(path)
    return ""
