# SPDX-License-Identifier: Apache-2.0
"""Cells that fail or are stopped while a rank forks or has workers of a `DataLoader`."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from ddpilot import LaunchInterrupted, RankError, Session
from tests.dist.session.conftest import pressing_stop

Start = Callable[..., Session]

DATA = """
import os, signal, sys, time, torch
class Data(torch.utils.data.Dataset):
    def __len__(self): return 10_000
    def __getitem__(self, index):
        time.sleep(0.02)
        if index == 5: raise ValueError("bad sample")
        return index
"""


def test_a_stop_during_a_fork_comes_as_soon_as_that_is_done(start: Start) -> None:
    """Functions that libraries run at a fork cannot raise: Python prints the exception and goes on, and it is lost."""
    session = start(1)
    session.execute(
        "import signal, time\nhandler = signal.getsignal(signal.SIGINT)\nhandler._begin()\n"
        "signal.raise_signal(signal.SIGINT)\nheld = True\nhandler._end()\n"
        "try: time.sleep(5); came = False\nexcept KeyboardInterrupt: came = True"
    )
    assert session.pull("held, came", rank=0) == (True, True)


def test_a_stop_outside_a_fork_comes_at_once(start: Start) -> None:
    """After a fork too, in the process that forked and in the one that was made."""
    session = start(1)
    session.execute(
        "import os, signal\ndef stop():\n    try: signal.raise_signal(signal.SIGINT)\n"
        "    except KeyboardInterrupt: return 7\n    return 0\n"
        "pid = os.fork()\nif pid == 0: os._exit(stop())\n"
        "ends = stop(), os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])"
    )
    assert session.pull("ends", rank=0) == (7, 7)


@pytest.mark.parametrize("is_stopped", [False, True], ids=["failure", "stop"])
def test_a_cell_works_at_once_after_one_with_workers(start: Start, is_stopped: bool) -> None:
    """The interrupted iteration ends its workers; collected as a cycle it would wait five seconds for each of them."""
    session = start(2)
    session.execute(DATA)
    first = 6 if is_stopped else 0
    loop = f"for _ in torch.utils.data.DataLoader(Data(), num_workers=1, sampler=range({first}, 10_000)): pass"
    with pressing_stop(*[1.0] * is_stopped), pytest.raises((RankError, LaunchInterrupted)) as caught:
        session.execute(loop)
    assert ("bad sample" in str(caught.value)) != is_stopped
    began_s = time.monotonic()
    session.execute("import psutil\nassert not psutil.Process().children()")
    assert time.monotonic() - began_s < 2.5
