# SPDX-License-Identifier: Apache-2.0
"""A session whose ranks run on two hosts, reached over ssh: the same verbs as on one machine, and lost hosts."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from ddpilot import LaunchError, RankError, Session, WatchError
from tests.dist.launching.scripts import wait_until
from tests.dist.nodes.ssh_server import HOSTS, SshServer
from tests.dist.session.conftest import Kept
from tests.soak import often

Start = Callable[..., Session]


@pytest.fixture(autouse=True)
def ssh(server: SshServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sessions of the test reach the server; nothing that they started through it is left after it."""
    monkeypatch.setenv("DDPILOT_SSH", server.command)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield
    wait_until(lambda: not server.hosts(), limit_s=10)


@pytest.fixture
def view() -> Kept:
    """The view of `start`'s sessions."""
    return Kept()


@pytest.fixture
def start(view: Kept) -> Iterator[Start]:
    """Start sessions on both hosts; they are stopped after the test."""
    sessions: list[Session] = []

    def begin(nproc_per_node: int = 1, **options: object) -> Session:
        sessions.append(Session(nproc_per_node, hosts=HOSTS, view=view, **options))  # type: ignore[arg-type]
        return sessions[-1]

    yield begin
    for session in sessions:
        session.stop()


def test_cells_share_a_group_over_hosts_and_keep_variables_after_an_error(start: Start, view: Kept) -> None:
    """Ranks are numbered host by host; an error on one rank is shown within a second, and the group is rebuilt."""
    session = start(2)
    session.execute(
        "import os, torch, torch.distributed as dist\n"
        "print(rank, os.environ['LOCAL_RANK'], os.environ['LOCAL_WORLD_SIZE'], os.environ['GROUP_RANK'])"
    )
    assert view.texts == {0: "0 0 2 0\n", 1: "1 1 2 0\n", 2: "2 0 2 1\n", 3: "3 1 2 1\n"}
    session.execute("total = torch.ones(1) * rank; dist.all_reduce(total)")
    assert session.pull("total.item()") == [6.0] * 4
    began_s = time.monotonic()
    with pytest.raises(RankError, match=r"rank 3 raised ValueError: odd") as raised:
        session.execute("if rank == 3: raise ValueError('odd')\ndist.all_reduce(torch.ones(1))")
    assert raised.value.rank == 3
    assert view.times_s[0] - began_s < 2.0  # 0.1 s on a machine that does nothing else
    session.execute("again = total * 0 + 1; dist.all_reduce(again)")
    assert session.pull("(total.item(), again.item())") == [(6.0, 4.0)] * 4


@often("silent")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "silent"])
def test_a_lost_host_is_named_with_its_ranks(start: Start, server: SshServer, number: signal.Signals) -> None:
    """Within five seconds; the ranks of the other host keep their variables."""
    session = start(2)
    session.execute("import time; kept = rank")
    by_pid = {each.pid: each for each in server.hosts()}
    victim = by_pid[psutil.Process(session.status()[2].pid).parent().parent().pid]  # type: ignore[union-attr]
    started_s: list[float] = []

    def lose() -> None:
        started_s.append(time.monotonic())
        victim.send_signal(number)

    threading.Timer(0.5, lose).start()
    with pytest.raises(RankError, match=r"ranks 2,3 were lost with node node2, which") as error:
        session.execute("time.sleep(60)")
    assert time.monotonic() - started_s[0] < 8.0
    assert error.value.rank in (2, 3)
    reasons = [each.reason for each in session.status()]
    assert [reason == "" for reason in reasons] == [True, True, False, False]
    assert session.pull("kept", rank=1) == 1
    if number == signal.SIGSTOP:
        victim.send_signal(signal.SIGCONT)
    session.restart((2, 3))
    session.execute("import torch, torch.distributed as dist; x = torch.ones(1); dist.all_reduce(x)")
    assert session.pull("(x.item(), 'kept' in globals())") == [(4.0, True)] * 2 + [(4.0, False)] * 2


def test_the_watch_compares_ranks_of_different_hosts(start: Start, view: Kept) -> None:
    """Rank 0 calls another collective than rank 1, in a cell that would hang: it is found, and the group rebuilt."""
    session = start(on_finding="stop")
    session.execute("import torch, torch.distributed as dist; dist.barrier()")
    with pytest.raises(WatchError, match=r"all_reduce(.|\n)*broadcast|broadcast(.|\n)*all_reduce"):
        session.execute("x = torch.ones(4)\nif rank == 0: dist.all_reduce(x)\nelse: dist.broadcast(x, 0)")
    session.execute("x = torch.ones(1); dist.all_reduce(x)")
    assert session.pull("x.item()") == [2.0, 2.0]


def test_a_hang_is_explained_with_the_line_of_the_rank_that_is_missing(start: Start, view: Kept) -> None:
    """The stack of rank 1 comes from its host."""
    session = start(stall_warn_s=2)
    session.execute("import time, torch, torch.distributed as dist; dist.barrier()")
    session.execute(
        "x = torch.ones(1)\nif rank == 0:\n    dist.all_reduce(x)\nelse:\n    time.sleep(9)\n    dist.all_reduce(x)"
    )
    text = "\n".join(view.notes)
    assert "all_reduce" in text
    assert "rank 1" in text
    assert "time.sleep(9)" in text or "Cell In[2]:5" in text


def test_nothing_is_left_when_the_notebook_is_killed(server: SshServer, tmp_path: Path) -> None:
    """The hosts see their connections end, and end their ranks."""
    script = tmp_path / "notebook.py"
    script.write_text(
        textwrap.dedent(
            f"""
            from ddpilot import Session
            session = Session(2, hosts={HOSTS!r})
            print(*[each.pid for each in session.status()], flush=True)
            session.execute("import time; time.sleep(1000)")
            """
        )
    )
    notebook = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert notebook.stdout is not None
    pids = [int(word) for word in notebook.stdout.readline().split()]
    assert len(pids) == 4
    notebook.kill()
    notebook.wait(10)
    notebook.stdout.close()
    wait_until(lambda: not any(map(psutil.pid_exists, pids)), limit_s=10)
    wait_until(lambda: not server.processes(), limit_s=10)


def test_a_host_that_cannot_be_reached_is_named(server: SshServer) -> None:
    """With what ssh says, and nothing is left on the other one."""
    with pytest.raises(LaunchError, match=r"node nowhere\.invalid: its host process did not start: ssh exited with"):
        Session(1, hosts=["node1", "nowhere.invalid"])
    wait_until(lambda: not server.hosts(), limit_s=10)


def test_no_port_is_open_besides_those_of_the_group(start: Start, server: SshServer) -> None:
    """Neither this process nor a host listens; kernels use Unix sockets in a folder that only the user can enter."""
    start()
    processes = [psutil.Process(), *server.hosts()]
    for process in processes:
        listening = [each for each in process.net_connections(kind="inet") if each.status == psutil.CONN_LISTEN]
        assert listening == []
    for process in server.processes():
        assert not any("key" in word.lower() for word in process.cmdline()[2:])
