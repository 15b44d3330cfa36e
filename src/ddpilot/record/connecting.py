# SPDX-License-Identifier: Apache-2.0
"""Where the main thread is while it connects to a store, which must not be interrupted to be asked.

torch waits between two attempts in a sleep that a signal ends with an error: it begins anew and waits longer, or gives
up where its time is over. So the recording's own thread writes the stack down, for who looks from outside.
"""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import FrameType

from ddpilot.environments.own_files import write_own_text

_RENDEZVOUS = os.path.join("torch", "distributed", "rendezvous.py")
_STORE = "TCPStore"


def connecting_path(folder: str | os.PathLike[str], rank: int) -> Path:
    """Where `rank` writes its stack while it connects to a store, in the folder of its ring; else there is no file."""
    return Path(folder) / f"rank{rank}.connecting"


class ConnectNotes:
    """Keeps the file `path` as long as the main thread may be in a call of `TCPStore`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written: tuple[tuple[str, int, str], ...] = ()
        self._is_off = False
        with suppress(OSError):
            path.unlink(missing_ok=True)  # of a process before

    def tick(self, *, is_outside: bool) -> None:
        """Look where the main thread is; `is_outside`: in no process group."""
        if self._is_off or not (is_outside or self._written):
            return
        try:
            self._note(_find_calls() if is_outside else ())
        except Exception:  # noqa: BLE001 - without these notes the rank is asked by a signal, as everywhere else
            self._is_off = True

    def _note(self, calls: tuple[tuple[str, int, str], ...]) -> None:
        if calls == self._written:
            return
        self._written = calls
        if not calls:
            self._path.unlink(missing_ok=True)
            return
        text = "".join(f'  File "{file}", line {line} in {function}\n' for file, line, function in calls)
        write_own_text(self._path, text)


def _find_calls() -> tuple[tuple[str, int, str], ...]:
    """The main thread's calls, innermost first, where that is one which makes a store; else none."""
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None or not may_make_store(frame):
        return ()
    found = []
    while frame is not None:
        found.append((frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name))
        frame = frame.f_back
    return tuple(found)


def may_make_store(frame: FrameType) -> bool:
    """Whether this function calls `TCPStore`, which is in C++ and so no frame of its own."""
    return _STORE in frame.f_code.co_names or frame.f_code.co_filename.endswith(_RENDEZVOUS)
