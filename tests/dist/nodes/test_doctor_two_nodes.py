# SPDX-License-Identifier: Apache-2.0
"""`ddpilot doctor --nodes` on two nodes: healthy, and each fault of the network, the clocks and the shared folder."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.dist.nodes.namespaces import Agent, TwoNodes, ip, two_nodes

LIMIT_S = 100.0
DOCTOR = (sys.executable, "-m", "ddpilot", "doctor")
LATE = "import time; real = time.time; time.time = lambda: real() - 30\nfrom ddpilot.cli.app import main; main()"
"""The command with a wall clock that is 30 s late."""


@pytest.fixture
def nodes() -> Iterator[TwoNodes]:
    """Two namespaces, gone after the test."""
    with two_nodes() as both:
        yield both


def start(
    nodes: TwoNodes, node: str, *more: object, environ: Mapping[str, str], command: tuple[object, ...] = DOCTOR
) -> Agent:
    """The doctor as the only rank of a node, as srun would start it with torchrun's variables."""
    rank = str("ab".index(node))
    job = {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_PORT": "29500"}
    words = [*command, "--nodes", "--timeout-s", 20, "--json", *more]
    return nodes.start(node, words, **{**job, "MASTER_ADDR": nodes.addresses["a"], **environ})


def named(nodes: TwoNodes, node: str) -> dict[str, str]:
    """The variable without which gloo takes the address of this host's name, which is loopback in a namespace."""
    return {"GLOO_SOCKET_IFNAME": nodes.interfaces[node]}


def problems(agent: Agent, status: int) -> list[tuple[str, str]]:
    """Code and text of the findings in the JSON that a rank has printed; its exit status has to be `status`."""
    assert agent.wait(LIMIT_S) == status, agent.describe_all()
    agent.wait_for("settings", 5)
    found: dict[str, Any] = json.loads(agent.text[agent.text.index("{\n") :])
    return [(line["finding"]["code"], line["found"]) for line in found["lines"] if line["finding"]]


@pytest.mark.timeout(180)
def test_two_healthy_nodes_pass_and_rank_0_speaks_for_all(nodes: TwoNodes, tmp_path: Path) -> None:
    """No finding; the nodes reach each other, see one folder, and exchange data over the cable."""
    a, b = (start(nodes, node, "--checkpoint-dir", tmp_path, environ=named(nodes, node)) for node in "ab")
    assert problems(a, 0) == []
    assert b.wait(LIMIT_S) == 0
    assert "lines" not in b.text
    lines = {line["check"]: line["found"] for line in json.loads(a.text[a.text.index("{\n") :])["lines"]}
    assert "from 10.78.0.2 node 0 (10.78.0.1) can be reached" in a.text
    assert lines["shared_folder"] == f"a file of node 0 in {tmp_path} is visible"
    assert "2 ranks joined" in lines["joined"]
    assert f"over {nodes.interfaces['a']}" in lines["all_reduce_speed"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.timeout(180)
def test_a_host_name_that_is_loopback_is_an_error_with_the_line_to_paste(nodes: TwoNodes) -> None:
    """The ranks are connected with the setting that the finding suggests, and that works."""
    a, b = (start(nodes, node, environ={}) for node in "ab")
    found = problems(a, 1)
    assert {code for code, _ in found} == {"DDP106"}
    assert b.wait(LIMIT_S) == 0
    report = json.loads(a.text[a.text.index("{\n") :])
    interface = nodes.interfaces["a"]
    why = f"{interface} is the route to node 0 (10.78.0.1)"
    assert report["settings"] == [f"export GLOO_SOCKET_IFNAME={interface}  # {why}"]
    assert "2 ranks joined" in a.text


@pytest.mark.timeout(180)
def test_a_blocked_port_of_the_store_is_named_on_both_nodes(nodes: TwoNodes) -> None:
    """Node 1 cannot connect to it, and rank 0 names the rank that does not come."""
    ip("-n", nodes._names["b"], "rule", "add", "ipproto", "tcp", "dport", "29500", "prohibit")
    a, b = (start(nodes, node, "--timeout-s", 5, environ=named(nodes, node)) for node in "ab")
    (far,) = problems(b, 1)
    assert far[0] == "DDP104"
    assert "waiting for rank 0: no answer from 10.78.0.1:29500 for 5 s" in far[1]
    (near,) = problems(a, 1)
    assert near[0] == "DDP105"
    assert near[1].startswith("rank 1 of 2 did not come within 5 s")


@pytest.mark.timeout(180)
def test_blocked_ports_between_nodes_are_named_although_the_store_can_be_reached(nodes: TwoNodes) -> None:
    """Only the store's port is open, as behind many firewalls: who cannot reach whom, without a group."""
    for ports in ("1-29499", "29501-65534"):
        ip("-n", nodes._names["b"], "rule", "add", "ipproto", "tcp", "dport", ports, "prohibit")
    a, b = (start(nodes, node, "--timeout-s", 8, environ=named(nodes, node)) for node in "ab")
    found = problems(a, 1)
    assert b.wait(LIMIT_S) == 0
    texts = [text for code, text in found if code == "DDP104"]
    assert any("node 1" in text and "cannot connect to node 0" in text and "10.78.0.1:" in text for text in texts)
    assert any("node 0" in text and "cannot connect to node 1" in text for text in texts)
    assert ("DDP105", "the ranks have not formed a group, since their nodes cannot connect to each other") in found


@pytest.mark.timeout(180)
def test_a_wrong_master_address_is_named_on_the_node_that_has_it(nodes: TwoNodes) -> None:
    """A name that does not resolve, once, in seconds; and rank 0 misses that rank."""
    a = start(nodes, "a", "--timeout-s", 5, environ=named(nodes, "a"))
    b = start(nodes, "b", "--timeout-s", 5, environ={**named(nodes, "b"), "MASTER_ADDR": "no-such-host.invalid"})
    assert [code for code, _ in problems(b, 1)] == ["DDP104"]
    assert "MASTER_ADDR=no-such-host.invalid: the name does not resolve" in b.text
    assert [code for code, _ in problems(a, 1)] == ["DDP105"]


@pytest.mark.timeout(180)
def test_clocks_and_folders_that_differ_are_named(nodes: TwoNodes, tmp_path: Path) -> None:
    """Node 1 is 30 s late, and has a disk of its own in place of the shared folder."""
    (tmp_path / "shared").mkdir()
    mount = 'mount -t tmpfs tmpfs "$0" && exec "$@"'
    own_disk = ("unshare", "-m", "sh", "-c", mount, tmp_path / "shared", sys.executable, "-c", LATE, "doctor")
    more = ("--checkpoint-dir", tmp_path / "shared")
    a = start(nodes, "a", *more, environ=named(nodes, "a"))
    b = start(nodes, "b", *more, command=own_disk, environ=named(nodes, "b"))
    found = dict(problems(a, 1))
    assert b.wait(LIMIT_S) == 0
    assert "the clock of node 0 is +30.0" in found["DDP805"]
    assert f"{tmp_path / 'shared'} does not have the file that node 0 made there" in found["DDP806"]
