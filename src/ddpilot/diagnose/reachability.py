# SPDX-License-Identifier: Apache-2.0
"""Nodes connect to each other, compare their clocks and look for a file of node 0; links of ranks."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from ddpilot.diagnose.facts import Answers
from ddpilot.diagnose.gpus import read_gpu_states
from ddpilot.findings.catalog import make_finding
from ddpilot.group.measurements import Reply, ask_clock

LOOPBACK = "loopback"
_CONNECT_S = 3.0
_MAX_AT_ONCE = 32
_VISIBLE_S = 2.0
"""Seconds after which a file of node 0 has to be visible: network file systems cache a folder's names."""
_CLOCK_S = 0.5
"""Difference of clocks that is reported."""


@dataclass(frozen=True)
class Node:
    """Message of a node to the others: the port of its clock server, its interface and that one's MTU in bytes.

    `mark`: on node 0, the file to look for.
    """

    node: int
    host: str
    address: str
    port: int
    mark: str = ""
    interface: str = ""
    mtu: int | None = None


@contextmanager
def make_mark(folder: Path, is_wanted: bool) -> Iterator[str]:
    """Make a file in `folder` for the other nodes to look for, and yield its path; "" if that is not possible."""
    path = folder / f".ddpilot-doctor-{secrets.token_hex(4)}"
    with suppress(OSError):
        if is_wanted:
            path.touch()
    try:
        yield str(path) if path.exists() else ""
    finally:
        with suppress(OSError):
            path.unlink()


def check_reachability(me: Node, others: Sequence[Node]) -> Answers:
    """Connect to each other node, and compare clocks with node 0."""
    reached = []
    with ThreadPoolExecutor(_MAX_AT_ONCE) as pool:
        replies = list(pool.map(_ask, others))
    for node, reply in zip(others, replies, strict=True):
        if isinstance(reply, OSError):
            place = f"node {node.node} ({node.host}) at {node.address}:{node.port}"
            summary = f"node {me.node} ({me.host}) cannot connect to {place}: {reply.strerror or reply}"
            yield make_finding("DDP104", summary=summary, fix=_OPEN_PORTS)
            continue
        reached.append(f"{node.node} ({node.address})")
        if node.node == 0 and abs(reply.offset_s) > _CLOCK_S + reply.error_s:
            summary = f"the clock of node 0 is {reply.offset_s:+.2f} s off that of node {me.node} ({me.host})"
            yield make_finding("DDP805", summary=f"{summary}, measured to {reply.error_s * 1000:.1f} ms")
    if reached:
        yield f"from {me.address} node {', '.join(reached)} can be reached on a free port"


def _ask(node: Node) -> Reply | OSError:
    try:
        return ask_clock(node.address, node.port, _CONNECT_S)
    except OSError as error:
        return error


_OPEN_PORTS = (
    "Open all TCP ports between the nodes (gloo and NCCL use free ones), "
    "or name the right interface (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)"
)


def check_shared_folder(folder: Path, first: Node) -> Answers:
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


def find_link(uuid: str, nnodes: int, nvml: Any = None) -> tuple[str, float | None]:
    """The link of a rank to other ranks, and its bytes per second in one direction; None if unknown.

    `uuid`: of the NVIDIA device whose backend exchanges the data, "" if that is gloo.
    """
    if nnodes > 1:
        name = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
        return name or "the network", _interface_speed(name)
    if not uuid:
        return LOOPBACK, None
    for state in read_gpu_states(nvml):
        if state.uuid.removeprefix("GPU-") == uuid.removeprefix("GPU-"):
            kind = f"NVLink ({state.num_nvlinks} links)" if state.num_nvlinks else "PCIe"
            return kind, state.link_bytes_per_s
    return "an unknown link", None


def _interface_speed(name: str) -> float | None:
    """Bytes per second of a network card; None for a virtual interface, whose speed is nominal."""
    stats = psutil.net_if_stats().get(name)
    is_card = os.path.exists(f"/sys/class/net/{name}/device")
    return stats.speed * 1e6 / 8 if stats is not None and stats.speed and is_card else None
