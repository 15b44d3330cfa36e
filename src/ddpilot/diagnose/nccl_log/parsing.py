# SPDX-License-Identifier: Apache-2.0
"""Parse NCCL's log: which network, interfaces, cards and paths its processes use. Does not import torch."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

_PREFIX = re.compile(
    r"(?P<host>[\w.-]+):(?P<pid>\d+):\d+ \[-?\d+\] (?:\S+:\d+ )?(?:NCCL )?(?P<level>INFO|WARN|TRACE) (?P<text>.*)"
)
"""Versions before 2.4 write no "NCCL" before the level; launchers put labels and times in front."""
_VERSION = re.compile(r"NCCL version (\d+\.\d+(?:\.\d+)?\S*)")
_SET = re.compile(r"(NCCL_\w+) set (?:by environment )?to (\S+)")
_BOOTSTRAP = re.compile(r"Bootstrap ?: Using (.*)")
_SOCKET = re.compile(r"NET/Socket ?: Using (.*)")
_CARDS = re.compile(r"NET/IB ?: Using (.*?)(?:; OOB .*)?$")
_INTERFACE = re.compile(r"(?:\[\d+\])?([\w.@-]+):([0-9a-fA-F.:]+(?:%\S+)?|[^\s:<]+:[^\s<]+)<\d+>")
_CARD = re.compile(r"\[\d+\]([\w.-]+:\d+)/(\w+)")
_NETWORK = re.compile(r"Using network (.+)")
_PATH = re.compile(
    r"(?:Channel|Ring) (?P<channel>\d+)(?:/\d+)? ?: (?P<a>\d+)(?:\[\w+\])? -> (?P<b>\d+)(?:\[\w+\])?"
    r"(?: \[(?P<way>send|receive)\])? via (?P<via>\S+(?: pointer| shared memory)?)"
)
_RING = re.compile(r"Channel (\d+)/\d+ ?: +((?:\d+ *)+)$")
_INIT = re.compile(r"rank (\d+) nranks (\d+) ")
_PLUGIN = re.compile(r"NET/Plugin ?: (?:Loaded net plugin|Plugin name set by env to) (\S+)|NET/OFI (?:Selected|Using) ")


@dataclass
class Process:
    """The log lines of one process of a job, parsed."""

    host: str
    pid: int
    bootstrap: dict[str, str] = field(default_factory=dict)
    """Interfaces for the first contact: address by name."""
    sockets: dict[str, str] = field(default_factory=dict)
    """Interfaces for data over TCP: address by name."""
    cards: dict[str, str] = field(default_factory=dict)
    """InfiniBand cards: "IB" or "RoCE" by name and port."""
    has_no_card: bool = False
    network: str = ""
    """The chosen network, such as "Socket" or "IB"."""
    ranks: dict[int, int] = field(default_factory=dict)
    """Size of the group by rank of the process in it, of groups that it began to join."""
    complete: set[int] = field(default_factory=set)
    """Ranks whose groups are complete."""
    paths: dict[tuple[int, int], str] = field(default_factory=dict)
    """Path by pair of ranks, such as "P2P/IPC", "SHM/direct/direct" or "NET/Socket/0"."""


@dataclass
class NcclLog:
    """The parsed log lines of all processes of a job."""

    versions: Counter[str] = field(default_factory=Counter)
    processes: dict[tuple[str, int], Process] = field(default_factory=dict)
    variables: dict[str, set[str]] = field(default_factory=dict)
    """Values by name of the variables that NCCL has read."""
    warnings: Counter[str] = field(default_factory=Counter)
    """Warnings, without the place in NCCL's source, and how often they came."""
    notes: set[str] = field(default_factory=set)
    """Lines of interest that are not warnings."""
    rings: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Ranks by channel."""
    has_trees: bool = False
    num_lines: int = 0
    """Lines of NCCL."""

    @property
    def hosts(self) -> dict[str, list[Process]]:
        """Processes by host."""
        found: dict[str, list[Process]] = {}
        for process in self.processes.values():
            found.setdefault(process.host, []).append(process)
        return found

    def host_of(self) -> Mapping[int, str]:
        """Return the host of each rank of the largest group."""
        size = max((size for process in self.processes.values() for size in process.ranks.values()), default=0)
        return {
            rank: process.host
            for process in self.processes.values()
            for rank, group in process.ranks.items()
            if group == size
        }


def parse_nccl_log(lines: Iterable[str]) -> NcclLog:
    """Parse `lines`, which may have other lines between and labels in front."""
    log = NcclLog()
    for line in lines:
        version = _VERSION.search(line)
        if version is not None:
            log.versions[version[1]] += 1
        found = _PREFIX.search(line.rstrip())
        if found is None:
            continue
        log.num_lines += 1
        key = (found["host"], int(found["pid"]))
        process = log.processes.setdefault(key, Process(*key))
        if found["level"] == "WARN":
            log.warnings[found["text"]] += 1
        else:
            _read(log, process, found["text"])
    return log


def _read(log: NcclLog, process: Process, text: str) -> None:
    if found := _PATH.search(text):
        process.paths[int(found["a"]), int(found["b"])] = found["via"]
    elif found := _RING.search(text):
        log.rings[int(found[1])] = tuple(map(int, found[2].split()))
    elif text.startswith("Trees [") or "Connected all trees" in text:
        log.has_trees = True
    elif found := _SET.search(text):
        log.variables.setdefault(found[1], set()).add(found[2].rstrip("."))
    elif found := _BOOTSTRAP.search(text):
        process.bootstrap = dict(_INTERFACE.findall(found[1]))
    elif found := _SOCKET.search(text):
        process.sockets = dict(_INTERFACE.findall(found[1]))
    elif found := _CARDS.search(text):
        process.cards = dict(_CARD.findall(found[1]))
    elif "NET/IB" in text and "No device found" in text:
        process.has_no_card = True
    elif (found := _NETWORK.search(text)) or (found := _PLUGIN.search(text)):
        process.network = found[1] or "OFI"
    elif (found := _INIT.search(text)) and "comm " in text:
        process.ranks[int(found[1])] = int(found[2])
        if "Init COMPLETE" in text:
            process.complete.add(int(found[1]))
    elif "GPU Direct RDMA Disabled" in text or text.startswith("P2P is disabled between"):
        log.notes.add(text)
