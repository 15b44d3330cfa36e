# SPDX-License-Identifier: Apache-2.0
"""A destroyed group, and the end of a process, leave gloo's threads time on every rank, however it was started."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ddpilot import Session
from tests.dist.group.ending import END
from tests.dist.launching.scripts import run_script
from tests.dist.run.commands import environment
from tests.soak import often

pytestmark = pytest.mark.usefixtures("collects_at_exit")

DESTROY = """
import time, weakref
import torch.distributed as dist
if not dist.is_initialized():
    dist.init_process_group("gloo")
group, was_there = weakref.ref(dist.group.WORLD), []
sleep = time.sleep
def note(_seconds):
    was_there.append(group() is not None)
time.sleep = note
dist.destroy_process_group()
time.sleep = sleep
"""
"""Notes at each pause whether the group's destructor is still to come."""

TELL = f"{DESTROY}print('paused', bool(was_there) and all(was_there))\n"
RUN = ("-m", "ddpilot", "run", "-n", "1")
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "1")
ENABLE = "import ddpilot.watch\nddpilot.watch.enable()\n"
ENTER = "import ddpilot\nimport torch\ntorch.distributed.init_process_group('gloo')\nddpilot.init_group()\n"


@pytest.fixture
def session() -> Iterator[Session]:
    """A session of one rank."""
    with Session(1) as started:
        yield started


@pytest.mark.timeout(120)
@often("run", "torchrun-enable")
@pytest.mark.parametrize(
    ("module", "head"),
    [(RUN, ""), ((*RUN, "--no-watch"), ""), (TORCHRUN, ENABLE)],
    ids=["run", "run-unwatched", "torchrun-enable"],
)
def test_a_scripts_destroyed_group_waits_for_its_threads(module: tuple[str, ...], head: str, tmp_path: Path) -> None:
    """Under `ddpilot run`, watched or not, and where a script of torchrun's asks to be watched."""
    done = run_script(head + TELL, tmp_path, forks_ranks=False, module=module, env=environment(TMPDIR=str(tmp_path)))
    assert "paused True" in done.out


@pytest.mark.timeout(120)
@often("run-unwatched", "torchrun-adopted")
@pytest.mark.parametrize(
    ("module", "head"),
    [(RUN, ""), ((*RUN, "--no-watch"), ""), (TORCHRUN, ENABLE), (TORCHRUN, ENTER)],
    ids=["run", "run-unwatched", "torchrun-enable", "torchrun-adopted"],
)
def test_a_script_that_leaves_its_group_in_use_ends_when_its_threads_are_done(
    module: tuple[str, ...], head: str, tmp_path: Path
) -> None:
    """Else Python ends a thread of gloo's that still drops its tensors, which aborts the process."""
    done = run_script(head + END, tmp_path, forks_ranks=False, module=module, env=environment(TMPDIR=str(tmp_path)))
    assert "paused" in done.out.partition("the end")[2]


@pytest.mark.timeout(120)
def test_a_sessions_destroyed_group_waits_for_its_threads(session: Session) -> None:
    """Also when a cell destroys the group that the session entered."""
    session.execute("import torch.distributed as dist\ndist.barrier()")
    session.execute(f"{DESTROY}assert was_there and all(was_there)")
