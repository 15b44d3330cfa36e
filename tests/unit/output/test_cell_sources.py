# SPDX-License-Identifier: Apache-2.0
"""Source text of cells."""

from __future__ import annotations

import linecache
import sys
import traceback
import types
from collections.abc import Iterator
from typing import Any

import pytest

from ddpilot.output.cell_sources import collect_sources, install_sources, name_cells

CELL = "/tmp/ipykernel_12/345.py"


@pytest.fixture(autouse=True)
def _same_linecache() -> Iterator[None]:
    before = dict(linecache.cache)
    yield
    linecache.cache.clear()
    linecache.cache.update(before)


def test_install_sources_gives_tracebacks_their_lines() -> None:
    """Sources that one process collected show a cell's lines in tracebacks of a different process."""
    linecache.cache[CELL] = (16, None, ["def f():\n", "    1 / 0\n"], CELL)
    sources = collect_sources()
    linecache.cache.clear()
    install_sources(sources)
    linecache.checkcache()  # every traceback does that, and it must not drop them
    space: dict[str, Any] = {}
    exec(compile("def f():\n    1 / 0\n", CELL, "exec"), space)
    try:
        space["f"]()
    except ZeroDivisionError:
        assert f'File "{CELL}", line 2, in f\n    1 / 0' in traceback.format_exc()


def test_collect_sources_leaves_out_files_on_disk() -> None:
    """A rank reads those itself."""
    linecache.getlines(__file__)
    assert __file__ in linecache.cache
    assert __file__ not in collect_sources()


def test_name_cells_uses_the_shell_s_own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """A traceback has ``Cell In[3]``, as in the notebook itself; other files keep their names."""
    compiler = types.SimpleNamespace(format_code_name=lambda name: ("Cell", "In[3]") if name == CELL else None)
    shell = types.SimpleNamespace(compile=compiler)
    monkeypatch.setattr(sys.modules["__main__"], "get_ipython", lambda: shell, raising=False)
    text = f'  File "{CELL}", line 2, in f\n  File "net.py", line 1, in g'
    assert name_cells(text) == '  Cell In[3], line 2, in f\n  File "net.py", line 1, in g'
    assert name_cells(f"{CELL}:3 in seg, /a/net.py:7 in g") == "Cell In[3]:3 in seg, /a/net.py:7 in g"


def test_name_cells_leaves_text_alone_outside_a_notebook() -> None:
    """Without a shell there are no cells."""
    text = f'  File "{CELL}", line 2, in f'
    assert name_cells(text) == text
