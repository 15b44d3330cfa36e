# SPDX-License-Identifier: Apache-2.0
"""The one definition of the user's files, and that everything which names a line goes by it."""

from __future__ import annotations

import linecache
import os
import sys
import traceback
import types
from collections.abc import Iterator
from typing import Any

import pytest

import ddpilot
from ddpilot.launching.first_failure import find_crash_line, find_raised_line
from ddpilot.record.call_sites import USER, SiteFinder
from ddpilot.user_files import CodeLine, collect_sources, install_sources, is_users, name_cells
from ddpilot.watch.companion import find_known_error
from ddpilot.watch.snapshot.model import RankException
from ddpilot.watch.snapshot.stacks import user_chain

PACKAGE = os.path.dirname(ddpilot.__file__)
STARTER = os.path.join(PACKAGE, "launching", "rank_server", "rank.py")
FILES = {
    "/home/u/train.py": True,
    "Cell In[3]": True,
    "/tmp/ipykernel_1/23.py": True,
    "<ipython-input-3-1badcafe>": True,
    "<string>": True,
    "/home/u/.local/lib/python3.11/site-packages/accelerate/x.py": False,
    "/usr/lib/python3/dist-packages/lightning/x.py": False,
    "/tmp/torchinductor_u/ab/c.py": False,
    "<frozen runpy>": False,
    "<eval_with_key>.3": False,
    os.__file__: False,
    os.path.join(PACKAGE, "training", "loop.py"): False,
}


@pytest.mark.parametrize("file", FILES)
def test_ring_stack_and_traceback_agree_whose_a_file_is(file: str) -> None:
    """Packages of a user's own site-packages and of Debian's dist-packages are libraries; `python -c` is the user's."""
    is_theirs = FILES[file]
    traceback = f'Traceback (most recent call last):\n  File "{file}", line 3, in f\n    x\n'
    crash = [
        "Current thread 0x1 (most recent call first):",
        f'  File "{file}", line 3 in f',
        '  File "/a.py", line 1 in g',
    ]
    assert is_users(file) is is_theirs
    assert (SiteFinder(torch="/opt/torch")._kind_of(file) == USER) is is_theirs
    assert bool(user_chain([CodeLine(file, 3, "f")])) is is_theirs
    assert (find_raised_line(traceback) is not None) is is_theirs
    assert find_crash_line(crash) == (f"{file}:3 in f" if is_theirs else "/a.py:1 in g")
    message = "Expected to mark a variable ready only once. This error is caused by one of the following reasons"
    known = find_known_error(0, RankException(type_name="RuntimeError", message=message), crash[1:])
    assert known is not None
    assert known.place is not None
    assert (known.place.file == file) is is_theirs


def test_the_command_that_starts_ranks_is_not_the_users_line() -> None:
    """It has the file name of `python -c`, as the user's own has."""
    own = [CodeLine(STARTER, 9, "run_rank"), CodeLine("<string>", 1, "<module>")]
    assert user_chain(own) == ()
    lines = [
        "(most recent call first):",
        *(f'  File "{each.file}", line {each.line} in {each.function}' for each in own),
    ]
    assert find_crash_line(lines) is None


def test_a_method_that_a_dataclass_has_made_is_not_the_users_line() -> None:
    """Its file name is that of `python -c`, too: what called it is named."""
    frames = [CodeLine("<string>", 5, "__init__"), CodeLine("/a.py", 3, "f")]
    assert [each.file for each in user_chain(frames)] == ["/a.py"]


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
