# SPDX-License-Identifier: Apache-2.0
"""Which files are the user's: scripts, modules and cells, as opposed to libraries, ddpilot and generated code."""

from __future__ import annotations

import os
import sysconfig
from functools import lru_cache

_OURS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
_STARTERS = os.path.join(_OURS, "launching", "")
_LIBRARIES = tuple(
    os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
_PACKAGES = ("/site-packages/", "/dist-packages/")
_GENERATED = "torchinductor_"
_INTERACTIVE = ("<ipython-input-", "<stdin>", "<string>", "<cell")
_COMMAND = "<string>"
"""The text of ``python -c``: also of the one with which ddpilot starts ranks, and of methods that dataclasses make."""


def is_ours(file: str) -> bool:
    """True if `file` is ddpilot's."""
    return file.startswith(_OURS)


def starts_ranks(file: str) -> bool:
    """True if `file` is a part of ddpilot that starts ranks: what calls it is not the user's code of a rank."""
    return file.startswith(_STARTERS)


def is_library(file: str) -> bool:
    """True if `file` is of an installed package or of the standard library, wherever they are installed."""
    return file.startswith(_LIBRARIES) or any(part in file for part in _PACKAGES)


def is_generated(file: str) -> bool:
    """True if `file` holds code that a library has made, such as torch.compile's."""
    return _GENERATED in file or (file.startswith("<") and not file.startswith(_INTERACTIVE))


@lru_cache(maxsize=10_000)
def is_users(file: str) -> bool:
    """True if `file` is the user's: a script, a module, a cell, or the text of ``python -c``."""
    return not (is_ours(file) or is_generated(file) or is_library(file))


def is_users_line(file: str, function: str, called: str = "") -> bool:
    """True if a line of `file` in `function` is the user's. `called`: the file of the frame that it called."""
    if file == _COMMAND and (starts_ranks(called) or (function.startswith("__") and function.endswith("__"))):
        return False
    return is_users(file)
