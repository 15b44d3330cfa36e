# SPDX-License-Identifier: Apache-2.0
"""Two nodes with a network between them: training, and messages about faults of a node or of the network."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.dist.nodes.namespaces import DDPILOT, TORCHRUN, Agent, TwoNodes, example, two_nodes
from tests.soak import soak

LIMIT_S = 60.0
STEPS = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
for step in range(100000):
    dist.all_reduce(torch.ones(1000))
    if step % 20 == 0:
        print("step", step, flush=True)
    time.sleep(0.01)
"""
WAITS = """
import time
print("step 20", flush=True)
time.sleep(1000)
"""
"""For what the agents find out between them: a rank that imports torch takes 1.3 s."""
RAISES = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
if dist.get_rank() == 1:
    raise ValueError("bad sample")
dist.all_reduce(torch.ones(1))
"""


@pytest.fixture
def nodes() -> Iterator[TwoNodes]:
    """Two namespaces, gone after the test."""
    with two_nodes() as both:
        yield both


def words(nodes: TwoNodes, node: str, *more: object, port: int = 29500) -> list[object]:
    """The options of one of two nodes."""
    sizes = ["--nnodes", 2, "--nproc-per-node", 1, "--node-rank", "ab".index(node)]
    return [*sizes, "--master-addr", nodes.addresses["a"], "--master-port", port, *more]


def start_both(nodes: TwoNodes, *more: object, **environ: str) -> tuple[Agent, Agent]:
    """`ddpilot run` with the same words on both nodes."""
    a, b = (nodes.start(node, [*DDPILOT, *words(nodes, node), *more], **environ) for node in "ab")
    return a, b


def losses(text: str) -> list[str]:
    """What the example printed of its losses."""
    return re.findall(r"loss [\d.]+", text)


@soak
@pytest.mark.timeout(240)
def test_run_trains_the_example_on_two_nodes(nodes: TwoNodes) -> None:
    """Over the interface that `ddpilot run` detects, and with torchrun, which needs it to be set."""
    a, b = start_both(nodes, example(), "--epochs", 1)
    assert [a.wait(100), b.wait(100)] == [0, 0], a.text + b.text
    assert losses(a.text) != []
    assert "[rank 0] test accuracy" in a.text
    assert "2 rank(s) on cpu" in a.text
    plain = [
        nodes.start(
            node,
            [*TORCHRUN, *words(nodes, node), example(), "--epochs", 1],
            GLOO_SOCKET_IFNAME=nodes.interfaces[node],
        )
        for node in "ab"
    ]
    assert [agent.wait(100) for agent in plain] == [0, 0], plain[0].text + plain[1].text
    assert losses(a.text) == losses(plain[0].text)


@pytest.mark.timeout(120)
def test_run_says_at_once_what_cannot_work(nodes: TwoNodes) -> None:
    """A wrong interface, one that is loopback, an unknown host: status 2 before anything starts."""
    gone = nodes.start("a", [*DDPILOT, *words(nodes, "a"), example()], GLOO_SOCKET_IFNAME="eth7")
    loopback = nodes.start("a", [*DDPILOT, *words(nodes, "a", port=29501), example()], GLOO_SOCKET_IFNAME="lo")
    unknown = nodes.start("b", [*DDPILOT, *words(nodes, "b"), "--master-addr", "no-such-host.invalid", example()])
    assert [agent.wait(LIMIT_S) for agent in (gone, loopback, unknown)] == [2, 2, 2]
    for agent in (gone, loopback, unknown):
        agent.wait_for("fix:", 5)
    interface, address = nodes.interfaces["a"], nodes.addresses["a"]
    assert f"GLOO_SOCKET_IFNAME=eth7: this node has no interface eth7 that is up; it has lo, {interface}" in gone.text
    assert f"GLOO_SOCKET_IFNAME=lo, but the route to node 0 ({address}) uses {interface}" in loopback.text
    assert "looking up --master-addr no-such-host.invalid" in unknown.text
    assert "the name does not resolve" in unknown.text


@pytest.mark.timeout(120)
def test_run_names_the_node_that_does_not_come(nodes: TwoNodes) -> None:
    """A notice after 5 s, and an error in time, for: no node 1, a closed port, an unused address."""
    waits = ("--rdzv-timeout", 7, example())
    alone = nodes.start("a", [*DDPILOT, *words(nodes, "a", *waits)])
    closed = nodes.start("b", [*DDPILOT, *words(nodes, "b", *waits, port=29501)])
    nobody = nodes.start("b", [*DDPILOT, *words(nodes, "b", "--master-addr", "10.78.0.9", *waits)])
    wrong = nodes.start("a", [*DDPILOT, *words(nodes, "a", "--master-addr", "10.78.0.9", *waits, port=29502)])
    assert [agent.wait(LIMIT_S) for agent in (alone, closed, nobody, wrong)] == [1, 1, 1, 1]
    for agent in (alone, closed, nobody, wrong):
        agent.wait_for("fix:", 5)
    host = os.uname().nodename
    here = rf"joined: node 0 \({host}\)"
    assert re.search(rf"waiting for node 1 of 2 nodes at 10.78.0.1:29500, for \d+ s of 7 s; {here}", alone.text)
    assert re.search(rf"found: node 1 did not join within \d+ s; {here}", alone.text)
    refused = r"\(\[Errno 111\] Connection refused\)"
    assert re.search(rf"waiting for node 0 of 2 nodes: no answer from 10.78.0.1:29501 {refused}", closed.text)
    assert re.search(rf"found: no answer from 10.78.0.1:29501 for \d+ s {refused}", closed.text)
    assert "found: no answer from 10.78.0.9:29500" in nobody.text
    assert "--master-addr 10.78.0.9 is not an address of this machine (127.0.0.1 on lo" in wrong.text


@pytest.mark.timeout(120)
def test_run_refuses_a_node_that_is_there_already(nodes: TwoNodes) -> None:
    """Two nodes with one node rank: the error names the first one. A different --nnodes is reported on both."""
    a = nodes.start("a", [*DDPILOT, *words(nodes, "a", "--nnodes", 3, "--rdzv-timeout", 90, example())])
    b = nodes.start("b", [*DDPILOT, *words(nodes, "b", "--nnodes", 3, "--rdzv-timeout", 90, example())])
    a.wait_for("waiting for node 2 of 3 nodes", LIMIT_S)
    twin = nodes.start("b", [*DDPILOT, *words(nodes, "b", "--nnodes", 3, example())])
    assert twin.wait(LIMIT_S) == 1
    twin.wait_for(f"found: {os.uname().nodename}, pid {b.process.pid} is already node 1 at 10.78.0.1:29500", 5)
    other = nodes.start("b", [*DDPILOT, *words(nodes, "b", "--nnodes", 4, "--node-rank", 2, example())])
    assert [other.wait(LIMIT_S), a.wait(LIMIT_S)] == [1, 1]
    a.wait_for("has --nnodes 3, node 2", 5)
    assert b.wait(LIMIT_S) == 1  # it heard of that, too
    b.wait_for("has --nnodes 3", 5)


@pytest.mark.timeout(180)
def test_run_ends_both_nodes_when_the_link_is_cut(nodes: TwoNodes, tmp_path: Path) -> None:
    """Named on both sides in seconds, ended on both after --node-timeout, and no process is left."""
    (tmp_path / "train.py").write_text(WAITS)
    a, b = start_both(nodes, "--node-timeout", 8, tmp_path / "train.py")
    a.wait_for("step 20", LIMIT_S)
    nodes.cut()
    cut_s = time.monotonic()
    for agent, other in ((a, 1), (b, 0)):
        agent.wait_for(f"no heartbeat from node {other} (", LIMIT_S)
        assert time.monotonic() - cut_s < 30
    assert [a.wait(LIMIT_S), b.wait(LIMIT_S)] == [1, 1]
    assert time.monotonic() - cut_s < 45
    for agent, other in ((a, 1), (b, 0)):
        agent.wait_for("fix:", 5)
        assert re.search(
            rf"error: watching node {other} \(.*\)\n  found: no heartbeat for \d+ s: the network", agent.text
        )


@pytest.mark.timeout(180)
def test_run_goes_on_when_the_link_is_mended_and_both_end_at_one_sigterm(nodes: TwoNodes, tmp_path: Path) -> None:
    """A short cut only causes notices; when one node is stopped, the other one ends and reports why."""
    (tmp_path / "train.py").write_text(STEPS)
    a, b = start_both(nodes, "--node-timeout", 60, tmp_path / "train.py")
    a.wait_for("step 20", LIMIT_S)
    nodes.cut()
    b.wait_for("no heartbeat from node 0 (", LIMIT_S)
    nodes.mend()
    b.wait_for("is back after", LIMIT_S)
    before = a.text.count("step")
    deadline_s = time.monotonic() + LIMIT_S
    while a.text.count("step") == before and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert a.text.count("step") > before, f"no step after the link was mended:\n{a.text}"
    b.process.send_signal(signal.SIGTERM)
    assert [b.wait(LIMIT_S), a.wait(LIMIT_S)] == [1, 1]
    a.wait_for("was stopped by SIGTERM: rank 1 was killed by SIGTERM", 5)


@pytest.mark.timeout(180)
def test_run_tells_every_node_which_rank_failed_first(nodes: TwoNodes, tmp_path: Path) -> None:
    """Node 0's rank only lost its connection; both nodes end with rank 1's error and traceback."""
    (tmp_path / "train.py").write_text(RAISES)
    a, b = start_both(nodes, "--max-restarts", 1, tmp_path / "train.py")
    assert [a.wait(LIMIT_S), b.wait(LIMIT_S)] == [1, 1]
    for agent in (a, b):
        agent.wait_for("ddpilot: rank 1 raised ValueError: bad sample (running `train.py` on 2 ranks", 5)
        assert agent.text.count("ddpilot: restart 1 of 1: rank 1 raised ValueError: bad sample") == 1
        final = agent.text[agent.text.rindex("ddpilot: rank 1 raised") :]
        assert f'File "{tmp_path / "train.py"}", line 6, in <module>' in final
    assert re.search(r"On this node, rank 0 (failed as a result|terminated)\.", a.text)


@pytest.mark.timeout(180)
def test_run_ends_when_the_other_node_is_killed(nodes: TwoNodes, tmp_path: Path) -> None:
    """`kill -9` of node 0's agent: its ranks are killed, and node 1 reports in seconds that node 0's store is gone."""
    (tmp_path / "train.py").write_text(STEPS)
    a, b = start_both(nodes, tmp_path / "train.py", TMPDIR=str(tmp_path))  # nobody is left to remove node 0's folder
    a.wait_for("step 20", LIMIT_S)
    a.process.kill()
    killed_s = time.monotonic()
    assert b.wait(LIMIT_S) == 1
    assert time.monotonic() - killed_s < 20
    b.wait_for("error: keeping the connection to node 0", 5)


@pytest.mark.timeout(180)
def test_run_names_the_node_that_was_killed_and_not_the_rank_that_noticed(nodes: TwoNodes, tmp_path: Path) -> None:
    """`kill -9` of node 1's agent: rank 0 loses its connection, which is a consequence, and is called so."""
    (tmp_path / "train.py").write_text(STEPS)
    a, b = start_both(nodes, "--max-restarts", 1, tmp_path / "train.py", TMPDIR=str(tmp_path))
    a.wait_for("step 20", LIMIT_S)
    b.process.kill()
    killed_s = time.monotonic()
    assert a.wait(LIMIT_S) == 1
    assert time.monotonic() - killed_s < 20  # not --node-timeout
    a.wait_for("fix:", 5)
    place = re.escape(f"node 1 ({os.uname().nodename})")
    assert re.search(
        rf"error: watching {place}\n  found: no heartbeat since rank 0 lost a connection to it and failed", a.text
    )
    assert "ddpilot: rank 0 raised" not in a.text
