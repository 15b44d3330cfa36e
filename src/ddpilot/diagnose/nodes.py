# SPDX-License-Identifier: Apache-2.0
"""``ddpilot doctor --nodes``: every rank of a job checks its node and the way to the others. Imports torch."""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from torch._C._distributed_c10d import PrefixStore, Store

from ddpilot.diagnose.checks.filesystem import existing_folder
from ddpilot.diagnose.checks.network import host_name, route_to_master
from ddpilot.diagnose.diagnosis import NODES, Diagnosis, Line, merge_nodes
from ddpilot.diagnose.facts import Answer, Facts, RankReport, explain_error
from ddpilot.diagnose.nccl_settings import suggest_settings
from ddpilot.diagnose.ranks import examine_rank
from ddpilot.diagnose.reachability import ClockServer, ask_clock
from ddpilot.diagnose.registry import run_checks
from ddpilot.environments.topology import Topology
from ddpilot.errors import RendezvousError
from ddpilot.findings.catalog import make_finding
from ddpilot.findings.finding import Finding
from ddpilot.group.store import connect_store, resolve_endpoint, wait_for_keys
from ddpilot.launching.elastic.rendezvous.network import ips, up_interfaces

_CONNECT_S = 3.0
_VISIBLE_S = 2.0
"""Seconds after which a file of node 0 has to be visible: network file systems cache a folder's names."""
_CLOCK_S = 0.5
"""Difference of clocks that is reported."""


def examine_job(facts: Facts, topology: Topology, timeout_s: float) -> Diagnosis:
    """Check all nodes of the job that this rank belongs to. Collective; returns the same diagnosis on every rank.

    On a rank that cannot reach rank 0, the diagnosis is about its node alone. `timeout_s`: seconds to wait for the
    other ranks, and timeout of the group.
    """
    lines = list(run_checks(facts, ("machine",))) if topology.local_rank == 0 else []
    try:
        store = PrefixStore("doctor", connect_store(resolve_endpoint(topology, facts.environ), timeout_s))
        return _examine_together(store, facts, topology, lines, timeout_s)
    except RendezvousError as error:
        finding = explain_error(error, "DDP103" if topology.is_rank_zero else "DDP104")
    except RuntimeError as error:  # the store's connection
        text = str(error).splitlines()[0]
        finding = make_finding("DDP209", ranks=[0], summary=f"rank {topology.rank} lost the store of rank 0: {text}")
    known = any(isinstance(line.answer, Finding) and line.answer.code == finding.code for line in lines)
    lines += [] if known else [Line("store", NODES, finding)]
    title = f"doctor: node {topology.node_rank} ({socket.gethostname()}) without rank 0"
    return Diagnosis(title, tuple(lines), is_shown=topology.local_rank == 0)


def _examine_together(store: Store, facts: Facts, topology: Topology, lines: list[Line], timeout_s: float) -> Diagnosis:
    """Wait for the other ranks, check what needs them, and return rank 0's diagnosis. Collective."""
    absent = _wait_for_ranks(store, topology, timeout_s)
    if absent is None:
        if topology.local_rank == 0:
            lines += _check_other_nodes(store, facts, topology)
        _choose_interface(facts)
        report = examine_rank(timeout_s)
        store.set(f"report/{topology.rank}", json.dumps(asdict(report)))
    if topology.local_rank == 0:
        store.set(f"lines/{topology.node_rank}", json.dumps([line.to_dict() for line in lines]))
    if topology.is_rank_zero:
        found = _gather(store, facts, topology, absent, timeout_s)
        store.set("diagnosis", json.dumps(found.to_dict()))
        # The store ends with this process: the other ranks read the diagnosis first.
        wait_for_keys(store, [f"read/{rank}" for rank in _others(topology, absent)], _CONNECT_S)
        return found
    if not wait_for_keys(store, ["diagnosis"], 4 * timeout_s):
        raise RuntimeError("no diagnosis came")
    found = Diagnosis.from_dict(json.loads(store.get("diagnosis")))
    store.set(f"read/{topology.rank}", "")
    return replace(found, is_shown=False)


def _others(topology: Topology, absent: Finding | None) -> list[int]:
    gone = absent.ranks if absent else ()
    return [rank for rank in range(1, topology.world_size) if rank not in gone]


def _wait_for_ranks(store: Store, topology: Topology, timeout_s: float) -> Finding | None:
    """Wait until every rank has reached the store. Returns a finding that names those that have not."""
    store.set(f"here/{topology.rank}", f"{socket.gethostname()}, pid {os.getpid()}")
    keys = [f"here/{rank}" for rank in range(topology.world_size)]
    if wait_for_keys(store, keys, timeout_s):
        return None
    here = [rank for rank in range(topology.world_size) if store.check([keys[rank]])]
    missing = [rank for rank in range(topology.world_size) if rank not in here]
    places = "; ".join(f"rank {rank} ({store.get(keys[rank]).decode()})" for rank in here[:8])
    names = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing[:8]))}"
    summary = f"{names} of {topology.world_size} did not come within {timeout_s:g} s; there are {places}"
    fix = (
        f"Read the output of {names}: was it started, and does it reach {topology.master_addr}:{topology.master_port}?"
    )
    return make_finding("DDP105", summary=summary, ranks=missing, fix=fix)


def _choose_interface(facts: Facts) -> None:
    """Let gloo use the route to node 0 where this host's own name would mislead it, as the finding suggests."""
    misleads = any(isinstance(answer, Finding) for answer in host_name(facts))
    if misleads and facts.nnodes > 1 and (route := route_to_master(facts)):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", route)


