# SPDX-License-Identifier: Apache-2.0
"""Read the Python stacks of ranks, which the ranks write to files on request."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from ddpilot.module_names import SESSION_REQUESTS
from ddpilot.record.main_thread import StackRequest, connecting_path, first_stack, stacks_path

_PAUSE_S = 0.01
_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line \d+ in .+$')


def read_stacks(folder: Path, pids: Mapping[int, int], ask: Callable[[tuple[int, ...]], object]) -> dict[int, str]:
    """Return the stack that each rank in `pids` writes to its file in `folder`, or "" for a rank that does not reply.

    `ask` sends the signal that requests a stack to the ranks that need one. A rank that is connecting to a store has
    already written its stack.
    """
    texts = {rank: _read(connecting_path(folder, rank)) for rank in pids}
    before = {rank: len(_read(stacks_path(folder, rank))) for rank in pids if not texts[rank]}
    asked = {rank: StackRequest(stacks_path(folder, rank), pids[rank]) for rank in before}
    waiting = {rank: request for rank, request in asked.items() if request.has_asked}
    seen: dict[int, str] = {}
    while waiting:
        time.sleep(_PAUSE_S)
        for rank, request in list(waiting.items()):
            text = _read(stacks_path(folder, rank))
            new = text[before[rank] if len(text) > before[rank] else 0 :] if len(text) != before[rank] else ""
            if new and new == seen.get(rank):  # unchanged since the last read: complete
                texts[rank] = first_stack(new)
            elif not new and request.wants_signal():
                ask((rank,))
            if texts[rank] or request.is_over():
                del waiting[rank]
            seen[rank] = new
    return texts


def _read(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace")
    return ""


def trim_stack(text: str) -> str:
    """Return the frames of `text` (innermost first) that belong to the cell or function; "idle" if none is running."""
    frames = [(line, found["file"]) for line in text.splitlines() if (found := _FRAME.match(line))]
    if not frames:
        return "no answer: the process does not run Python code now"
    files = [file for _, file in frames]
    cells = [index for index, file in enumerate(files) if file.startswith("Cell In[")]
    calls = [index for index, file in enumerate(files) if file.endswith(SESSION_REQUESTS)]
    end = cells[-1] + 1 if cells else calls[0] if calls else 0
    return "\n".join(line for line, _ in frames[:end]) or "idle"
