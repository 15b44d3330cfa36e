# SPDX-License-Identifier: Apache-2.0
"""pdb in a rank's cells: `breakpoint()` opens its prompt, and it finds the source lines of a cell."""

from __future__ import annotations

import bdb
import functools
import os
import sys
from typing import Any

from IPython.core.debugger import set_trace

from ddpilot.session.rank.raised import CELL


def use_pdb() -> None:
    """Let `breakpoint()` open pdb unless a debugger is attached, and let pdb show lines of cells.

    Importing ipykernel has made `breakpoint()` debugpy's, which does nothing without a debugger, and none attaches to a
    rank by itself.
    """
    original_hook, original_canonic = sys.breakpointhook, bdb.Bdb.canonic

    def break_here(*args: Any, **kwargs: Any) -> Any:
        if _is_debugger_attached():
            return original_hook(*args, **kwargs)
        if os.environ.get("PYTHONBREAKPOINT"):  # "0", or a debugger of the user's choice
            return sys.__breakpointhook__(*args, **kwargs)
        return set_trace(sys._getframe().f_back)

    @functools.wraps(original_canonic)
    def canonic(debugger: bdb.Bdb, filename: str) -> str:
        # A path made of "Cell In[7]" is none under which `linecache` has the cell's lines.
        return filename if filename.startswith(CELL) else original_canonic(debugger, filename)

    sys.breakpointhook = break_here
    bdb.Bdb.canonic = canonic  # type: ignore[method-assign, assignment]


def _is_debugger_attached() -> bool:
    debugpy = sys.modules.get("debugpy")
    return debugpy is not None and bool(debugpy.is_client_connected())
