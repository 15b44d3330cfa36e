# SPDX-License-Identifier: Apache-2.0
"""Functions of a script or a cell that a decorator wrapped, and launches in odd surroundings."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpilot import Launcher, LaunchError
from tests.dist.launching.scripts import is_alive, run_script, wait_until
from tests.soak import often

SCRIPT = """
import functools
import torch
import ddpilot

@ddpilot.rank_zero_only
def on_zero():
    return 5

@ddpilot.on_ranks(1, broadcast=True)
def on_one():
    return 7

@functools.cache
def cached(x):
    return x + 1

@functools.lru_cache(maxsize=3)
def twice(x):
    return cached(x), cached(x)

class TwoError(Exception):
    def __init__(self, first, second):
        super().__init__(first)
        self.second = second

@torch.compile
def compiled(x):
    return x * 2

def train():
    with ddpilot.init_group():
        return on_zero(), on_one(), twice(3), twice.cache_parameters()["maxsize"]

def fail():
    raise TwoError("one", "two")

print(list(ddpilot.launch(train, nproc_per_node=2)))
returned = ddpilot.launch(lambda: (cached, on_zero), nproc_per_node=1)[0]
print(returned[0] is cached, returned[1] is on_zero)
try:
    ddpilot.launch(fail, nproc_per_node=2)
except ddpilot.RankError as error:
    print(type(error.__cause__) is TwoError, error.__cause__.second)
try:
    ddpilot.launch(lambda: compiled(torch.ones(1)), nproc_per_node=1)
except ddpilot.ShipError as error:
    print(error.path, error.fix)
"""


def test_launch_takes_functions_that_decorators_of_a_module_wrapped(tmp_path: Path) -> None:
    """`functools.wraps` sets their module to `__main__`, but their globals are a module's, which stay there."""
    assert run_script(SCRIPT, tmp_path).out.splitlines() == [
        "[(5, 7, (4, 4), 3), (None, 7, (4, 4), 3)]",
        "True True",
        "True two",
        "fn.globals['compiled'] Leave it out, or make it on each rank, inside the function: call `torch.compile` there",
    ]


@often(">&- 2>&-")
@pytest.mark.parametrize("closed", [">&- 2>&-", ">&-", "2>&-"])
def test_launch_works_where_the_parent_has_no_stdout_or_stderr(tmp_path: Path, closed: str) -> None:
    """A service may have closed them; Python has None for the stream then."""
    source = (
        "import pathlib, ddpilot\n"
        "def f():\n    print('to nobody')\n    return 4\n"
        "pathlib.Path('result').write_text(str(ddpilot.launch(f, nproc_per_node=1)[0]))\n"
    )
    run_script(source, tmp_path, prefix=("sh", "-c", f'exec "$@" {closed}', "sh"))
    assert (tmp_path / "result").read_text() == "4"


def rank_of_many() -> str:
    """What each of many ranks returns."""
    import os

    return os.environ["RANK"]


def test_launch_starts_more_ranks_than_wait_for_an_answer() -> None:
    """18 ranks; the parent never has more than 16 requests under way, so no socket fills up (280 hung for ever)."""
    launcher = Launcher(nproc_per_node=18, output="silent", watch=False)
    assert list(launcher.run(rank_of_many)) == [str(rank) for rank in range(18)]


def test_launch_refuses_a_million_ranks_at_once() -> None:
    """A slip of the finger costs a sentence, not the machine."""
    with pytest.raises(LaunchError, match="from 1 to 1024"):
        Launcher(nproc_per_node=10**6)


def leave_a_daemon_and_kill_the_server(where: str) -> None:
    """Start a process in a new session, write its pid, and kill the server as the kernel's OOM killer would."""
    import os
    import signal
    import subprocess
    import time

    daemon = subprocess.Popen(["sleep", "600"], start_new_session=True)
    Path(where).write_text(str(daemon.pid))
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)


def test_launch_leaves_nothing_when_the_server_is_killed(tmp_path: Path) -> None:
    """The ranks die with it; what they had started in a session of its own is found by the launch's mark."""
    with pytest.raises(LaunchError, match="the rank server ended"):
        Launcher(nproc_per_node=1).run(leave_a_daemon_and_kill_the_server, str(tmp_path / "pid"))
    daemon = int((tmp_path / "pid").read_text())
    wait_until(lambda: not is_alive(daemon), limit_s=5)
