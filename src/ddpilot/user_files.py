# SPDX-License-Identifier: Apache-2.0
"""The user's code: whether a line is in a script, a module or a cell, not in a library, and the text of cells."""

from __future__ import annotations

import linecache
import os
import re
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import TracebackType


def collect_sources() -> dict[str, list[str]]:
    """Lines of every source that is in `linecache` but not on disk, by file name."""
    return {
        name: list(entry[2])
        for name, entry in list(linecache.cache.items())
        if len(entry) == 4 and entry[2] and not os.path.exists(name) and not name.startswith("<frozen")
    }


def install_sources(sources: Mapping[str, list[str]]) -> None:
    """Add `sources` to this process's `linecache`; an entry without a modification time is never checked on disk."""
    for name, lines in sources.items():
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)


def name_cells(text: str) -> str:
    """Replace IPython's file names of cells in a traceback or location with their labels: ``Cell In[3], line 4``."""
    shell = getattr(sys.modules["__main__"], "get_ipython", lambda: None)()
    label = getattr(getattr(shell, "compile", None), "format_code_name", None)
    if label is None:
        return text

    def rename(match: re.Match[str]) -> str:
        found = label(match[1] or match[2])
        return match[0] if found is None else " ".join(found)

    return re.sub(r'File "([^"\n]+)"(?=, line)|(/[^\s:"]+\.py)(?=:\d)', rename, text)


_OURS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")
_STARTERS = os.path.join(_OURS, "launching", "")
_LIBRARIES = tuple(
    os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
_PACKAGES = ("/site-packages/", "/dist-packages/")
_GENERATED = "torchinductor_"
_INTERACTIVE = ("<ipython-input-", "<stdin>", "<string>", "<cell")
_CALLER_OF_MAGICS = "IPython"
_COMMAND = "<string>"
"""File name of ``python -c`` code, including ddpilot's own that starts ranks, and of methods of dataclasses."""


@dataclass(frozen=True, slots=True)
class CodeLine:
    """A line of code: of a finding, or of one call on a stack."""

    file: str
    """File name as Python has it, such as ``Cell In[7]`` for a cell; in a finding, as it is shown to the user."""
    line: int
    """Line number, from 1."""
    function: str = ""
    """Name of the enclosing function; empty if unknown."""
    text: str = ""
    """The source line without indentation; empty if unknown."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" + (f"  {self.text}" if self.text else "")

    @property
    def position(self) -> tuple[str, int]:
        """File and line number, by which lines are compared: their text is not always known."""
        return self.file, self.line


def label_cell(file: str) -> str:
    """Return a label such as ``Cell In[3]`` if `file` is a cell of this process; else `file`.

    A kernel compiles cells under names such as /tmp/ipykernel_4711/123.py and maps them to cell numbers.
    """
    interactive_shell = getattr(sys.modules.get("IPython.core.interactiveshell"), "InteractiveShell", None)
    if interactive_shell is None or not interactive_shell.initialized():
        return file
    label = getattr(interactive_shell.instance().compile, "format_code_name", lambda name: None)(file)
    return " ".join(label) if label else file


def is_ours(file: str) -> bool:
    """Return True if `file` belongs to ddpilot."""
    return file.startswith(_OURS)


def starts_ranks(file: str) -> bool:
    """Return True if `file` is a part of ddpilot that starts ranks; its callers are not the user's code of a rank."""
    return file.startswith(_STARTERS)


def is_library(file: str) -> bool:
    """Return True if `file` belongs to an installed package or to the standard library."""
    return file.startswith(_LIBRARIES) or any(part in file for part in _PACKAGES)


def is_generated(file: str) -> bool:
    """Return True if `file` holds generated code, such as that of torch.compile."""
    return _GENERATED in file or (file.startswith("<") and not file.startswith(_INTERACTIVE))


@lru_cache(maxsize=10_000)
def is_users(file: str) -> bool:
    """Return True if `file` is the user's: a script, a module, a cell, or the text of ``python -c``."""
    return not (is_ours(file) or is_generated(file) or is_library(file))


def is_users_line(file: str, function: str, called: str = "") -> bool:
    """Return True if a line of `file` in `function` is the user's. `called`: the file of the frame it called."""
    if file == _COMMAND and (starts_ranks(called) or (function.startswith("__") and function.endswith("__"))):
        return False
    return is_users(file)


def user_frames(frames: TracebackType | None) -> TracebackType | None:
    """Return a copy of the traceback `frames` with the user's lines only; None if there are none.

    The line of a cell that calls a magic is left out too.
    """
    kept: list[TracebackType] = []
    while frames is not None:
        code, called = frames.tb_frame.f_code, frames.tb_next
        if str(frames.tb_frame.f_globals.get("__name__")).partition(".")[0] == _CALLER_OF_MAGICS:
            kept.clear()
        elif is_users_line(code.co_filename, code.co_name, called.tb_frame.f_code.co_filename if called else ""):
            kept.append(frames)
        frames = called
    copied: TracebackType | None = None
    for each in reversed(kept):
        copied = TracebackType(copied, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return copied
