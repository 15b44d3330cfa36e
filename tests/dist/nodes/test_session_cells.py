# SPDX-License-Identifier: Apache-2.0
"""A session on two hosts that are reached over ssh does what one on this machine does, one test after the other."""

from __future__ import annotations

import os
import re
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddpilot import LaunchError, LaunchInterrupted, RankError, Session
from tests.dist.launching.scripts import wait_until
from tests.dist.nodes.ssh_server import HOSTS, SshServer
from tests.dist.session.conftest import MODEL, Kept, forget_variables, remember_names
from tests.preload import OF_SESSIONS


@pytest.fixture(scope="module")
def view() -> Kept:
    """The view of the session."""
    return Kept()


@pytest.fixture(scope="module")
def lasting(server: SshServer, view: Kept) -> Iterator[Session]:
    """One rank on each host; to start them takes 4 CPU seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DDPILOT_SSH", server.command)
        patch.setenv("OMP_NUM_THREADS", "1")
        with Session(1, hosts=HOSTS, view=view, preload=OF_SESSIONS) as session:
            remember_names(session)
            yield session
        wait_until(lambda: not server.hosts(), limit_s=10)


@pytest.fixture
def session(lasting: Session, view: Kept) -> Session:
    """The session, without the variables and the output of earlier tests."""
    forget_variables(lasting)
    view.forget()
    return lasting


def test_output_of_every_kind_arrives_before_its_cell_ends(session: Session, view: Kept) -> None:
    """Results, streams, and bytes that bypass Python."""
    session.execute("import os\nprint('out'); os.write(1, b'from C\\n'); os.system('echo child')\n6 * 7")
    for rank in range(2):
        assert view.results()[rank] == "42"
        assert view.texts[rank] == "out\n"
        assert {b"from C", b"child"} <= set(view.raws[rank].splitlines())


def test_stop_frees_ranks_of_both_hosts_from_a_collective(session: Session, view: Kept) -> None:
    """The stop button; variables are kept, and the next cell works."""
    session.execute("import torch, torch.distributed as dist, time\nkept = 5; dist.barrier()")
    threading.Timer(1.0, session.interrupt).start()
    began_s = time.monotonic()
    with pytest.raises(LaunchInterrupted):
        session.execute("if rank == 0: dist.all_reduce(torch.ones(1))\nelse: time.sleep(100)")
    assert time.monotonic() - began_s < 8
    session.execute("x = torch.ones(1); dist.all_reduce(x)")
    assert session.pull("x.item() + kept") == [7.0, 7.0]


def test_functions_values_and_models_travel(session: Session) -> None:
    """`run`, `push` and `pull`, also of values that are larger than a frame of any kind."""
    assert list(session.run(lambda base: base + int(os.environ["RANK"]), 10)) == [10, 11]
    session.push({"numbers": list(range(1000)), "blob": b"x" * (8 << 20)})
    assert session.pull("(sum(numbers), len(blob))") == [(499500, 8 << 20)] * 2
    assert session.pull("blob", rank=1) == b"x" * (8 << 20)
    with pytest.raises(LaunchError, match="no variable of that name"):
        session.pull("nothing")
    with pytest.raises(RankError) as error:
        session.run(lambda: 1 // 0)
    assert isinstance(error.value.__cause__, ZeroDivisionError)


def test_status_and_stacks_name_the_hosts(session: Session) -> None:
    """While a cell waits in a collective on one rank and sleeps on the other."""
    session.execute("import time, torch, torch.distributed as dist; dist.barrier()")
    cell = threading.Thread(
        target=lambda: session.execute(
            "if rank == 0: dist.all_reduce(torch.ones(1))\nelse:\n  time.sleep(4)\n  dist.all_reduce(torch.ones(1))"
        )
    )
    cell.start()
    try:
        wait_until(lambda: any(each.collective is not None for each in session.status()), limit_s=20)
        zero, one = session.status()
        assert (zero.node, one.node) == HOSTS
        assert zero.collective is not None
        assert zero.collective.op == "all_reduce"
        assert re.fullmatch(r"Cell In\[\d+\]:1", zero.collective.site)
        assert zero.pid is not None
        assert one.memory_bytes is not None
        assert "Cell In[" in session.stacks()[1]
    finally:
        cell.join(30)


def test_a_trained_model_survives_a_failed_cell(session: Session) -> None:
    """DDP over both hosts: bound to the new group, equal on both."""
    session.execute(MODEL)
    session.execute("step()")
    with pytest.raises(RankError):
        session.execute("if rank == 0: raise KeyError\nstep()")
    session.execute("step()")
    first, second = session.pull("[p.sum().item() for p in model.parameters()]")
    assert first == second


def test_a_short_cell_takes_milliseconds(session: Session) -> None:
    """Median of `1 + 1`; the bar on a machine that does nothing else is 25 ms."""
    durations_s = [session.execute("1 + 1", quiet=True).duration_s for _ in range(40)]
    assert statistics.median(durations_s) < 0.25


PROFILED = """
from torch.nn.parallel import DistributedDataParallel
import ddpilot, torch
ddpilot.init_group("gloo") if not torch.distributed.is_initialized() else None
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(20):
    optimizer.zero_grad()
    model(torch.ones(8, 4)).sum().backward()
    optimizer.step()
"""


def test_a_cell_is_profiled_on_ranks_of_other_machines(session: Session) -> None:
    """What they record is fetched into a folder of this machine, and nothing is left on theirs."""
    result = session.execute(PROFILED, profile=True)
    assert result.profile is not None, result.no_profile
    assert len(result.profile.facts) == 2
    assert list(Path(tempfile.gettempdir()).glob("ddpilot-profile-*")) == []
    with pytest.raises(RankError, match="ValueError"):
        session.execute("raise ValueError", profile=True)
    assert list(Path(tempfile.gettempdir()).glob("ddpilot-profile-*")) == []


def test_a_dead_rank_is_restarted_on_its_host(session: Session, view: Kept) -> None:
    """Its variables are gone, those of the other rank are kept, and the group has both again."""
    session.execute("import os, signal, torch, torch.distributed as dist\nkept = 1; dist.barrier()")
    with pytest.raises(RankError, match="rank 1"):
        session.execute("if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ndist.barrier()")
    session.restart(1)
    session.execute("import torch, torch.distributed as dist\nx = torch.ones(1); dist.all_reduce(x)")
    assert session.pull("(x.item(), 'kept' in globals())") == [(2.0, True), (2.0, False)]
