# SPDX-License-Identifier: Apache-2.0
"""Write down the main thread's stack while it connects to a store, when it must not be interrupted by a signal.

Between two attempts to connect, torch sleeps; a signal ends this sleep with an error, so that torch starts over and
waits longer, or gives up if its timeout has expired. The recording's own thread writes the stack to a file instead, for
observers outside the process.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from types import FrameType

from ddpilot.environments.private_files import write_own_text
from ddpilot.environments.running_frames import main_frame, reading_frames

_RENDEZVOUS = os.path.join("torch", "distributed", "rendezvous.py")
_STORE = "TCPStore"


def connecting_path(folder: str | os.PathLike[str], rank: int) -> Path:
    """Return the file in which `rank` keeps its stack while it connects to a store; it does not exist otherwise."""
    return Path(folder) / f"rank{rank}.connecting"


class ConnectNotes:
    """Keeps the file `path` in existence while the main thread may be in a `TCPStore` call."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written: tuple[tuple[str, int, str], ...] = ()
        self._is_off = False
        with suppress(OSError):
            path.unlink(missing_ok=True)  # from an earlier process

    def tick(self, *, is_outside: bool) -> None:
        """Check where the main thread is. `is_outside`: True if the process is in no process group."""
        if self._is_off or not (is_outside or self._written):
            return
        try:
            self._note(_find_calls() if is_outside else ())
        except Exception:  # noqa: BLE001 - without the file, the stack is requested by a signal as usual
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
    """Return the main thread's calls, innermost first, if the innermost one may be connecting to a store; else none."""
    frame = main_frame()
    if frame is None or not may_make_store(frame):
        return ()
    found = []
    with reading_frames():
        while frame is not None:
            found.append((frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name))
            frame = frame.f_back
    return tuple(found)


def may_make_store(frame: FrameType) -> bool:
    """True if this function calls `TCPStore`, which is implemented in C++ and has no Python frame."""
    return _STORE in frame.f_code.co_names or frame.f_code.co_filename.endswith(_RENDEZVOUS)
