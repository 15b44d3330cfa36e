# SPDX-License-Identifier: Apache-2.0
"""Read what Python's fault handler wrote into a rank's output when it crashed, and where a traceback ends."""

from __future__ import annotations

import os
import re
import sysconfig
from collections.abc import Iterable
from typing import NamedTuple

_FRAME = re.compile(r'^\s+File "(?P<file>[^"]+)", line (?P<line>\d+)(?: in (?P<function>.+))?$')
_RAISED_FRAME = re.compile(
    r'^  File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>.+)(?:\n    (?P<text>\S.*))?$', re.M
)
_OWN = os.path.dirname(__file__) + os.sep
_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_LIBRARIES = tuple(sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_MAX_SHOWN = 20


class RaisedAt(NamedTuple):
    """A line of a traceback. `text`: the source line without its indentation, empty where it is not known."""

    file: str
    line: int
    function: str
    text: str


def tidy_lines(lines: Iterable[str]) -> tuple[str, ...]:
    """The last 20 of `lines` without the frames of the launcher and without the list of extension modules."""
    kept = [line for line in lines if not line.startswith("Extension modules: ") and not _is_own_frame(line)]
    while kept and not kept[-1].strip():
        kept.pop()
    return tuple(kept[-_MAX_SHOWN:])


def find_crash_line(lines: Iterable[str]) -> str | None:
    """Where the crashed thread's Python was, as ``file:line in function``; None if no stack is in `lines`.

    The innermost line outside installed libraries and ddpilot, where there is one.
    """
    in_stack = False
    innermost = None
    for line in lines:
        frame = _FRAME.match(line)
        if frame is not None and in_stack and not _is_own_frame(line):
            place = f"{frame['file']}:{frame['line']} in {frame['function']}"
            if not (_is_library(frame["file"]) or frame["file"].startswith((_PACKAGE, "<frozen"))):
                return place
            innermost = innermost or place
        in_stack = in_stack or "(most recent call first)" in line
    return innermost


def find_raised_line(traceback: str) -> RaisedAt | None:
    """The innermost line outside of installed libraries and ddpilot; of a chain of exceptions, of the last one."""
    found = None
    for frame in _RAISED_FRAME.finditer(traceback):
        if not (_is_library(frame["file"]) or frame["file"].startswith((_PACKAGE, "<frozen"))):
            found = frame
    if found is None:
        return None
    return RaisedAt(found["file"], int(found["line"]), found["function"], (found["text"] or "").strip())


def _is_library(file: str) -> bool:
    return any(file.startswith(folder) for folder in _LIBRARIES)


def _is_own_frame(line: str) -> bool:
    frame = _FRAME.match(line)
    return frame is not None and (frame["file"].startswith(_OWN) or frame["file"] == "<string>")
