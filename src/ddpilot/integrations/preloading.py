# SPDX-License-Identifier: Apache-2.0
"""Import slow dependencies of a library before ranks are forked, without starting threads."""

from __future__ import annotations

import contextlib
import importlib
import os

_VARIABLE = "OPENBLAS_NUM_THREADS"


def import_quietly(*names: str) -> None:
    """Import those of `names` that can be imported; import errors of the others show up in the cell that needs them.

    SciPy's OpenBLAS starts one thread per core when it is loaded, and the rank server does not fork a process with
    threads of unknown libraries. As ranks share the cores, SciPy gets one thread in each.
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
