# SPDX-License-Identifier: Apache-2.0
"""Where node 0 is, and which interface leads there."""

from __future__ import annotations

import os
import socket
from typing import Any

import psutil
import pytest

from ddpilot.errors import LaunchError, RendezvousError
from ddpilot.launching.elastic.options import RunOptions
from ddpilot.launching.elastic.rendezvous.network import Endpoint, open_endpoint, rank_network_variables

LOOPBACK = next(name for name, found in psutil.net_if_addrs().items() if any(a.address == "127.0.0.1" for a in found))


def options(**given: Any) -> RunOptions:
    """The options of a run of a script."""
    return RunOptions(target="train.py", **given)


def test_open_endpoint_listens_on_a_free_port_of_loopback_when_there_is_one_node() -> None:
    """Nobody outside this machine can reach the store."""
    endpoint = open_endpoint(options())
    try:
        assert endpoint.listener is not None
        assert endpoint.listener.getsockname() == ("127.0.0.1", endpoint.port)
        assert endpoint.port > 0
    finally:
        endpoint.close()


def test_open_endpoint_opens_nothing_when_another_node_hosts_the_store() -> None:
    """The default port is torchrun's; --rdzv-endpoint is an alternative to the two options."""
    found = open_endpoint(options(nnodes=(2, 2), node_rank=1, master_addr="127.0.0.1"))
    assert (found.addr, found.port, found.listener) == ("127.0.0.1", 29500, None)
    found = open_endpoint(options(nnodes=(2, 2), node_rank=1, rdzv_endpoint="127.0.0.2:1234"))
    assert (found.addr, found.port) == ("127.0.0.2", 1234)


def test_open_endpoint_asks_for_an_address_when_there_are_several_nodes() -> None:
    """torchrun's default, loopback, would be a different machine on each node."""
    with pytest.raises(LaunchError, match="no address of node 0 is given. Add --master-addr"):
        open_endpoint(options(nnodes=(2, 2)))


def test_open_endpoint_refuses_a_port_that_is_taken() -> None:
    """If this process uses it, that is reported; for a different process its pid and command."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RendezvousError, match=f"opening port {port} for the store: this process listens there"):
            open_endpoint(options(master_port=port))


def test_rank_network_variables_keep_one_node_on_loopback_unless_the_user_chose() -> None:
    """gloo and NCCL both; what is set stays."""
    endpoint, said = Endpoint(addr="127.0.0.1", port=1), list[str]()
    found = rank_network_variables(options(), endpoint, {"NCCL_SOCKET_IFNAME": "eth0"}, said.append)
    assert found["GLOO_SOCKET_IFNAME"] == LOOPBACK
    assert "NCCL_SOCKET_IFNAME" not in found
    assert said == []


def test_rank_network_variables_name_the_interface_that_leads_to_node_zero() -> None:
    """Two agents on one machine meet on loopback; NCCL is left alone."""
    endpoint = Endpoint(addr="127.0.0.1", port=1)
    found = rank_network_variables(options(nnodes=(2, 2), master_addr="127.0.0.1"), endpoint, {}, print)
    assert found == {"GLOO_SOCKET_IFNAME": LOOPBACK}


def test_rank_network_variables_refuse_an_interface_that_is_not_there() -> None:
    """With the ones that are."""
    endpoint, environ = Endpoint(addr="127.0.0.1", port=1), {"GLOO_SOCKET_IFNAME": "wlan99"}
    with pytest.raises(LaunchError, match=f"no interface wlan99 that is up; it has .*{LOOPBACK}"):
        rank_network_variables(options(nnodes=(2, 2), master_addr="127.0.0.1"), endpoint, environ, print)


def test_rank_network_variables_doubt_an_address_that_is_not_this_machines() -> None:
    """A notice only: node 0 may be behind a router or a service. 203.0.113.0/24 is reserved by RFC 5737."""
    endpoint, said = Endpoint(addr="203.0.113.7", port=1), list[str]()
    rank_network_variables(options(nnodes=(2, 2), master_addr="203.0.113.7"), endpoint, dict(os.environ), said.append)
    assert said[0].startswith("--master-addr 203.0.113.7 is not an address of this machine (")
