# SPDX-License-Identifier: Apache-2.0
"""Source text that lies in no file: cells and prompts. Ranks need it for tracebacks and `inspect.getsource`."""

from __future__ import annotations

import linecache
import os
import re
import sys
from collections.abc import Mapping


def collect_sources() -> dict[str, list[str]]:
    """The lines of every source that `linecache` holds and the disk does not, by file name."""
    return {
        name: list(entry[2])
        for name, entry in list(linecache.cache.items())
        if len(entry) == 4 and entry[2] and not os.path.exists(name) and not name.startswith("<frozen")
    }


def install_sources(sources: Mapping[str, list[str]]) -> None:
    """Make `sources` known to this process; an entry without a time is never looked for on the disk."""
    for name, lines in sources.items():
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)


def name_cells(text: str) -> str:
    """A traceback or a place with IPython's file names of cells as people know them: ``Cell In[3], line 4``."""
    shell = getattr(sys.modules["__main__"], "get_ipython", lambda: None)()
    label = getattr(getattr(shell, "compile", None), "format_code_name", None)
    if label is None:
        return text

    def rename(match: re.Match[str]) -> str:
        found = label(match[1] or match[2])
        return match[0] if found is None else " ".join(found)

    return re.sub(r'File "([^"\n]+)"(?=, line)|(/[^\s:"]+\.py)(?=:\d)', rename, text)
