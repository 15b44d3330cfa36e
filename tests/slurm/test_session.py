# SPDX-License-Identifier: Apache-2.0
"""Sessions on the nodes of a real Slurm: from a login node, inside a job, with lost nodes and notebooks."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ddpilot import LaunchError, LaunchInterrupted, RankError, Session
from ddpilot.session.nodes import tls
from tests.dist.launching.scripts import wait_until
from tests.dist.session.conftest import Kept
from tests.slurm.cluster import Cluster
from tests.soak import often, soak

Start = Callable[..., Session]


@pytest.fixture
def view() -> Kept:
    """The view of `start`'s sessions."""
    return Kept()


@pytest.fixture
def start(cluster: Cluster, view: Kept, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start sessions by Slurm; they are stopped after the test."""
    for name, value in cluster.variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    sessions: list[Session] = []

    def begin(nproc_per_node: int | str = "auto", **options: object) -> Session:
        sessions.append(Session(nproc_per_node, slurm=True, view=view, **options))  # type: ignore[arg-type]
        return sessions[-1]

    yield begin
    for session in sessions:
        session.stop()


def test_a_login_node_gets_an_allocation_and_gives_it_back(cluster: Cluster, start: Start, view: Kept) -> None:
    """One host per node; ranks are numbered node by node and form a group over the network of the nodes."""
    session = start(nodes=2, gpus_per_node=2, slurm_options={"time": "10", "job-name": "mine"})
    session.execute("import os, torch, torch.distributed as dist\nprint(os.environ['SLURMD_NODENAME'], rank)")
    assert view.texts == {0: "n1 0\n", 1: "n1 1\n", 2: "n2 2\n", 3: "n2 3\n"}
    assert [each.node for each in session.status()] == ["n1", "n1", "n2", "n2"]
    session.execute("x = torch.ones(1) * rank; dist.all_reduce(x)")
    assert session.pull("x.item()") == [6.0] * 4
    assert session.pull("os.environ['MASTER_ADDR']", rank=3) == cluster.addresses["n1"]
    with pytest.raises(RankError, match="rank 2 raised ValueError"):
        session.execute("if rank == 2: raise ValueError\ndist.all_reduce(x)")
    session.execute("y = torch.ones(1); dist.all_reduce(y)")
    jobs = cluster.run("squeue", "--noheader", "--format=%j %l").stdout.split()
    assert jobs == ["mine", "10:00"]
    session.stop()
    wait_until(lambda: not cluster.run("squeue", "--noheader").stdout, limit_s=10)


def test_a_pending_job_is_shown_with_its_reason_and_cancelled_by_an_interrupt(
    cluster: Cluster, start: Start, view: Kept
) -> None:
    """Four of four nodes are busy: the session waits, and says for what."""
    cluster.run("sbatch", "--nodes=4", "--exclusive", "--output=/dev/null", "--wrap=sleep 100")

    def interrupt() -> None:
        wait_until(lambda: any("Resources" in note or "Priority" in note for note in view.notes), limit_s=30)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(LaunchInterrupted):
        start(nodes=2)
    thread.join()
    assert any(re.match(r"waiting for job \d+, which is pending: (Resources|Priority)", note) for note in view.notes)
    wait_until(lambda: cluster.run("squeue", "--noheader", "--format=%j").stdout.split() == ["wrap"], limit_s=10)


def test_an_option_that_slurm_refuses_is_shown(start: Start) -> None:
    """With Slurm's own words."""
    with pytest.raises(LaunchError, match=r"(?s)`salloc` exited with code 1.*[Ii]nvalid"):
        start(nodes=1, slurm_options={"partition": "nowhere"})


def test_inside_a_job_the_hosts_are_a_step_of_it(
    cluster: Cluster, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job is used as it is, and goes on after the session."""
    cluster.run("salloc", "--no-shell", "--nodes=2", "--ntasks-per-node=1")
    job_id = cluster.run("squeue", "--noheader", "--format=%A").stdout.strip()
    monkeypatch.setenv("SLURM_JOB_ID", job_id)
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    with pytest.raises(LaunchError, match=r"3 nodes: this process is in job \d+, which has 2 nodes"):
        start(nodes=3)
    session = start(1)
    session.execute("import os")
    assert session.pull("os.environ['SLURM_JOB_ID']") == [job_id, job_id]
    assert cluster.run("squeue", "--steps", "--noheader", "--format=%j").stdout.split() == ["ddpilot-session"]
    session.stop()
    wait_until(lambda: not cluster.run("squeue", "--steps", "--noheader").stdout, limit_s=10)
    assert cluster.state(job_id) == "RUNNING"


def test_a_cancelled_job_is_the_reason_why_its_ranks_are_lost(cluster: Cluster, start: Start) -> None:
    """By somebody else, while a cell is running."""
    session = start(1, nodes=2, slurm_options={"job-name": "mine"})
    session.execute("import time")
    threading.Timer(0.5, lambda: cluster.run("scancel", "--name=mine")).start()
    with pytest.raises(RankError, match=r"ranks 0,1 were lost: job \d+ was cancelled .*`%ddp stop`, then") as caught:
        session.execute("time.sleep(100)")
    assert caught.value.host == ""


def test_a_job_that_reaches_its_time_limit_is_reported_once(cluster: Cluster, start: Start, view: Kept) -> None:
    """While no cell runs; what starts ranks again is then not proposed, as it cannot."""
    session = start(1, nodes=2)
    job_id = cluster.run("squeue", "--noheader", "--format=%A").stdout.strip()
    cluster.run("scontrol", "update", f"JobId={job_id}", "EndTime=now+1")
    wait_until(lambda: bool(view.notes), limit_s=60)
    with pytest.raises(LaunchError, match=r"rank 0 is dead: it was lost: job \d+ has reached its time limit"):
        session.execute("1")
    with pytest.raises(LaunchError, match=r"starting node n1 again: job \d+ has reached its time limit"):
        session.restart()
    (note,) = view.notes
    assert note == (
        f"job {job_id} has reached its time limit: all ranks and their variables are lost; "
        "`%ddp stop`, then `%ddp start` (a new `Session`) starts from scratch"
    )


@often("cut off")
@pytest.mark.parametrize("is_cut", [True, False], ids=["cut off", "powered off"])
def test_a_lost_node_is_named_and_the_others_keep_their_variables(cluster: Cluster, start: Start, is_cut: bool) -> None:
    """Within five seconds, though no connection was closed."""
    session = start(1, nodes=3)
    session.execute("import time; kept = rank")
    lost_s: list[float] = []

    def lose() -> None:
        lost_s.append(time.monotonic())
        (cluster.cut if is_cut else cluster.kill_node)("n3")

    threading.Timer(0.5, lose).start()
    with pytest.raises(RankError, match="rank 2 was lost with node n3, which has been silent for 4 s"):
        session.execute("time.sleep(100)")
    assert time.monotonic() - lost_s[0] < 8.0
    with pytest.raises(LaunchError, match="starting node n3 again: Slurm (cannot start a step on|reports) it"):
        session.restart()
    assert session.pull("kept", rank=1) == 1
    if is_cut:
        cluster.mend("n3")
        wait_until(
            lambda: "n3" in cluster.run("sinfo", "-hN", "--states=alloc,mixed", "--format=%N").stdout, limit_s=40
        )
        session.restart(2)
        session.execute("import torch, torch.distributed as dist; x = torch.ones(1); dist.all_reduce(x)")
        assert session.pull("x.item()") == [3.0] * 3
    else:  # what a power failure leaves in its node's /tmp
        session.stop()
        for folder in Path(tempfile.gettempdir()).glob("ddpilot-*"):
            shutil.rmtree(folder)


@soak
def test_a_node_whose_rank_server_was_killed_starts_again_for_a_restart(cluster: Cluster, start: Start) -> None:
    """Its ranks have ended with the server; the other ranks keep their variables."""
    session = start(1, nodes=2)
    session.execute("import torch, torch.distributed as dist; kept = rank + 1")
    server_pid = next(pid for pid in cluster.node_pids("n2") if any("serve(" in word for word in _command_line(pid)))
    os.kill(server_pid, signal.SIGKILL)
    with pytest.raises(RankError, match="rank 1 was lost with node n2, which has no rank server any more"):
        session.execute("import time; time.sleep(100)")
    session.restart(1)  # at once, while its host may not have ended yet
    session.execute("import torch, torch.distributed as dist; x = torch.ones(1); dist.all_reduce(x)")
    assert session.pull("x.item()") == [2.0, 2.0]
    assert session.pull("kept", rank=0) == 1


def test_nothing_is_left_when_the_notebook_is_killed(cluster: Cluster, start: Start, tmp_path: Path) -> None:
    """Neither a process on the nodes nor a job."""
    before = {node: len(cluster.node_pids(node)) for node in cluster.nodes}
    script = tmp_path / "notebook.py"
    script.write_text(
        textwrap.dedent(
            """
            from ddpilot import Session
            session = Session(2, slurm=True, nodes=2)
            print("started", flush=True)
            session.execute("import time; time.sleep(1000)")
            """
        )
    )
    notebook = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert notebook.stdout is not None
    assert notebook.stdout.readline() == "started\n"
    notebook.kill()
    notebook.wait(10)
    notebook.stdout.close()
    wait_until(lambda: not cluster.run("squeue", "--noheader").stdout, limit_s=20)
    wait_until(lambda: {node: len(cluster.node_pids(node)) for node in cluster.nodes} == before, limit_s=20)


def test_nobody_else_can_connect(cluster: Cluster, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the session waits for its nodes: not without TLS, not without a key, not with a key of another node."""
    listeners: list[tls.TlsListener] = []
    original = tls.TlsListener.__init__

    def keep(listener: tls.TlsListener, num_nodes: int) -> None:
        original(listener, num_nodes)
        listeners.append(listener)

    monkeypatch.setattr(tls.TlsListener, "__init__", keep)
    cluster.run("sbatch", "--nodes=4", "--exclusive", "--output=/dev/null", "--wrap=sleep 6")
    results: dict[str, bytes] = {}

    def attack() -> None:
        wait_until(lambda: bool(listeners), limit_s=20)
        port = listeners[0].port
        with socket.create_connection(("127.0.0.1", port), timeout=20) as plain:
            plain.sendall(b"GET / HTTP/1.0\r\n\r\n" + b"x" * 100)
            results["plain"] = plain.recv(100)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        for name, proof in (("no key", bytes(36)), ("number of another node", bytes(3) + b"\1" + bytes(32))):
            raw = socket.create_connection(("127.0.0.1", port), timeout=20)
            with context.wrap_socket(raw) as secure:
                secure.sendall(proof)
                try:
                    results[name] = secure.recv(100)
                except OSError:
                    results[name] = b""

    thread = threading.Thread(target=attack)
    thread.start()
    session = start(1, nodes=2)
    thread.join()
    assert {name: data for name, data in results.items() if name != "plain"} == {
        "no key": b"",
        "number of another node": b"",
    }
    assert b"ddpilot" not in results["plain"]
    session.execute("ok = 1")
    with pytest.raises(OSError, match="refused"):  # nothing listens once the nodes have connected
        socket.create_connection(("127.0.0.1", listeners[0].port), timeout=5)
    words = [word for node in ("n1", "n2") for pid in cluster.node_pids(node) for word in _command_line(pid)]
    assert words
    assert not any(listeners[0].key(number) in word for number in range(2) for word in words)


def _command_line(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
    except OSError:
        return []
