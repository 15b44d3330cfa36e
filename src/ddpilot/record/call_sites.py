# SPDX-License-Identifier: Apache-2.0
"""Find the user's line that started a collective, and the library function that the line called."""

from __future__ import annotations

import inspect
import linecache
import os
import sys
from collections.abc import Mapping, Sequence
from types import CodeType, FrameType
from typing import Any

from ddpilot.user_files import is_generated, is_ours, is_users, label_cell, starts_ranks

# Kinds of files that frames belong to. Integers, as comparing Enum members takes longer than the rest of a frame.
USER = 1  # the user's code: a script, a module, a cell
LIBRARY = 2  # third-party code or the standard library
INNER = 3  # torch: never a line to show
WRAPPER = 4  # torch's or guard's wrapper, which does not identify the function called
ENGINE = 5  # torch's Python entry to the backward pass
DDP = 6  # DistributedDataParallel
HOOK = 7  # torch's DDP communication hooks
OURS = 8  # ddpilot
STARTER = 9  # ddpilot's code that starts ranks: its callers are not the user's code

_TORCH_KINDS = {
    "autograd/graph.py": ENGINE,
    "distributed/c10d_logger.py": WRAPPER,
    "nn/modules/module.py": WRAPPER,
    "nn/parallel/distributed.py": DDP,
    "utils/_contextlib.py": WRAPPER,
}
_GUARD_WRAPPER = os.path.join("guard", "<importlib._bootstrap>")  # `ddpilot.guard.probe.WRAPPER_FILE`
_TORCH_HOOKS = "distributed/algorithms/ddp_comm_hooks/"
_MAX_CALLERS = 5
_MAX_FRAMES = 16
"""Number of frames around the user's frame that are examined."""
_NUM_OWN_REFERENCES = 3
"""To the dictionary of a frame's variables: of the frame, of a name here, and of the call that counts them."""


CallPath = tuple[FrameType | None, CodeType | None, str, bool]
"""The user's frame; the library function that its line called; the innermost function of DistributedDataParallel
between them, or empty; True if the collective comes from torch's gradient reducer or from one of torch's communication
hooks."""


class SiteFinder:
    """Finds the user's line among the frames of a stack. `torch` is the folder of that package."""

    def __init__(self, torch: str) -> None:
        self._torch = os.path.join(torch, "")
        self._kinds: dict[str, int] = {}

    def walk(self, frame: FrameType | None) -> CallPath:
        """Walk from `frame` outwards to the innermost frame of the user, or else to the innermost one of a library."""
        kinds = self._kinds
        nearest: CallPath | None = None
        called = None
        ddp = ""
        # No frame: a thread of the autograd engine, or another thread created by torch.
        in_reducer, innermost = frame is None, frame
        while frame is not None:
            code = frame.f_code
            kind = kinds.get(code.co_filename) or self._kind_of(code.co_filename)
            if kind == USER:
                return frame, called, ddp, in_reducer
            if kind == INNER:
                pass  # most frames; nothing to compare
            elif kind == LIBRARY:
                nearest = nearest or (frame, called, ddp, in_reducer)
            elif kind in (OURS, STARTER):
                # A collective that ddpilot starts itself is not attributed to the library that runs ddpilot.
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

    def callers(self, user: FrameType | None) -> tuple[list[FrameType], tuple[int, ...]]:
        """Return the user's frames that called `user`, innermost first, at most 5 within the next 16 frames.

        Also returns a key that is equal for the same lines: of each frame the id of its code and the instruction.
        """
        found: list[FrameType] = []
        key: tuple[int, ...] = ()
        if user is None or user.f_code.co_name == "<module>":
            return found, key
        kinds, frame = self._kinds, user.f_back
        for _ in range(_MAX_FRAMES):
            if frame is None:
                break
            code = frame.f_code
            kind = kinds.get(code.co_filename) or self._kind_of(code.co_filename)
            if kind == USER:
                found.append(frame)
                key += (id(code), frame.f_lasti)
                if code.co_name == "<module>" or len(found) == _MAX_CALLERS:
                    break
            elif kind in (OURS, STARTER):
                break  # it started the user's code
            frame = frame.f_back
        return found, key

    def _kind_of(self, file: str) -> int:
        """Return the kind of the code in `file`, one of the constants above."""
        if len(self._kinds) > 10_000:  # generated code gets a new file name each time
            self._kinds.clear()
        self._kinds[file] = kind = self._classify(file)
        return kind

    def _classify(self, file: str) -> int:
        if file.startswith(self._torch):
            relative = file[len(self._torch) :]
            return _TORCH_KINDS.get(relative, HOOK if relative.startswith(_TORCH_HOOKS) else INNER)
        if is_ours(file):
            return WRAPPER if file.endswith(_GUARD_WRAPPER) else STARTER if starts_ranks(file) else OURS
        if is_generated(file):
            return INNER
        return USER if is_users(file) else LIBRARY


def local_variables(frame: FrameType) -> Mapping[str, Any]:
    """The variables of a function that runs, or those of its module at a module's top level.

    Until Python 3.12 a frame keeps the dictionary that `f_locals` returns, and with it what the user has deleted or
    replaced since: a batch, or the logits, for the rest of the training. So the dictionary is emptied, unless somebody
    else uses it too: a debugger, or the caller of `locals()`, which returns the same one.
    """
    kept = frame.f_locals
    if sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        variables = dict(kept)
        if sys.getrefcount(kept) == _NUM_OWN_REFERENCES:
            kept.clear()
        return variables
    return kept


def find_ddp_model(frame: FrameType | None) -> Any:
    """Return the innermost DDP model with a method on the stack of `frame`; None if there is none."""
    while frame is not None:
        if frame.f_code.co_filename.endswith("nn/parallel/distributed.py") and "self" in frame.f_code.co_varnames:
            return frame.f_locals.get("self")
        frame = frame.f_back
    return None


def describe_site(trail: CallPath, callers: Sequence[FrameType] = ()) -> dict[str, Any]:
    """Return the ring's fact for a trail, with the source line: the source of a cell cannot be read later."""
    frame, called, _, _ = trail
    fact: dict[str, Any] = {"via": _name(called)}
    if frame is not None:
        fact |= dict(zip(("file", "line", "function", "text"), _describe_frame(frame), strict=True))
        fact["callers"] = [_describe_frame(each) for each in callers]
    return {name: value for name, value in fact.items() if value}


def _describe_frame(frame: FrameType) -> tuple[str, int, str, str]:
    file, code = frame.f_code.co_filename, frame.f_code
    return label_cell(file), frame.f_lineno, code.co_name, linecache.getline(file, frame.f_lineno).strip()[:200]


def _name(code: CodeType | None) -> str:
    if code is None:
        return ""
    return str(getattr(code, "co_qualname", code.co_name))  # before Python 3.11 without the class
