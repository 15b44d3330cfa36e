# SPDX-License-Identifier: Apache-2.0
"""Import what makes a library's import slow before the ranks are forked, so that forking stays safe."""

from __future__ import annotations

import contextlib
import importlib
import os

_VARIABLE = "OPENBLAS_NUM_THREADS"


def import_quietly(*names: str) -> None:
    """Import those of `names` that can be imported; others say why not in the cell that needs them.

    scipy's OpenBLAS starts a thread for every core when it is loaded, and a process with threads of unknown libraries
    is not forked. Ranks share the cores: one thread each is scipy's part here.
    """
    before = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = "1"
    try:
        for name in names:
            with contextlib.suppress(ImportError, OSError, RuntimeError):
                importlib.import_module(name)
    finally:
        del os.environ[_VARIABLE]
        if before is not None:
            os.environ[_VARIABLE] = before