@dataclass(frozen=True)
class _Node:
    """What a node tells the others: where its clock server listens, and on node 0 the file to look for."""

    node: int
    host: str
    address: str
    port: int
    mark: str = ""


def _check_other_nodes(store: Store, facts: Facts, topology: Topology) -> Iterator[Line]:
    """Yield the lines about the way from this node to each other one. Collective of the first rank of each node."""
    if facts.nnodes == 1:
        return
    address = _own_address(facts)
    folder = existing_folder(facts.checkpoint_dir)
    with ClockServer(address) as server, _mark(folder, topology.node_rank == 0) as mark:
        me = _Node(topology.node_rank, socket.gethostname(), address, server.port, mark)
        store.set(f"node/{me.node}", json.dumps(asdict(me)))
        keys = [f"node/{node}" for node in range(topology.nnodes)]
        wait_for_keys(store, keys, 10 * _CONNECT_S)
        nodes = [_Node(**json.loads(store.get(key))) for key in keys if store.check([key])]
        others = [node for node in nodes if node.node != me.node]
        checks: Sequence[tuple[str, Callable[[], Iterable[Answer]]]] = (
            ("reachability", lambda: _reach(me, others)),
            ("shared_folder", lambda: _see(folder, nodes[0])),
        )
        for name, check in checks:
            yield from (Line(name, NODES, answer) for answer in check())
        store.set(f"asked/{me.node}", "")
        wait_for_keys(store, [f"asked/{node.node}" for node in nodes], 10 * _CONNECT_S)


def _own_address(facts: Facts) -> str:
    """The address of the interface that reaches node 0; loopback if it is unknown."""
    route = route_to_master(facts)
    found = ips(up_interfaces(), route) if route else []
    return found[0] if found else "127.0.0.1"


@contextmanager
def _mark(folder: Path, is_wanted: bool) -> Iterator[str]:
    """Make a file in `folder` for the other nodes to look for, and yield its path; "" if that is not possible."""
    path = folder / f".ddpilot-doctor-{secrets.token_hex(4)}"
    with suppress(OSError):
        if is_wanted:
            path.touch()
    try:
        yield str(path) if path.exists() else ""
    finally:
        path.unlink(missing_ok=True)


def _reach(me: _Node, others: Sequence[_Node]) -> Iterator[Answer]:
    """Connect to each other node, and compare clocks with node 0."""
    reached = []
    for node in others:
        place = f"node {node.node} ({node.host}) at {node.address}:{node.port}"
        try:
            reply = ask_clock(node.address, node.port, _CONNECT_S)
        except OSError as error:
            summary = f"node {me.node} ({me.host}) cannot connect to {place}: {error.strerror or error}"
            yield make_finding("DDP104", summary=summary, fix=_OPEN_PORTS)
            continue
        reached.append(f"{node.node} ({node.address})")
        if node.node == 0 and abs(reply.offset_s) > _CLOCK_S + reply.error_s:
            summary = f"the clock of node 0 is {reply.offset_s:+.2f} s off that of node {me.node} ({me.host})"
            yield make_finding("DDP805", summary=f"{summary}, measured to {reply.error_s * 1000:.1f} ms")
    if reached:
        yield f"from {me.address} node {', '.join(reached)} can be reached on a free port"


_OPEN_PORTS = (
    "Open all TCP ports between the nodes (gloo and NCCL use free ones), "
    "or name the right interface (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)"
)


def _see(folder: Path, first: _Node) -> Iterator[Answer]:
    """Look for the file that node 0 has made in its checkpoint folder."""
    if not first.mark:
        yield f"node 0 could not make a file in {folder}"
        return
    deadline_s = time.monotonic() + _VISIBLE_S
    while not (seen := Path(first.mark).exists()) and time.monotonic() < deadline_s:
        with suppress(OSError):
            os.listdir(Path(first.mark).parent)  # makes NFS look again
        time.sleep(0.05)
    if seen:
        yield f"a file of node 0 in {Path(first.mark).parent} is visible"
    else:
        yield make_finding("DDP806", summary=f"{Path(first.mark).parent} does not have the file that node 0 made there")


def _gather(store: Store, facts: Facts, topology: Topology, absent: Finding | None, timeout_s: float) -> Diagnosis:
    """On rank 0: merge the lines of all nodes, and check what all ranks reported."""
    num, nodes = topology.world_size, range(topology.nnodes)
    if absent is None:
        wait_for_keys(store, [f"report/{rank}" for rank in range(num)], 3 * timeout_s)
    wait_for_keys(store, [f"lines/{node}" for node in nodes], _CONNECT_S)
    texts = [store.get(key) for rank in range(num) if store.check([key := f"report/{rank}"])]
    ranks = tuple(RankReport(**json.loads(text)) for text in texts)
    by_node = {
        node: [Line.from_dict(line) for line in json.loads(store.get(f"lines/{node}"))]
        for node in nodes
        if store.check([f"lines/{node}"])
    }
    facts = replace(facts, ranks=ranks, live_failure=absent)
    lines = (*merge_nodes(by_node), *run_checks(facts, ("ranks",)))
    title = f"doctor: {num} ranks on {topology.nnodes} node{'s' * (topology.nnodes > 1)}"
    return Diagnosis(title, lines, tuple(suggest_settings(facts, lines)))
