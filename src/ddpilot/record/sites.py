# SPDX-License-Identifier: Apache-2.0
"""Which line of the user's asked for a collective, and through which function of a library."""

from __future__ import annotations

import linecache
import os
import sys
import threading
from collections.abc import Sequence
from types import CodeType, FrameType
from typing import Any

from ddpilot.findings.user_files import is_generated, is_users

# What the file of a frame is. Numbers, since comparing members of an Enum takes longer than the rest of a frame.
USER = 1  # the user's: a script, a module, a cell
LIBRARY = 2  # somebody's, or the standard one
INNER = 3  # torch's: never a line to show
WRAPPER = 4  # torch's too, or guard's, and says nothing about what was called
ENGINE = 5  # where Python enters the backward pass
DDP = 6  # DistributedDataParallel
HOOK = 7  # torch's own communication hooks of DDP
OURS = 8  # ddpilot's
STARTER = 9  # ddpilot's that starts ranks: what calls it is not the user's

_TORCH_KINDS = {
    "autograd/graph.py": ENGINE,
    "distributed/c10d_logger.py": WRAPPER,
    "nn/modules/module.py": WRAPPER,
    "nn/parallel/distributed.py": DDP,
    "utils/_contextlib.py": WRAPPER,
}
_GUARD_WRAPPER = os.path.join("guard", "importlib_bootstrap_like.py")
_TORCH_HOOKS = "distributed/algorithms/ddp_comm_hooks/"
_MAX_CALLERS = 5
_MAX_FRAMES = 16
"""Of those around the user's frame so many are looked at: the compiled part does the same."""


Trail = tuple[FrameType | None, CodeType | None, str, bool]
"""The user's frame; the library function that its line called; the innermost function of DistributedDataParallel on the
way, or empty; whether it comes straight from torch's gradient reducer, or from a communication hook of torch's."""


class SiteFinder:
    """Finds the user's line among the frames of a stack. `torch` and `ours`: the packages' folders."""

    def __init__(self, torch: str, ours: str) -> None:
        self._torch, self._ours = os.path.join(torch, ""), os.path.join(ours, "")
        self._starters = os.path.join(self._ours, "launching", "")
        self._kinds: dict[str, int] = {}

    def walk(self, frame: FrameType | None) -> Trail:
        """The way from `frame` out to the innermost frame that is the user's; else to the innermost of a library."""
        kinds = self._kinds
        nearest: Trail | None = None
        called = None
        ddp = ""
        # No frame at all: a thread of the backward engine, or another of torch's own.
        in_reducer, innermost = frame is None, frame
        while frame is not None:
            code = frame.f_code
            kind = kinds.get(code.co_filename) or self.kind_of(code.co_filename)
            if kind == USER:
                return frame, called, ddp, in_reducer
            if kind == INNER:
                pass  # by far the most, and nothing to compare with
            elif kind == LIBRARY:
                nearest = nearest or (frame, called, ddp, in_reducer)
            elif kind in (OURS, STARTER):
                # What ddpilot asks for by itself is no line of whatever library runs it.
                nearest = nearest or (None, code, ddp, in_reducer)
                if kind == STARTER:
                    break
            elif kind == DDP:
                ddp = ddp or code.co_name
            elif kind == HOOK or (kind == ENGINE and frame is innermost):
                in_reducer = True
            if kind != WRAPPER:
                called = code
            frame = frame.f_back
        return nearest or (None, called, ddp, in_reducer)

    def callers(self, user: FrameType | None) -> list[FrameType]:
        """The user's frames that led to `user`, innermost first, as far as they are near."""
        found: list[FrameType] = []
        if user is None or user.f_code.co_name == "<module>":
            return found
        kinds, frame = self._kinds, user.f_back
        for _ in range(_MAX_FRAMES):
            if frame is None:
                break
            code = frame.f_code
            kind = kinds.get(code.co_filename) or self.kind_of(code.co_filename)
            if kind == USER:
                found.append(frame)
                if code.co_name == "<module>" or len(found) == _MAX_CALLERS:
                    break
            elif kind in (OURS, STARTER):
                break  # which has started what is the user's
            frame = frame.f_back
        return found

    def kind_of(self, file: str) -> int:
        """What the code in `file` is, one of the numbers above."""
        if len(self._kinds) > 10_000:  # generated code has a file name of its own each time
            self._kinds.clear()
        self._kinds[file] = kind = self._classify(file)
        return kind

    def _classify(self, file: str) -> int:
        if file.startswith(self._torch):
            relative = file[len(self._torch) :]
            return _TORCH_KINDS.get(relative, HOOK if relative.startswith(_TORCH_HOOKS) else INNER)
        if file.startswith(self._ours):
            return WRAPPER if file.endswith(_GUARD_WRAPPER) else STARTER if file.startswith(self._starters) else OURS
        if is_generated(file):
            return INNER
        return USER if is_users(file) else LIBRARY


def find_ddp_model(frame: FrameType | None) -> Any:
    """The innermost DDP model whose own methods are on the stack of `frame`; None where there is none."""
    while frame is not None:
        if frame.f_code.co_filename.endswith("nn/parallel/distributed.py") and "self" in frame.f_code.co_varnames:
            return frame.f_locals.get("self")
        frame = frame.f_back
    return None


def main_frame() -> FrameType | None:
    """Where the main thread is now."""
    return sys._current_frames().get(threading.main_thread().ident or 0)


def describe_site(trail: Trail, callers: Sequence[FrameType] = ()) -> dict[str, Any]:
    """The fact that the ring holds for a way: also the source line, since a cell's can be read nowhere else."""
    frame, called, _, _ = trail
    fact: dict[str, Any] = {"via": _name(called)}
    if frame is not None:
        fact |= dict(zip(("file", "line", "function", "text"), _describe_frame(frame), strict=True))
        fact["callers"] = [_describe_frame(each) for each in callers]
    return {name: value for name, value in fact.items() if value}


def _describe_frame(frame: FrameType) -> tuple[str, int, str, str]:
    file, code = frame.f_code.co_filename, frame.f_code
    return _name_file(file), frame.f_lineno, code.co_name, linecache.getline(file, frame.f_lineno).strip()[:200]


def _name_file(file: str) -> str:
    # A kernel compiles its cells under names such as /tmp/ipykernel_4711/123.py, and knows whose they are.
    interactive_shell = getattr(sys.modules.get("IPython.core.interactiveshell"), "InteractiveShell", None)
    if interactive_shell is None or not interactive_shell.initialized():
        return file
    label = getattr(interactive_shell.instance().compile, "format_code_name", lambda name: None)(file)
    return " ".join(label) if label else file


def _name(code: CodeType | None) -> str:
    if code is None:
        return ""
    return str(getattr(code, "co_qualname", code.co_name))  # before Python 3.11 without its class
