# SPDX-License-Identifier: Apache-2.0
"""Parse fault handler output and tracebacks to find the line at which a rank failed."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from ddpilot.user_files import is_users_line, starts_ranks

_FRAME = re.compile(r'^\s+File "(?P<file>[^"]+)", line (?P<line>\d+)(?: in (?P<function>.+))?$')
_RAISED_FRAME = re.compile(
    r'^  File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>.+)(?:\n    (?P<text>\S.*))?$', re.M
)
_MAX_SHOWN = 20


class RaisedAt(NamedTuple):
    """One frame of a traceback. `text`: the stripped source line, or "" if it is not known."""

    file: str
    line: int
    function: str
    text: str


def tidy_lines(lines: Iterable[str]) -> tuple[str, ...]:
    """The last 20 of `lines`, without the launcher's frames and the list of extension modules."""
    kept, called = [], ""
    for line in lines:
        frame = _FRAME.match(line)
        is_own = frame is not None and _is_own(frame["file"], called)
        called = frame["file"] if frame is not None else ""
        if not (is_own or line.startswith("Extension modules: ")):
            kept.append(line)
    while kept and not kept[-1].strip():
        kept.pop()
    return tuple(kept[-_MAX_SHOWN:])


def find_crash_line(lines: Iterable[str]) -> str | None:
    """Location of the crashed thread, as ``file:line in function``; None if `lines` contains no stack.

    Prefers the innermost frame outside installed libraries and ddpilot; falls back to the innermost frame.
    """
    in_stack = False
    innermost = None
    called = ""
    for line in lines:
        frame = _FRAME.match(line)
        if frame is not None and in_stack and not _is_own(frame["file"], called):
            place = f"{frame['file']}:{frame['line']} in {frame['function']}"
            if is_users_line(frame["file"], frame["function"] or "", called):
                return place
            innermost = innermost or place
        called = frame["file"] if frame is not None else ""
        in_stack = in_stack or "(most recent call first)" in line
    return innermost


def find_raised_line(traceback: str) -> RaisedAt | None:
    """The innermost frame outside installed libraries and ddpilot; in a chain of exceptions, that of the last one."""
    found = None
    for frame in _RAISED_FRAME.finditer(traceback):
        if is_users_line(frame["file"], frame["function"]):
            found = frame
    if found is None:
        return None
    return RaisedAt(found["file"], int(found["line"]), found["function"], (found["text"] or "").strip())


def _is_own(file: str, called: str) -> bool:
    return starts_ranks(file) or (file == "<string>" and starts_ranks(called))
