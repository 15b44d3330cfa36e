# SPDX-License-Identifier: Apache-2.0
"""``ddpilot doctor --nodes``: every rank of a job checks its node and the way to the others. Imports torch."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace

from torch._C._distributed_c10d import PrefixStore, Store

from ddpilot.diagnose.agreement import check_mtu, check_names, read_mtu, resolve_names
from ddpilot.diagnose.checks.filesystem import existing_folder
from ddpilot.diagnose.checks.network import host_name, route_to_master
from ddpilot.diagnose.diagnosis import NODES, Diagnosis, Line, merge_nodes
from ddpilot.diagnose.facts import Answer, Facts, RankReport, explain_error
from ddpilot.diagnose.nccl_log import suggest_settings
from ddpilot.diagnose.ranks import examine_rank
from ddpilot.diagnose.reachability import Node, check_reachability, check_shared_folder, make_mark
from ddpilot.diagnose.registry import run_checks
from ddpilot.environments.topology import Topology
from ddpilot.errors import RendezvousError
from ddpilot.findings.catalog import find_known, make_finding
from ddpilot.findings.finding import Finding
from ddpilot.group.measurements import ClockServer
from ddpilot.group.store import connect_store, resolve_endpoint, wait_for_keys
from ddpilot.launching.elastic.rendezvous.network import ips, up_interfaces

_GLOO = "GLOO_SOCKET_IFNAME"
_READ_S = 3.0
"""Seconds that the other ranks have to read rank 0's diagnosis, and the other nodes' lines may be late."""
_NODES_S = 30.0
"""Seconds that a node may take to check its way to the others."""


def examine_job(facts: Facts, topology: Topology, timeout_s: float) -> Diagnosis:
    """Check all nodes of the job that this rank belongs to. Collective; returns the same diagnosis on every rank.

    On a rank that cannot reach rank 0, the diagnosis is about its node alone. `timeout_s`: seconds to wait for the
    other ranks, and timeout of the group.
    """
    lines = list(run_checks(facts, ("machine",))) if topology.local_rank == 0 else []
    try:
        return _examine_together(facts, topology, lines, timeout_s)
    except RendezvousError as error:
        codes = [entry.code for entry in find_known(str(error))]
        finding = explain_error(error, "DDP104" if "DDP104" in codes or not topology.is_rank_zero else "DDP103")
    except RuntimeError as error:  # the store's connection
        text = str(error).splitlines()[0]
        finding = make_finding("DDP209", ranks=[0], summary=f"rank {topology.rank} lost the store of rank 0: {text}")
    known = any(isinstance(line.answer, Finding) and line.answer.code == finding.code for line in lines)
    lines += [] if known else [Line("store", NODES, finding)]
    title = f"doctor: node {topology.node_rank} ({socket.gethostname()}) without rank 0"
    return Diagnosis(title, tuple(lines), is_shown=topology.local_rank == 0)


def _connect(facts: Facts, topology: Topology, timeout_s: float) -> Store:
    return connect_store(resolve_endpoint(topology, facts.environ), timeout_s)


def _examine_together(facts: Facts, topology: Topology, lines: list[Line], timeout_s: float) -> Diagnosis:
    """Wait for the other ranks, check what needs them, and return rank 0's diagnosis. Collective."""
    base = _connect(facts, topology, timeout_s)
    part = f"doctor/{base.add(f'doctor/calls/{topology.rank}', 1)}"  # without the keys of an earlier call
    store: Store = PrefixStore(part, base)
    absent = _wait_for_ranks(store, topology, timeout_s)
    if absent is None:
        if topology.local_rank == 0:
            lines += _check_other_nodes(store, facts, topology)
        can_connect = _can_nodes_connect(store, topology)
        with _route_for_gloo(facts):
            report = examine_rank(timeout_s if can_connect else None, facts.script)
        if report.failure is not None:  # taking down a broken group closes this process's connections to the store
            store = PrefixStore(part, _connect(facts, topology, timeout_s))
        store.set(f"report/{topology.rank}", json.dumps(asdict(report)))
    if topology.local_rank == 0:
        store.set(f"lines/{topology.node_rank}", json.dumps([line.to_dict() for line in lines]))
    if topology.is_rank_zero:
        found = _gather(store, facts, topology, absent, timeout_s)
        store.set("diagnosis", json.dumps(found.to_dict()))
        # The store ends with this process: the other ranks read the diagnosis first.
        wait_for_keys(store, [f"read/{rank}" for rank in _others(topology, absent)], _READ_S)
        return found
    if not wait_for_keys(store, ["diagnosis"], _NODES_S + 10 * timeout_s):
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


