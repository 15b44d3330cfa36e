# SPDX-License-Identifier: Apache-2.0
"""Source text that is not in a file (cells and prompts), which ranks need for tracebacks and `inspect.getsource`."""

from __future__ import annotations

import linecache
import os
import re
import sys
from collections.abc import Mapping


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
