# SPDX-License-Identifier: Apache-2.0
"""Names, ports, interfaces and leftover ranks: passing, and failing for real sockets, names and processes."""

from __future__ import annotations

import socket
import time

import pytest

from ddpilot.diagnose.checks import network
from ddpilot.diagnose.doctor import doctor
from ddpilot.environments.topology import Topology
from ddpilot.errors import LaunchError
from ddpilot.findings.finding import Finding
from tests.unit.diagnose.checking import make_facts, statuses, text_of


def two_nodes(**given: object) -> Topology:
    """Rank 0 of two nodes, whose master is this machine's loopback address."""
    known = {"rank": 0, "world_size": 2, "local_rank": 0, "local_world_size": 1, "node_rank": 0, "nnodes": 2}
    names = {"master_addr": "127.0.0.1", "master_port": 29500, "environment": "slurm", "how": "a test"}
    return Topology(**{**known, **names, **given})  # type: ignore[arg-type]


def test_host_name_resolves_here_and_a_wrong_one_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that no resolver knows is a warning on one node and an error on several."""
    assert statuses(network.host_name, make_facts()) == ["ok"]
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    assert statuses(network.host_name, make_facts()) == ["warning DDP106"]
    assert statuses(network.host_name, make_facts(topology=two_nodes())) == ["error DDP106"]


def test_host_name_must_not_be_loopback_on_several_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo would give 127.0.0.1 to the other nodes, unless an interface is named."""
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    facts = make_facts(topology=two_nodes())
    assert statuses(network.host_name, facts) == ["error DDP106"]
    assert "`export GLOO_SOCKET_IFNAME=lo`" in text_of(network.host_name, facts)
    named = make_facts(topology=two_nodes(), environ={"GLOO_SOCKET_IFNAME": "lo"})
    assert statuses(network.host_name, named) == ["ok"]


def test_master_address_has_to_resolve() -> None:
    """Not set, right, and wrong: within 3 seconds, with its page."""
    assert statuses(network.master_address, make_facts()) == ["ok"]
    assert statuses(network.master_address, make_facts(environ={"MASTER_ADDR": "localhost"})) == ["ok"]
    wrong = make_facts(environ={"MASTER_ADDR": "no-such-host.invalid"})
    began_s = time.monotonic()
    assert statuses(network.master_address, wrong) == ["error DDP104"]
    assert time.monotonic() - began_s < 4
    assert "MASTER_ADDR=no-such-host.invalid: the name does not resolve" in text_of(network.master_address, wrong)


@pytest.mark.parametrize("port", ["99999", "0", "-1", "port"])
def test_a_port_that_is_none_is_refused(port: str) -> None:
    """With the number that was read, and without an exception."""
    (answer,) = network.master_port(make_facts(environ={"MASTER_PORT": port, "MASTER_ADDR": "127.0.0.1"}))
    assert isinstance(answer, Finding)
    assert (answer.code, answer.summary) == ("DDP104", f"MASTER_PORT={port} is not a port")


def test_master_port_is_not_tried_where_rank_zero_or_a_launcher_has_it() -> None:
    """On another rank, and under torchrun's agent, which already listens."""
    other = make_facts(topology=two_nodes(rank=1, node_rank=1))
    assert "is opened by rank 0" in text_of(network.master_port, other)
    elsewhere = make_facts(environ={"MASTER_ADDR": "192.0.2.77", "MASTER_PORT": "29500"})
    assert "is opened on 192.0.2.77, which is not this machine" in text_of(network.master_port, elsewhere)
    agent = make_facts(environ={"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": "1"})
    assert "MASTER_PORT=1 is the launcher's" in text_of(network.master_port, agent)


@pytest.mark.parametrize(
    ("names", "asked", "taken"),
    [
        ("lo eth0 docker0", "", "eth0"),
        ("lo eth0 ib0 ib1", "", "ib0 ib1"),
        ("lo docker0", "", "docker0"),
        ("lo", "", "lo"),
        ("lo docker0 veth12 eth0", "", "veth12 eth0"),
        ("lo eth0 eth1", "eth", "eth0 eth1"),
        ("lo eth0 eth01", "=eth0", "eth0"),
        ("lo eth0 docker0", "^lo,docker", "eth0"),
        ("lo eth0", "^=lo", "eth0"),
        ("lo eth0", "ib", ""),
    ],
)
def test_nccl_interfaces_follows_nccls_rules(names: str, asked: str, taken: str) -> None:
    """Prefixes, exact names, exclusions, and the order without a setting."""
    assert network.nccl_interfaces(names.split(), asked) == taken.split()


def test_interfaces_lists_those_that_are_up() -> None:
    """With addresses, and the one that NCCL takes."""
    assert statuses(network.interfaces, make_facts()) == ["ok"]
    assert "lo (127.0.0.1" in text_of(network.interfaces, make_facts())


def test_interfaces_refuses_a_name_that_no_interface_has() -> None:
    """GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME of a different machine."""
    gloo = make_facts(environ={"GLOO_SOCKET_IFNAME": "eth77"})
    assert statuses(network.interfaces, gloo) == ["error DDP106"]
    assert "no interface eth77 is up here" in text_of(network.interfaces, gloo)
    nccl = make_facts(environ={"NCCL_SOCKET_IFNAME": "eth77"})
    assert statuses(network.interfaces, nccl) == ["error DDP107"]


def test_interfaces_warns_when_nccl_does_not_take_the_route_to_node_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """A virtual interface that comes first is a trap; without it NCCL takes the route."""
    monkeypatch.setattr(network, "route_to_master", lambda facts: "eth0")
    facts = make_facts(topology=two_nodes())
    monkeypatch.setattr(network, "up_interfaces", lambda: {"lo": [], "veth1": [], "eth0": []})
    assert statuses(network.interfaces, facts) == ["warning DDP107"]
    assert "NCCL takes veth1, and the route to node 0 uses eth0" in text_of(network.interfaces, facts)
    monkeypatch.setattr(network, "up_interfaces", lambda: {"lo": [], "docker0": [], "eth0": []})
    assert statuses(network.interfaces, facts) == ["ok"]


def test_addresses_that_the_job_needs_are_tried_and_others_are_not() -> None:
    """An open port is ok, a closed one and a name that does not resolve are errors, each named."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as other:
        is_open, closed = (f"127.0.0.1:{each.getsockname()[1]}" for each in (server, other))
        other.close()
        facts = make_facts(reach=(is_open, closed, "no-such-host.invalid:443"))
        assert statuses(network.reach, facts) == ["error DDP812", "error DDP812", "ok"]
        text = text_of(network.reach, facts)
    assert f"{is_open} can be reached" in text
    assert f"no connection to {closed}: Connection refused" in text
    assert "no connection to no-such-host.invalid:443" in text
    assert statuses(network.reach, make_facts()) == []


@pytest.mark.parametrize("address", ["huggingface.co", ":443", "a:https", "a:0", "a:70000"])
def test_an_address_without_host_or_port_is_refused(address: str) -> None:
    """Before anything is checked."""
    with pytest.raises(LaunchError, match="is not HOST:PORT"):
        doctor(live=False, reach=[address])