@contextmanager
def _route_for_gloo(facts: Facts) -> Iterator[None]:
    """Let gloo use the route to node 0 where this host's own name would mislead it, as the finding suggests."""
    misleads = any(isinstance(answer, Finding) for answer in host_name(facts))
    route = route_to_master(facts) if misleads and _GLOO not in os.environ else None
    if route is None:
        yield
        return
    os.environ[_GLOO] = route
    try:
        yield
    finally:
        del os.environ[_GLOO]


def _check_other_nodes(store: Store, facts: Facts, topology: Topology) -> Iterator[Line]:
    """Yield the lines about the way from this node to each other one. Collective of the first rank of each node."""
    if facts.nnodes == 1:
        return
    address = _own_address(facts)
    folder = existing_folder(facts.checkpoint_dir)
    with ClockServer(address) as server, make_mark(folder, topology.node_rank == 0) as mark:
        interface = route_to_master(facts) or ""
        mtu = read_mtu(interface)
        me = Node(topology.node_rank, socket.gethostname(), address, server.port, mark, interface, mtu)
        store.set(f"node/{me.node}", json.dumps(asdict(me)))
        keys = [f"node/{node}" for node in range(topology.nnodes)]
        wait_for_keys(store, keys, _NODES_S)
        nodes = [Node(**json.loads(store.get(key))) for key in keys if store.check([key])]
        others = [node for node in nodes if node.node != me.node]
        reach, see = list(check_reachability(me, others)), list(check_shared_folder(folder, nodes[0]))
        yield from (Line("reachability", NODES, answer) for answer in reach)
        yield from (Line("shared_folder", NODES, answer) for answer in see)
        yield from _compare_nodes(store, me, nodes)
        store.set(f"reached/{me.node}", json.dumps(_is_connected(reach)))
        wait_for_keys(store, [f"reached/{node.node}" for node in nodes], _NODES_S)


def _compare_nodes(store: Store, me: Node, nodes: Sequence[Node]) -> Iterator[Line]:
    """On node 0, yield the lines about what all nodes need to have in common. Collective of these nodes."""
    hosts = {node.node: node.host for node in nodes}
    store.set(f"names/{me.node}", json.dumps(resolve_names(list(hosts.values()))))
    if me.node != 0:
        return
    keys = {node: f"names/{node}" for node in hosts}
    wait_for_keys(store, list(keys.values()), _NODES_S)
    tables = {node: json.loads(store.get(key)) for node, key in keys.items() if store.check([key])}
    yield from (Line("names", NODES, answer) for answer in check_names(hosts, tables))
    mtus = {node.node: (node.interface, node.mtu) for node in nodes}
    yield from (Line("mtu", NODES, answer) for answer in check_mtu(hosts, mtus))


def _is_connected(reach: Sequence[Answer]) -> bool:
    return not any(isinstance(answer, Finding) and answer.code == "DDP104" for answer in reach)


def _can_nodes_connect(store: Store, topology: Topology) -> bool:
    """True if every node has reached each other one. Collective, since a group would wait for its timeout otherwise."""
    if topology.nnodes == 1:
        return True
    keys = [f"reached/{node}" for node in range(topology.nnodes)]
    return wait_for_keys(store, keys, 2 * _NODES_S) and all(json.loads(store.get(key)) for key in keys)


def _own_address(facts: Facts) -> str:
    """The address of the interface that reaches node 0; loopback if it is unknown."""
    route = route_to_master(facts)
    found = ips(up_interfaces(), route) if route else []
    return found[0] if found else "127.0.0.1"


def _gather(store: Store, facts: Facts, topology: Topology, absent: Finding | None, timeout_s: float) -> Diagnosis:
    """On rank 0: merge the lines of all nodes, and check what all ranks reported."""
    num, nodes = topology.world_size, range(topology.nnodes)
    if absent is None:
        wait_for_keys(store, [f"report/{rank}" for rank in range(num)], 6 * timeout_s)
    wait_for_keys(store, [f"lines/{node}" for node in nodes], _READ_S)
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
    return Diagnosis(title, lines, tuple(suggest_settings(facts, lines)), facts.ranks)
