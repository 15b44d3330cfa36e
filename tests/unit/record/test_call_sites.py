# SPDX-License-Identifier: Apache-2.0
"""Find the user's line of a stack by file names."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import ddpilot
from ddpilot.record.call_sites import SiteFinder, describe_site

TORCH = "/site/torch"
OURS = str(Path(ddpilot.__file__).parent)
LIBRARY = f"{sysconfig.get_path('purelib')}/somebody/loop.py"
REDUCE = f"{TORCH}/distributed/distributed_c10d.py"
LOGGER = f"{TORCH}/distributed/c10d_logger.py"
DDP = f"{TORCH}/nn/parallel/distributed.py"
ENGINE = f"{TORCH}/autograd/graph.py"
HOOKS = f"{TORCH}/distributed/algorithms/ddp_comm_hooks/default_hooks.py"


def call_through(files: list[str], inner: Callable[[], Any]) -> Any:
    """The result of `inner`, called by functions whose code says that it lies in `files`, outermost first."""
    for number, file in enumerate(reversed(files)):
        source = "\n" * number + f"def function_{number}():\n    return inner()\n"
        namespace: dict[str, Any] = {"inner": inner}
        exec(compile(source, file, "exec"), namespace)
        inner = namespace[f"function_{number}"]
    with ThreadPoolExecutor(1) as pool:  # where nothing of what started the tests is on the stack
        return pool.submit(inner).result()


CASES: dict[str, tuple[list[str], tuple[str, str, str, bool]]] = {
    "script": (["/home/u/train.py", LOGGER, REDUCE], ("/home/u/train.py", "function_0", "", False)),
    "cell": (["Cell In[7]", REDUCE], ("Cell In[7]", "function_0", "", False)),
    "old cell": (["<ipython-input-3-1badcafe>", REDUCE], ("<ipython-input-3-1badcafe>", "function_0", "", False)),
    "generated": (["/home/u/train.py", "<eval_with_key>.3", REDUCE], ("/home/u/train.py", "function_1", "", False)),
    "library": (["/home/u/train.py", LIBRARY, REDUCE], ("/home/u/train.py", "function_1", "", False)),
    "only a library": ([LIBRARY, REDUCE], (LIBRARY, "function_0", "", False)),
    "ours": ([LIBRARY, f"{OURS}/group/ddp_models.py", REDUCE], ("", "function_1", "", False)),
    "ours for the user": (["/a.py", f"{OURS}/group/init_group.py", REDUCE], ("/a.py", "function_1", "", False)),
    "forward": (["/a.py", DDP], ("/a.py", "function_0", "function_0", False)),
    "backward": (["/a.py", ENGINE], ("/a.py", "function_0", "", True)),
    "communication hook": (["/a.py", ENGINE, HOOKS], ("/a.py", "function_1", "", True)),
    "command": (["<string>", REDUCE], ("<string>", "function_0", "", False)),
    "our command": (
        ["<string>", f"{OURS}/launching/a.py", f"{OURS}/group/b.py", REDUCE],
        ("", "function_1", "", False),
    ),
    "package of the user": (
        ["/a.py", "/home/u/.local/lib/python3.11/site-packages/b.py"],
        ("/a.py", "function_0", "", False),
    ),
    "compiled": (["/a.py", "/tmp/torchinductor_u/xy/c.py", REDUCE], ("/a.py", "function_1", "", False)),
}


@pytest.mark.parametrize("case", CASES)
def test_walk_finds_the_users_line(case: str) -> None:
    """The innermost line that is the user's, what it called, and whether DDP or its reducer is in between."""
    files, (file, via, ddp, in_reducer) = CASES[case]
    finder = SiteFinder(torch=TORCH)
    trail = call_through(files, lambda: finder.walk(sys._getframe(1)))
    described = describe_site(trail)
    assert (described.get("file", ""), described.get("via", "")) == (file, via)
    assert (trail[2], trail[3]) == (ddp, in_reducer)


CALLERS: dict[str, tuple[list[str], list[str]]] = {
    "of the user's": (["/a.py", "/b.py", "/c.py", REDUCE], ["/b.py", "/a.py"]),
    "through a library": (["/a.py", LIBRARY, LOGGER, "/c.py", REDUCE], ["/a.py"]),
    "started by ours": (["/a.py", f"{OURS}/trainer/fit/fit.py", "/b.py", "/c.py", REDUCE], ["/b.py"]),
    "of many the nearest": ([f"/{number}.py" for number in range(9)], [f"/{number}.py" for number in range(7, 2, -1)]),
    "too far away": (["/a.py", *[LIBRARY] * 16, "/c.py", REDUCE], []),
}


@pytest.mark.parametrize("case", CALLERS)
def test_callers_are_the_users_calls_around_the_line(case: str) -> None:
    """Those near the line, described with their lines."""
    files, expected = CALLERS[case]
    finder = SiteFinder(torch=TORCH)

    def find() -> dict[str, Any]:
        trail = finder.walk(sys._getframe(1))
        return describe_site(trail, finder.callers(trail[0])[0])

    described = call_through(files, find)
    assert [file for file, *_ in described.get("callers", [])] == expected


def test_the_key_of_callers_is_equal_for_the_same_lines_only() -> None:
    """Not for two calls in one function, from which the ring has two paths."""
    finder = SiteFinder(torch=TORCH)
    found: list[Any] = []
    inner = "def inner():\n    keep(find(get_frame())[1])\n"
    code = f"{inner}def outer():\n    for _ in 'ab':\n        inner()\n    inner()\nouter()"
    names = {"keep": found.append, "find": finder.callers, "get_frame": sys._getframe}
    exec(compile(code, "/a.py", "exec"), names)
    assert found[0] == found[1] != found[2]


def test_a_script_itself_has_no_callers() -> None:
    """The code that runs it is not the user's."""
    finder = SiteFinder(torch=TORCH)
    found: list[Any] = []
    exec(
        compile("keep(find(get_frame()))", "/a.py", "exec"),
        {"keep": found.append, "find": finder.callers, "get_frame": sys._getframe},
    )
    assert found == [([], ())]
