# SPDX-License-Identifier: Apache-2.0
"""Run a callback on import, pause the garbage collector, and read the frames of running threads."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType
from typing import Any


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


Action = Callable[[ModuleType], None]


class _Waiting(MetaPathFinder):
    """A finder at the front of `sys.meta_path` that finds nothing itself, and acts once a module has been loaded."""

    def __init__(self) -> None:
        self.actions: dict[str, dict[str, Action]] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec found by other finders, with a loader that runs the actions; None without any for `name`."""
        if name not in self.actions:
            return None
        others = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        spec = next((found for finder in others if (found := finder.find_spec(name, path, target))), None)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module
            spec.loader.exec_module = lambda module: self._load(load, module)  # type: ignore[method-assign]
        return spec

    def _load(self, load: Callable[[ModuleType], Any], module: ModuleType) -> None:
        with collector_paused():
            load(module)
        for action in self.actions.pop(module.__name__, {}).values():
            action(module)


def when_imported(name: str, key: str, action: Action) -> None:
    """Call `action(module)` with the module `name`: now if it is imported, otherwise once it has been.

    A later action with the same `key` replaces one that has not run yet.
    """
    module = sys.modules.get(name)
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        action(module)
        return
    waiting = next((finder for finder in sys.meta_path if isinstance(finder, _Waiting)), None)
    if waiting is None:
        waiting = _Waiting()
        sys.meta_path.insert(0, waiting)
    waiting.actions.setdefault(name, {})[key] = action


def forget(name: str, key: str) -> None:
    """Remove the action that `when_imported` holds for `name` and `key`, if it has not run yet."""
    for finder in sys.meta_path:
        if isinstance(finder, _Waiting):
            finder.actions.get(name, {}).pop(key, None)
