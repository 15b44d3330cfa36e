# SPDX-License-Identifier: Apache-2.0
"""Check names, addresses, ports and interfaces of this machine, and processes that an earlier job left."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError

import psutil

from ddpilot.diagnose.facts import Answers, Facts, explain_error, in_units
from ddpilot.environments.variables import is_loopback, read_text
from ddpilot.errors import RendezvousError
from ddpilot.findings.catalog import make_finding
from ddpilot.group.address import check_resolves, listen
from ddpilot.launching.elastic.rendezvous.network import (
    Endpoint,
    interface_towards,
    ips,
    is_local_address,
    up_interfaces,
)

TORCHRUN_PORT = 29500
_LAST_PORT = 65535
_REACH_S = 5.0
"""Seconds that a node may take to look up an address and to connect to it."""
TRAPS = ("docker", "veth", "virbr", "br-", "cni", "flannel", "cali")
"""Prefixes of interfaces that other machines cannot reach."""


def host_name(facts: Facts) -> Answers:
    """The address of this host's own name, which gloo gives to other ranks unless GLOO_SOCKET_IFNAME is set."""
    name = socket.gethostname()
    try:
        check_resolves(name)
        address = str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except (RendezvousError, OSError):
        summary = f"this host's name, {name}, does not resolve, and gloo falls back to loopback"
        yield make_finding("DDP106", summary=summary, severity="warning" if facts.nnodes == 1 else None)
        return
    if facts.nnodes > 1 and is_loopback(address) and not facts.environ.get("GLOO_SOCKET_IFNAME"):
        summary = f"this host's name, {name}, is {address}, which gloo would give to ranks of other nodes"
        route = route_to_master(facts)
        yield make_finding(
            "DDP106", summary=summary, why="", fix=f"`export GLOO_SOCKET_IFNAME={route}`" if route else ""
        )
    else:
        yield f"{name} is {address}"


def master_address(facts: Facts) -> Answers:
    """MASTER_ADDR resolves."""
    addr, _ = _master(facts)
    if addr is None:
        yield "MASTER_ADDR is not set; a launcher sets it"
        return
    try:
        check_resolves(addr)
    except RendezvousError as error:
        yield explain_error(error, "DDP104")
    else:
        yield f"MASTER_ADDR={addr} resolves"


def master_port(facts: Facts) -> Answers:
    """The port of rank 0's store is free on this machine, or which process has it."""
    addr, port = _master(facts)
    text = read_text(facts.environ, "MASTER_PORT")
    if text and not (text.isdigit() and 0 < int(text) <= _LAST_PORT):
        fix = f"Set a number from 1 to {_LAST_PORT}, such as {TORCHRUN_PORT}"
        yield make_finding("DDP104", summary=f"MASTER_PORT={text} is not a port", why="", fix=fix)
        return
    if facts.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        yield f"MASTER_PORT={port} is the launcher's"
        return
    if facts.topology is not None and not facts.topology.is_rank_zero:
        yield f"MASTER_PORT={port} is opened by rank 0"
        return
    if addr and facts.topology is None and _is_elsewhere(addr):
        yield f"MASTER_PORT={port} is opened on {addr}, which is not this machine"
        return
    try:
        opened = listen(addr if addr and is_loopback(addr) else "0.0.0.0", port or TORCHRUN_PORT)
        if opened is not None:
            opened.close()
    except RendezvousError as error:
        yield explain_error(error, "DDP103", severity="error" if port else "warning")
    else:
        yield f"{'MASTER_PORT=' if port else 'the default port '}{port or TORCHRUN_PORT} is free"


def _is_elsewhere(addr: str) -> bool:
    """True if `addr` resolves to an address that is not this machine's."""
    try:
        check_resolves(addr)
    except RendezvousError:
        return False
    return not is_local_address(addr, up_interfaces())


def _master(facts: Facts) -> tuple[str | None, int | None]:
    if facts.topology is not None:
        return facts.topology.master_addr, facts.topology.master_port
    port = read_text(facts.environ, "MASTER_PORT")
    is_valid = port and port.isdigit() and int(port) <= _LAST_PORT
    return read_text(facts.environ, "MASTER_ADDR"), int(port) if port and is_valid else None


