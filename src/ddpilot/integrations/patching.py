# SPDX-License-Identifier: Apache-2.0
"""Change something of a library in this process, and have it back when the session ends."""

from __future__ import annotations

import functools
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
    """Let `wrapper(original, *args, **kwargs)` stand for the function `name` of `owner`, until `cleanup` is closed."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    replace(cleanup, owner, name, wrapped)


def holders(package: str, name: str, value: Any) -> list[ModuleType]:
    """The loaded modules of `package` whose attribute `name` is `value`: star imports copy names."""
    inside = [module for key, module in sys.modules.items() if key == package or key.startswith(f"{package}.")]
    return [module for module in inside if vars(module).get(name) is value]
