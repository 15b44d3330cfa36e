# SPDX-License-Identifier: Apache-2.0
"""This node's address and interface towards the other nodes of a session."""

from __future__ import annotations

import contextlib
import os
import socket

from ddpilot.environments.variables import is_loopback
from ddpilot.launching.elastic.rendezvous.network import Endpoint, interface_towards, up_interfaces
from ddpilot.launching.rank_environment import default_variables

_ANYWHERE = ("203.0.113.1", 9)
"""An address that is reserved for documentation: reached by the default route, if there is one."""

_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def find_master_address(reached_at: str) -> str:
    """Return this node's address on the default route; without one, the address at which the parent reached it."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(_ANYWHERE)  # a datagram socket: no packet is sent
        address = str(probe.getsockname()[0])
        if not is_loopback(address):
            return address
    return reached_at or "127.0.0.1"


def ssh_address() -> str:
    """Return the address at which ssh reached this node; "" if this process was not started by ssh."""
    words = os.environ.get("SSH_CONNECTION", "").split()
    return words[2] if len(words) == 4 else ""


def open_store(address: str) -> tuple[socket.socket, int]:
    """Return a socket that listens for the store on `address`, and its port."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family, backlog=2048)
    return listener, int(listener.getsockname()[1])


def interface_variables(address: str, port: int) -> dict[str, str]:
    """Return the variables with the interface that routes to the store; empty if it is unknown."""
    if is_loopback(address):
        defaults = default_variables()
        return {name: defaults[name] for name in _INTERFACES}
    interface = interface_towards(Endpoint(addr=address, port=port), up_interfaces())
    return {} if interface is None else dict.fromkeys(_INTERFACES, interface)
