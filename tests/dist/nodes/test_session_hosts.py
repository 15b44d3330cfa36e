# SPDX-License-Identifier: Apache-2.0
"""A session whose ranks run on two hosts, reached over ssh: the same verbs as on one machine, and lost hosts."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from ddpilot import LaunchError, LaunchInterrupted, RankError, Session, WatchError
from tests.dist.launching.scripts import wait_until
from tests.dist.nodes.ssh_server import SshServer, ssh_server
from tests.dist.session.conftest import MODEL, Kept
from tests.soak import often

HOSTS = ("node1", "node2")
Start = Callable[..., Session]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshServer]:
    """The sshd of this file's tests."""
    with ssh_server(tmp_path_factory.mktemp("ssh")) as server:
        yield server


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


def test_output_of_every_kind_arrives_before_its_cell_ends(start: Start, view: Kept) -> None:
    """Results, streams, and bytes that bypass Python."""
    session = start()
    session.execute("import os\nprint('out'); os.write(1, b'from C\\n'); os.system('echo child')\n6 * 7")
    for rank in range(2):
        assert view.results()[rank] == "42"
        assert view.texts[rank] == "out\n"
        assert {b"from C", b"child"} <= set(view.raws[rank].splitlines())


def test_stop_frees_ranks_of_both_hosts_from_a_collective(start: Start, view: Kept) -> None:
    """The stop button; variables are kept, and the next cell works."""
    session = start()
    session.execute("import torch, torch.distributed as dist, time\nkept = 5; dist.barrier()")
    threading.Timer(1.0, session.interrupt).start()
    began_s = time.monotonic()
    with pytest.raises(LaunchInterrupted):
        session.execute("if rank == 0: dist.all_reduce(torch.ones(1))\nelse: time.sleep(100)")
    assert time.monotonic() - began_s < 8
    session.execute("x = torch.ones(1); dist.all_reduce(x)")
    assert session.pull("x.item() + kept") == [7.0, 7.0]


def test_functions_values_and_models_travel(start: Start) -> None:
    """`run`, `push` and `pull`, also of values that are larger than a frame of any kind."""
    session = start()
    assert list(session.run(lambda base: base + int(os.environ["RANK"]), 10)) == [10, 11]
    session.push({"numbers": list(range(1000)), "blob": b"x" * (8 << 20)})
    assert session.pull("(sum(numbers), len(blob))") == [(499500, 8 << 20)] * 2
    assert session.pull("blob", rank=1) == b"x" * (8 << 20)
    with pytest.raises(LaunchError, match="no variable of that name"):
        session.pull("nothing")
    with pytest.raises(RankError) as error:
        session.run(lambda: 1 // 0)
    assert isinstance(error.value.__cause__, ZeroDivisionError)


def test_status_and_stacks_name_the_hosts(start: Start) -> None:
    """While a cell waits in a collective on one rank and sleeps on the other."""
    session = start()
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
        assert zero.collective.site == "Cell In[2]:1"
        assert zero.pid is not None
        assert one.memory_bytes is not None
        assert "Cell In[2]" in session.stacks()[1]
    finally:
        cell.join(30)


def test_a_dead_rank_is_restarted_on_its_host(start: Start, view: Kept) -> None:
    """Its variables are gone, those of the other rank are kept, and the group has both again."""
    session = start()
    session.execute("import os, signal, torch, torch.distributed as dist\nkept = 1; dist.barrier()")
    with pytest.raises(RankError, match="rank 1"):
        session.execute("if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ndist.barrier()")
    session.restart(1)
    session.execute("import torch, torch.distributed as dist\nx = torch.ones(1); dist.all_reduce(x)")
    assert session.pull("(x.item(), 'kept' in globals())") == [(2.0, True), (2.0, False)]


def test_a_trained_model_survives_a_failed_cell(start: Start) -> None:
    """DDP over both hosts: bound to the new group, equal on both."""
    session = start()
    session.execute(MODEL)
    session.execute("step()")
    with pytest.raises(RankError):
        session.execute("if rank == 0: raise KeyError\nstep()")
    session.execute("step()")
    first, second = session.pull("[p.sum().item() for p in model.parameters()]")
    assert first == second


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


def test_a_short_cell_takes_milliseconds(start: Start) -> None:
    """Median of `1 + 1`; the bar on a machine that does nothing else is 25 ms."""
    session = start(2)
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


def test_a_cell_is_profiled_on_ranks_of_other_machines(start: Start) -> None:
    """What they record is fetched into a folder of this machine, and nothing is left on theirs."""
    session = start()
    result = session.execute(PROFILED, profile=True)
    assert result.profile is not None, result.no_profile
    assert len(result.profile.facts) == 2
    assert list(Path(tempfile.gettempdir()).glob("ddpilot-profile-*")) == []
    with pytest.raises(RankError, match="ValueError"):
        session.execute("raise ValueError", profile=True)
    assert list(Path(tempfile.gettempdir()).glob("ddpilot-profile-*")) == []
