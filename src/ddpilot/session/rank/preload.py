# SPDX-License-Identifier: Apache-2.0
"""Preloaded by the rank server: does once what each rank would otherwise do at its start or its first error."""

from __future__ import annotations

import contextlib
import importlib
import sys

from IPython.core.ultratb import AutoFormattedTB

from ddpilot.session.rank.session_group import hook_default_group

_AT_START = (
    "IPython.core.completerlib",
    "IPython.core.oinspect",
    "IPython.extensions.storemagic",
    "IPython.utils.wildcard",
    "tornado.platform.asyncio",
)
"""Modules that a kernel imports when it starts, if this release of IPython has them: a tenth of the start of a rank."""


def format_one_traceback() -> str:
    """Fill the caches of IPython, pygments and inspect by formatting an exception: 0.3 s of a first error."""
    try:
        raise LookupError("an example")
    except LookupError:
        formatter = AutoFormattedTB(mode="Context")
        return formatter.stb2text(formatter.structured_traceback(*sys.exc_info()))


for name in _AT_START:
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module(name)
format_one_traceback()
hook_default_group()
