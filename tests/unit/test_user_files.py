# SPDX-License-Identifier: Apache-2.0
"""The one definition of the user's files, and that everything which names a line goes by it."""

from __future__ import annotations

import os

import pytest

import ddpilot
from ddpilot.launching.first_failure import find_crash_line, find_raised_line
from ddpilot.record.call_sites import USER, SiteFinder
from ddpilot.user_files import CodeLine, is_users
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
