# SPDX-License-Identifier: Apache-2.0
"""Pause the garbage collector, and read the frames of threads while they run Python code."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the garbage collector, unless it is disabled. An import creates no garbage, and torch's takes less time."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


_MAKES_FRAMES_LATE = sys.version_info[:2] == (3, 11)


@contextmanager
def reading_frames() -> Iterator[None]:
    """Keep the garbage collector from starting while frames of other threads are walked or their locals are read.

    CPython 3.11 creates a frame object at the first access, such as `frame.f_back`. This allocation may start a
    collection; a finalizer it runs may release the GIL, and the other thread may return from the very frame that is
    being described: SIGSEGV later on. `sys._current_frames` has the same guard in CPython (issue 106883), `f_back` does
    not. Earlier versions have no lazy frames, and later ones collect only between instructions.
    """
    with collector_paused() if _MAKES_FRAMES_LATE else nullcontext():
        yield


def main_frame() -> FrameType | None:
    """Return the frame that the main thread executes now."""
    return sys._current_frames().get(threading.main_thread().ident or 0)


def frames_of_threads() -> list[tuple[str, FrameType]]:
    """Return every frame of every thread, innermost first, each with its thread's name."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found = []
    with reading_frames():
        for ident, top in sys._current_frames().items():
            frame: FrameType | None = top
            while frame is not None:
                found.append((names.get(ident, str(ident)), frame))
                frame = frame.f_back
    return found
