# SPDX-License-Identifier: Apache-2.0
"""A rank dies: its cause is named, it is restarted under the same number, the others keep their variables."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable

import psutil
import pytest

from ddpilot import LaunchError, RankError, Session
from tests.dist.launching.scripts import wait_until
from tests.dist.session.conftest import MODEL, Kept
from tests.soak import often

Start = Callable[..., Session]


@often("killed", "crashed")  # of each other end, the words are tested with the function that finds them
@pytest.mark.parametrize(
    ("how", "found"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "rank 1 was killed by SIGKILL; the kernel's OOM killer"),
        ("ctypes.string_at(0)", r"rank 1 crashed with SIGSEGV at .*Cell In\[2\]:3"),
        ("os.abort()", r"rank 1 was aborted \(SIGABRT\)"),
        ("os._exit(7)", "rank 1 exited with code 7"),
    ],
    ids=["killed", "crashed", "aborted", "exited"],
)
def test_a_death_is_named_and_restart_brings_the_rank_back(start: Start, view: Kept, how: str, found: str) -> None:
    """Under the same number, in the same group, while the other ranks keep their variables."""
    session = start(3)
    session.execute("import torch; kept = rank * 10; group.barrier()")
    with pytest.raises(RankError, match=found):
        session.execute(f"import os, signal, ctypes\nif rank == 1:\n    {how}\ngroup.barrier()")
    session.execute("print(kept)")
    assert view.texts == {0: "0\n", 2: "20\n"}
    assert re.fullmatch(
        r"rank 1 is dead \(it (was|crashed|exited) .*\): this cell runs on ranks 0,2; "
        "`%ddp restart 1` brings it back",
        view.notes[-1],
    )
    with pytest.raises(LaunchError, match="rank 1 is dead"):
        session.execute("1", ranks=[1])
    with pytest.raises(RankError, match="rank 1 is dead; restart it"):
        session.execute("group.barrier()")
    session.restart(1)
    session.execute("import torch; total = torch.ones(1); group.all_reduce(total); assert total.item() == 3")
    session.execute("assert 'kept' not in globals() and rank == 1", ranks=[1])
    num_notes = len(view.notes)
    session.execute("assert kept == rank * 10", ranks=[0, 2])
    session.execute("1")
    assert len(view.notes) == num_notes


@pytest.mark.parametrize("code", ["import time; time.sleep(60)", "if rank == 0: group.barrier()\nwhile True: pass"])
def test_the_end_of_the_store_ends_the_cell_and_is_named(start: Start, code: str) -> None:
    """No rank can enter a group any more; variables are kept, and a later collective is refused at once."""
    session = start(2)
    session.execute("kept = rank")
    servers = {process.ppid() for process in map(psutil.Process, session.pids().values())}
    pids = set(session.pids().values())
    (store,) = [child for server in servers for child in psutil.Process(server).children() if child.pid not in pids]
    timer = threading.Timer(0.5, store.kill)
    timer.start()
    began_s = time.monotonic()
    with pytest.raises(LaunchError, match=r"the session's store ended \(it was killed by SIGKILL\): no process group"):
        session.execute(code)
    timer.join()
    with pytest.raises(RankError, match="the session's store ended"):
        session.execute("group.barrier()")
    assert time.monotonic() - began_s < 25
    assert session.pull("kept") == [0, 1]


def test_a_death_between_cells_is_reported_when_it_happens(start: Start, view: Kept) -> None:
    """Without running a cell."""
    session = start(2)
    os.kill(session.pull("__import__('os').getpid()", rank=1), signal.SIGKILL)
    wait_until(lambda: any("rank 1 was killed by SIGKILL" in note for note in view.notes), limit_s=10)
    assert session.pull("rank", rank=0) == 0
    session.restart(1)
    session.execute("group.barrier()")


def test_respawn_brings_a_dead_rank_back_by_itself(start: Start, view: Kept) -> None:
    """In the cell in which it died, or before the next one."""
    session = start(2, respawn=True)
    session.execute("kept = rank; group.barrier()")
    with pytest.raises(RankError, match="SIGKILL"):
        session.execute("import os\nif rank == 1: os.kill(os.getpid(), 9)\ngroup.barrier()")
    assert any("rank 1 restarted (`respawn`), with no variables" in note for note in view.notes)
    session.execute("group.barrier(); assert ('kept' in globals()) == (rank == 0)")
    os.kill(session.pull("__import__('os').getpid()", rank=0), signal.SIGKILL)
    wait_until(lambda: any("rank 0 was killed" in note for note in view.notes), limit_s=10)
    session.execute("group.barrier()")


def test_restart_of_all_ranks_starts_over(start: Start) -> None:
    """No variable is left, and the group is entered again; also if all ranks were dead."""
    session = start(2)
    session.execute(MODEL)
    session.restart()
    session.execute("assert 'model' not in globals(); group.barrier()")
    with pytest.raises(RankError):
        session.execute("import os; os._exit(1)")
    session.restart()
    session.execute("group.barrier()")


def test_after_a_restart_of_all_ranks_the_user_enters_the_group_again(start: Start) -> None:
    """Restart and run from the top: fresh ranks are as after the start, in no group."""
    session = start(2)
    enter = (
        "import torch, torch.distributed as dist\ndist.init_process_group('gloo')\n"
        "total = torch.ones(1)\ndist.all_reduce(total)"
    )
    session.execute(enter)
    session.restart()
    session.execute(enter)
    assert session.pull("total.item()") == [2.0, 2.0]
    session.restart()
    session.execute("group.barrier()")


def test_a_model_that_is_missing_on_a_restarted_rank_is_reported(start: Start, view: Kept) -> None:
    """The other ranks still have theirs: the next step would hang."""
    session = start(2)
    session.execute(MODEL)
    session.restart(1)
    said = "\n".join(view.notes)
    assert "the ranks have different numbers of DDP models" in said
    assert "run the cells that create the models again" in said


def test_a_dead_rank_is_named_as_the_cause_of_what_follows(start: Start) -> None:
    """A model bound to the old group fails with a connection error, which alone says nothing."""
    session = start(2)
    session.execute(MODEL)
    with pytest.raises(RankError, match="SIGKILL"):
        session.execute("import os\nif rank == 1: os.kill(os.getpid(), 9)\ngroup.barrier()")
    with pytest.raises(RankError, match=r"rank 0 needed rank 1, which is dead \(it was killed by SIGK") as caught:
        session.execute("step()")
    assert "`%ddp restart 1` brings it back" in str(caught.value)


def test_what_follows_from_a_dead_rank_is_no_difference_between_the_others(start: Start) -> None:
    """DDP's broadcast has finished on some ranks only when one dies: they then wait in different collectives."""
    session = start(4)
    session.execute(MODEL + "step()\nimport os")
    with pytest.raises(RankError, match="SIGKILL"):
        session.execute("if rank == 1: os.kill(os.getpid(), 9)\nstep()")
    with pytest.raises(RankError, match=r"rank \d needed rank 1, which is dead \(it was killed by") as caught:
        session.execute("step()")
    assert not caught.value.findings, caught.value


def test_the_end_of_the_rank_server_ends_all_ranks_and_is_reported(start: Start, view: Kept) -> None:
    """Nothing hangs, and a new session can be started."""
    from ddpilot.launching.rank_server.client import server_pids

    session = start(2)
    for pid in server_pids():
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: session.pids() == {}, limit_s=10)
    wait_until(lambda: bool(view.notes), limit_s=10)
    (note,) = view.notes
    assert note == (
        "the rank server has died: all ranks and their variables are lost; "
        "`%ddp stop`, then `%ddp start` (a new `Session`) starts from scratch"
    )
    with pytest.raises(LaunchError, match="is dead: it ended with the rank server.*`%ddp stop`, then") as caught:
        session.execute("1")
    assert "restart" not in str(caught.value)
    with pytest.raises(LaunchError, match="the rank server has died"):
        session.restart()
    session.stop()
    start(2).execute("group.barrier()")


def test_stop_is_quick_while_ranks_are_dead(start: Start) -> None:
    """It does not wait for those."""
    session = start(2)
    with pytest.raises(RankError):
        session.execute("import os; os._exit(1)")
    began_s = time.monotonic()
    session.stop()
    assert time.monotonic() - began_s < 5.0
