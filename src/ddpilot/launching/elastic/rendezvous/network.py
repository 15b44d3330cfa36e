# SPDX-License-Identifier: Apache-2.0
"""Check this node's addresses and interfaces, and the route to node 0, before anything starts."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import psutil

from ddpilot.environments.variables import is_loopback
from ddpilot.errors import LaunchError, RendezvousError
from ddpilot.group.address import check_resolves, listen
from ddpilot.launching.elastic.options import DEFAULT_PORT, RunOptions
from ddpilot.launching.rank_environment import default_variables

GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"
_LOOPBACK = "127.0.0.1"
_MAX_OTHERS = 2


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """Address of the store on node 0. `listener`: on node 0, the socket that already listens there."""

    addr: str
    port: int
    listener: socket.socket | None = None

    def close(self) -> None:
        """Close the socket, unless the store has taken it over."""
        if self.listener is not None:
            self.listener.close()


def open_endpoint(options: RunOptions) -> Endpoint:
    """Resolve the address of node 0, and on node 0 open the port.

    Raises LaunchError if several nodes are given no address, RendezvousError for a name that does not resolve (in less
    than 3 s) or for a port in use, whose owner is named.
    """
    addr, port = _read_endpoint(options)
    if options.node_rank != 0:
        _check(addr)
        return Endpoint(addr=addr, port=port)
    if not is_loopback(addr):
        _check(addr)
    try:
        listener = listen(addr, port)
    except RendezvousError as error:
        fix = f"Stop that process, or choose a --master-port other than {port}"
        raise RendezvousError(f"opening port {port} for the store", found=error.found, fix=fix) from error
    if listener is None:  # this process itself listens there: a server of the caller
        fix = f"Close it, or choose a --master-port other than {port}"
        raise RendezvousError(f"opening port {port} for the store", found="this process listens there", fix=fix)
    return Endpoint(addr=addr, port=listener.getsockname()[1], listener=listener)


def _read_endpoint(options: RunOptions) -> tuple[str, int]:
    addr, port = options.master_addr, options.master_port
    if options.rdzv_endpoint:
        host, _, text = options.rdzv_endpoint.rpartition(":")
        addr, port = (host, int(text)) if host and text.isdigit() else (options.rdzv_endpoint, port)
    one_node = options.nnodes[1] == 1
    if addr is None and not one_node:
        raise LaunchError(
            f"meeting {options.nnodes[1]} nodes",
            found="no address of node 0 is given",
            fix="Add --master-addr with the name or address of node 0, the same on every node",
        )
    return addr or _LOOPBACK, port if port is not None else 0 if one_node else DEFAULT_PORT


def _check(addr: str) -> None:
    try:
        check_resolves(addr)
    except RendezvousError as error:
        raise RendezvousError(
            f"looking up --master-addr {addr}",
            found=error.found,
            fix="Give the name or address of the machine that runs node 0, as this node knows it",
        ) from error


def rank_network_variables(
    options: RunOptions, endpoint: Endpoint, environ: Mapping[str, str], note: Callable[[str], None]
) -> dict[str, str]:
    """Environment variables that let ranks of all nodes reach each other, unless the user has set them.

    On one node, ranks listen on loopback. On several nodes, gloo would choose the interface of this host's own name,
    which other nodes often cannot reach; the interface that routes to node 0 is set instead. Raises LaunchError if the
    user's choice of interface cannot work.
    """
    if options.nnodes[1] == 1:
        return {name: value for name, value in default_variables().items() if name not in environ}
    interfaces = up_interfaces()
    reached = interface_towards(endpoint, interfaces)
    if options.node_rank == 0 and not is_local_address(endpoint.addr, interfaces):
        mine = ", ".join(f"{address} on {name}" for name in interfaces for address in ips(interfaces, name))
        note(f"--master-addr {endpoint.addr} is not an address of this machine ({mine}): can other nodes use it?")
    chosen = environ.get(GLOO_VARIABLE)
    if chosen:
        _check_choice(chosen, interfaces, reached, endpoint, note)
        return {}
    return {} if reached is None else {GLOO_VARIABLE: reached}


def _check_choice(
    chosen: str, interfaces: Mapping[str, object], reached: str | None, endpoint: Endpoint, note: Callable[[str], None]
) -> None:
    names = chosen.split(",")
    did, has = f"reading {GLOO_VARIABLE}", ", ".join(interfaces)
    unset = f"Unset {GLOO_VARIABLE}" + ("" if reached is None else f": {reached}, which routes to node 0, is then used")
    for name in names:
        if name not in interfaces:
            found = f"{GLOO_VARIABLE}={chosen}: this node has no interface {name} that is up; it has {has}"
            raise LaunchError(did, found=found, fix=unset)
    if reached is not None and reached not in names:
        found = f"{GLOO_VARIABLE}={chosen}, but the route to node 0 ({endpoint.addr}) uses {reached}"
        if all(name.startswith("lo") for name in names):
            raise LaunchError(did, found=found, fix=unset)
        note(f"{found}: can the other nodes reach this one over {chosen}?")


def interface_towards(endpoint: Endpoint, interfaces: Mapping[str, list[Any]]) -> str | None:
    """The interface that routes to node 0; on node 0 the interface that has its address. None if unknown."""
    for family, kind, protocol, _, address in _resolve(endpoint):
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # a datagram socket: no packet is sent
            mine = str(probe.getsockname()[0])
            for name in interfaces:
                if mine in ips(interfaces, name):
                    # Locally this address is reached over loopback, but other nodes reach it through this interface.
                    return name
    return None


def _resolve(endpoint: Endpoint) -> list[tuple[socket.AddressFamily, socket.SocketKind, int, str, tuple[object, ...]]]:
    try:
        return list(socket.getaddrinfo(endpoint.addr, endpoint.port, type=socket.SOCK_DGRAM))
    except OSError:
        return []


def is_local_address(addr: str, interfaces: Mapping[str, list[Any]]) -> bool:
    """True if `addr` is loopback or an address of `interfaces`; False if it does not resolve."""
    mine = {ip for name in interfaces for ip in ips(interfaces, name)}
    found = _resolve(Endpoint(addr=addr, port=DEFAULT_PORT))
    return any(str(address[0]) in mine or is_loopback(str(address[0])) for *_, address in found)


def find_gloo_interfaces(environ: Mapping[str, str]) -> list[str]:
    """The interfaces over which ranks of this machine can reach each other by gloo; first the one that it would use."""
    up = up_interfaces()
    now = environ.get(GLOO_VARIABLE) or default_variables()[GLOO_VARIABLE]
    others = [name for name in up if name != now and any(each.family == socket.AF_INET for each in up[name])]
    return [now, *others[:_MAX_OTHERS]]


def up_interfaces() -> dict[str, list[Any]]:
    """The interfaces of this machine that are up, each with its addresses as psutil returns them."""
    stats = psutil.net_if_stats()
    return {name: each for name, each in psutil.net_if_addrs().items() if name in stats and stats[name].isup}


def ips(interfaces: Mapping[str, list[Any]], name: str) -> list[str]:
    """The IP addresses of the interface `name`."""
    kinds = (socket.AF_INET, socket.AF_INET6)
    return [each.address.partition("%")[0] for each in interfaces[name] if each.family in kinds]