def interfaces(facts: Facts) -> Answers:
    """Interfaces that are up, and the ones that gloo and NCCL take."""
    up = {name: ips(up_interfaces(), name) for name in up_interfaces()}
    shown = ", ".join(f"{name} ({', '.join(addresses) or 'no address'})" for name, addresses in up.items())
    chosen = facts.environ.get("GLOO_SOCKET_IFNAME", "")
    if unknown := [name for name in filter(None, chosen.split(",")) if name not in up]:
        summary = f"GLOO_SOCKET_IFNAME={chosen}: no interface {', '.join(unknown)} is up here; there are {shown}"
        yield make_finding("DDP106", summary=summary, fix=f"`export GLOO_SOCKET_IFNAME={_best(up, facts)}`")
    asked = facts.environ.get("NCCL_SOCKET_IFNAME", "")
    taken = nccl_interfaces(up, asked)
    fix = f"`export NCCL_SOCKET_IFNAME={_best(up, facts)}`"
    if asked and not taken:
        summary = f"NCCL_SOCKET_IFNAME={asked} fits no interface that is up here; there are {shown}"
        yield make_finding("DDP107", summary=summary, why="", fix=fix)
    elif facts.nnodes > 1 and taken and taken[0] != (route := route_to_master(facts)) and route:
        summary = f"NCCL takes {taken[0]}, and the route to node 0 uses {route}; there are {shown}"
        yield make_finding("DDP107", summary=summary, fix=fix, severity="warning")
    elif not unknown:
        yield f"{shown}; NCCL takes {taken[0] if taken else 'none'}, gloo {chosen or 'that of the host name'}"


def _best(up: Mapping[str, object], facts: Facts) -> str:
    usable = [name for name in up if not name.startswith(("lo", *TRAPS))]
    return route_to_master(facts) or next(iter(usable), "lo")


def route_to_master(facts: Facts) -> str | None:
    """The interface of this machine that reaches node 0; None if it is unknown, or if everything is on one node."""
    addr, port = _master(facts)
    if addr is None or facts.nnodes == 1:
        return None
    return interface_towards(Endpoint(addr=addr, port=port or TORCHRUN_PORT), up_interfaces())


def nccl_interfaces(names: Iterable[str], asked: str) -> list[str]:
    """The interfaces among `names` that NCCL takes with NCCL_SOCKET_IFNAME=`asked`, which may be "".

    NCCL's own order without it: those that begin with "ib", then all but docker's and loopback, then docker's, then
    loopback.
    """
    names = list(names)
    if not asked:
        wishes = ("ib", "^docker,lo,virbr", "docker", "lo")
        return next((found for wish in wishes if (found := nccl_interfaces(names, wish))), [])
    is_excluded, exact = asked.startswith("^"), asked.lstrip("^").startswith("=")
    parts = asked.lstrip("^").lstrip("=").split(",")
    fits = [any(name == part if exact else name.startswith(part) for part in parts if part) for name in names]
    return [name for name, fit in zip(names, fits, strict=True) if fit != is_excluded]


def reach(facts: Facts) -> Answers:
    """This machine can connect to the addresses that the job needs."""
    if not facts.reach:
        return
    pool = ThreadPoolExecutor(len(facts.reach))
    attempts = {address: pool.submit(_connect, address) for address in facts.reach}
    pool.shutdown(wait=False)  # a lookup cannot be given up: on a node without a name server it may take long
    end_s, reached = time.monotonic() + _REACH_S, []
    for address, attempt in attempts.items():
        try:
            attempt.result(max(0.0, end_s - time.monotonic()))
            reached.append(address)
        except (OSError, FutureTimeoutError) as error:
            reason = getattr(error, "strerror", None) or f"no answer within {_REACH_S:g} s"
            yield make_finding("DDP812", summary=f"no connection to {address}: {reason}")
    if reached:
        yield f"{', '.join(reached)} can be reached"


def _connect(address: str) -> None:
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_S).close()


def stale_processes(facts: Facts) -> Answers:
    """Ranks of earlier jobs whose launcher is gone: named, with their memory, and left alone."""
    first = psutil.Process(1).name() if psutil.pid_exists(1) else ""
    if first.startswith("python"):  # a container whose first process is the launcher itself
        yield "the first process of this container is a launcher: what it started is not stale"
        return
    stale = [found for process in psutil.process_iter() if (found := _describe_stale(process, facts))]
    if stale:
        yield make_finding("DDP116", summary=f"{len(stale)} rank(s) without a launcher are alive", evidence=stale)
    else:
        yield "no rank of an earlier job is alive"


def _is_orphan(process: psutil.Process) -> bool:
    """True if the process that started `process` has ended, so that init or systemd has taken it over."""
    parent = process.parent()
    return parent is None or parent.pid == 1 or parent.name() == "systemd"


def _describe_stale(process: psutil.Process, facts: Facts) -> str:
    try:
        if process.pid == os.getpid() or not _is_orphan(process):
            return ""
        environ = process.environ()
        if not {"RANK", "WORLD_SIZE", "MASTER_PORT"} <= environ.keys():
            return ""
        command = " ".join(" ".join(process.cmdline()).split())[:120]
        hours = (time.time() - process.create_time()) / 3600
        port = environ["MASTER_PORT"]
        note = ", this job's port" if port == facts.environ.get("MASTER_PORT") else ""
        return (
            f"pid {process.pid} of {process.username()}: rank {environ['RANK']} of {environ['WORLD_SIZE']}, port {port}"
            f"{note}, {hours:.1f} h old, {in_units(process.memory_info().rss)}: {command}"
        )
    except (psutil.Error, OSError):
        return ""
