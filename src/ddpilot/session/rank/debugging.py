# SPDX-License-Identifier: Apache-2.0
"""Make pdb usable in a rank's cells: `breakpoint()` opens its prompt, and it finds the source lines of cells."""

from __future__ import annotations

import bdb
import functools
import os
import sys
from typing import Any

from IPython.core.debugger import set_trace

from ddpilot.session.rank.error_report import CELL


def use_pdb() -> None:
    """Make `breakpoint()` open pdb unless a debugger is attached, and make pdb show the lines of cells.

    Importing ipykernel has set `breakpoint()` to debugpy's function, which does nothing without a debugger; no debugger
    attaches to a rank on its own.
    """
    original_hook, original_canonic = sys.breakpointhook, bdb.Bdb.canonic

    def break_here(*args: Any, **kwargs: Any) -> Any:
        if _is_debugger_attached():
            return original_hook(*args, **kwargs)
        if os.environ.get("PYTHONBREAKPOINT"):  # "0", or a debugger that the user has chosen
            return sys.__breakpointhook__(*args, **kwargs)
        return set_trace(sys._getframe().f_back)

    @functools.wraps(original_canonic)
    def canonic(debugger: bdb.Bdb, filename: str) -> str:
        # `linecache` has the cell's lines under "Cell In[7]", not under an absolute path made from it.
        return filename if filename.startswith(CELL) else original_canonic(debugger, filename)

    sys.breakpointhook = break_here
    bdb.Bdb.canonic = canonic  # type: ignore[method-assign, assignment]


def _is_debugger_attached() -> bool:
    debugpy = sys.modules.get("debugpy")
    return debugpy is not None and bool(debugpy.is_client_connected())
