# SPDX-License-Identifier: Apache-2.0
"""What a rank raised as a finding, where a page knows the message: with the user's line, which torch does not name."""

from __future__ import annotations

import os
import re
import sysconfig

from ddpilot.findings.catalog import find_known
from ddpilot.findings.finding import Finding, Place
from ddpilot.watch.view import ErrorView

_FRAME = re.compile(
    r'^  File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>.+)(?:\n    (?P<text>\S.*))?$', re.M
)
_PATHS = sysconfig.get_paths()
_OWN = os.path.dirname(os.path.dirname(__file__)) + os.sep
_LIBRARIES = (_OWN, *{_PATHS[name] + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_MAX_MESSAGE_CHARS = 200


def find_known_error(rank: int, error: ErrorView) -> Finding | None:
    """The finding for what `rank` raised; None where no page knows the message."""
    known = find_known(f"{error.type_name}: {error.message}")
    if not known:
        return None
    entry = known[0]
    return Finding(
        code=entry.code,
        name=entry.name,
        severity=entry.severity,
        summary=entry.title,
        ranks=(rank,),
        place=_find_place(error.traceback),
        evidence=(_shorten(f"{error.type_name}: {error.message}"),),
        why=" ".join(entry.section("What it means").partition("\n\n")[0].split()),
        fix=f"{entry.first_fix}.",
        source=f"ddpilot explain {entry.code}",
    )


def _find_place(traceback: str) -> Place | None:
    """The innermost line outside of installed libraries; of a chain of exceptions, of the last one."""
    frames = [frame for frame in _FRAME.finditer(traceback) if not _is_library(frame["file"])]
    if not frames:
        return None
    last = frames[-1]
    return Place(
        file=last["file"], line=int(last["line"]), function=last["function"], text=(last["text"] or "").strip()
    )


def _is_library(file: str) -> bool:
    return file.startswith((*_LIBRARIES, "<frozen"))


def _shorten(message: str) -> str:
    text = " ".join(message.split())
    return text if len(text) <= _MAX_MESSAGE_CHARS else f"{text[: _MAX_MESSAGE_CHARS - 3]}..."
