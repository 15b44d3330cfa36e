# SPDX-License-Identifier: Apache-2.0
"""Import slow dependencies of a library before ranks are forked, and patch it until the session ends."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from types import ModuleType
from typing import Any


def replace(cleanup: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set attribute `name` of `owner` until `cleanup` is closed."""
    cleanup.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


def wrap(cleanup: ExitStack, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace the function `name` of `owner` with `wrapper(original, *args, **kwargs)` until `cleanup` is closed."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    replace(cleanup, owner, name, wrapped)


def holders(package: str, name: str, value: Any) -> list[ModuleType]:
    """Return the loaded modules of `package` whose attribute `name` is `value`, as star imports copy names."""
    inside = [module for key, module in sys.modules.items() if key == package or key.startswith(f"{package}.")]
    return [module for module in inside if vars(module).get(name) is value]


_VARIABLE = "OPENBLAS_NUM_THREADS"


def import_quietly(*names: str) -> None:
    """Import those of `names` that can be imported; the cell that needs a missing one raises its ImportError.

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
