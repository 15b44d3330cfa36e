# SPDX-License-Identifier: Apache-2.0
"""Parse NCCL's log and say what it means, and suggest settings of gloo and NCCL, each with its evidence."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ddpilot.diagnose.checks.network import TRAPS, nccl_interfaces, route_to_master
from ddpilot.diagnose.diagnosis import Diagnosis, Line
from ddpilot.diagnose.facts import Answer, Facts
from ddpilot.errors import LaunchError
from ddpilot.findings.catalog import find_known, make_finding
from ddpilot.findings.text import render_ranks
from ddpilot.launching.elastic.rendezvous.network import up_interfaces


def suggest_settings(facts: Facts, lines: tuple[Line, ...]) -> Iterator[str]:
    """Lines to paste into a shell, with the evidence as a comment; none if the defaults are right.

    `lines`: of the checks, for settings that help to find a fault.
    """
    given = facts.environ
    if facts.nnodes > 1 and (route := route_to_master(facts)):
        why = f"# {route} is the route to node 0 ({facts.topology.master_addr if facts.topology else ''})"
        names = up_interfaces()
        if "GLOO_SOCKET_IFNAME" not in given:
            yield f"export GLOO_SOCKET_IFNAME={route}  {why}"
        if "NCCL_SOCKET_IFNAME" not in given and (taken := nccl_interfaces(names, "")) != [route]:
            traps = [name for name in taken if name.startswith(TRAPS)]
            yield f"export NCCL_SOCKET_IFNAME={route}  {why}; NCCL would take {', '.join(traps or taken)}"
        yield from _suggest_infiniband(facts)
    failed = [line for line in lines if line.subject == "live" and line.status == "error"]
    if failed and any(report.versions.get("devices") for report in facts.ranks):
        yield f"export NCCL_DEBUG=INFO  # {failed[0].check} failed: NCCL then prints which path it takes"
        if "NCCL_P2P_DISABLE" not in given and any(
            line.check == "peer_access" and line.status != "ok" for line in lines
        ):
            yield "export NCCL_P2P_DISABLE=1  # NVML reports pairs without peer-to-peer access, and live checks failed"


def _suggest_infiniband(facts: Facts) -> Iterator[str]:
    ports = read_infiniband_ports(facts.root)
    active = sorted({card for card, state in ports.items() if state == "ACTIVE"})
    down = sorted(set(ports) - set(active))
    if active and down and "NCCL_IB_HCA" not in facts.environ:
        yield f"export NCCL_IB_HCA={','.join(active)}  # ports that are ACTIVE; {', '.join(down)}: not"
    if down and not active and "NCCL_IB_DISABLE" not in facts.environ:
        yield f"export NCCL_IB_DISABLE=1  # no port of {', '.join(down)} is ACTIVE"


def read_infiniband_ports(root: Path) -> dict[str, str]:
    """State of each InfiniBand card: "ACTIVE" if one of its ports is, otherwise that of its last port."""
    states: dict[str, str] = {}
    for path in sorted((root / "sys/class/infiniband").glob("*/ports/*/state")):
        card = path.parents[2].name
        state = path.read_text().strip().rpartition(": ")[2]  # "4: ACTIVE"
        if states.get(card) != "ACTIVE":
            states[card] = state
    return states


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


RECORD = "NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,GRAPH,ENV,NET NCCL_DEBUG_FILE=nccl.%h.%p.log"
"""How to record a log: one file for each process, %h its host and %p its number."""
_SUBJECT = "nccl_log"
_NOT_AVAILABLE = (*TRAPS, "lo", "ip6tnl", "tun")
_WARNINGS = (
    (r"P2P is disabled between NVLINK", "DDP108", "Reset or replace the GPUs: NVLink pairs always have it"),
    (r"shared memory segment|/dev/shm", "DDP801", "Enlarge /dev/shm: `docker run --shm-size=8g`, or `--ipc=host`"),
    (r"Duplicate GPU detected", "DDP118", "Call `torch.cuda.set_device(LOCAL_RANK)` before the first collective"),
    (
        r"ibv_(reg_mr|create_[cq]q|create_qp)\S* failed|Cannot allocate memory",
        "DDP801",
        "Run with `ulimit -l unlimited`",
    ),
    (r"no socket interface found", "DDP107", "Name an interface that is up: `NCCL_SOCKET_IFNAME=eth0`"),
    (
        r"NET/IB ?: Got completion .*(status|error)[= ](12|5)\b|vendor err 129",
        "DDP807",
        "The cards do not reach each other: compare `ibstat` of both nodes, and with RoCE `NCCL_IB_GID_INDEX`",
    ),
    (
        r"[Cc]onnect\w* .*(failed|returned|refused)|Connection (refused|timed out|reset)|No route to host|unreachable",
        "DDP107",
        "Name the interface that both nodes have in one network: `NCCL_SOCKET_IFNAME=eth0`; open all TCP ports between",
    ),
    (r"iommu|ACS", "DDP108", "Boot with `iommu=pt`, and turn ACS off for PCIe switches"),
    (r"numa_balancing|NUMA auto balancing", "DDP801", "`sudo sysctl kernel.numa_balancing=0`"),
)
"""Pattern of a warning, code and fix. The first that matches counts."""
_HARMLESS = re.compile(r"Failed to open libibverbs|NET/Plugin")


def read_nccl_log(paths: Sequence[str]) -> Diagnosis:
    """Return what the log in `paths` means. Raises LaunchError if a file cannot be read, or NCCL wrote none of it."""
    texts = []
    for path in paths:
        try:
            texts.append(Path(path).read_text("utf-8", errors="replace"))
        except OSError as error:
            fix = "Give the files that NCCL_DEBUG_FILE named, or the output of the job"
            raise LaunchError(f"reading {path}", found=error.strerror or str(error), fix=fix) from error
    log = parse_nccl_log(line for text in texts for line in text.splitlines())
    if not log.num_lines:
        found = "no line of NCCL"
        raise LaunchError(f"reading {', '.join(paths)}", found=found, fix=f"Record one: `{RECORD} ddpilot run ...`")
    lines = tuple(Line(check.__name__, _SUBJECT, answer) for check in _CHECKS for answer in check(log))
    hosts = f"{len(log.processes)} process{'es' * (len(log.processes) > 1)} on {len(log.hosts)} host"
    return Diagnosis(f"NCCL's log: {hosts}{'s' * (len(log.hosts) > 1)}", lines, tuple(_suggest(log)))


def version(log: NcclLog) -> Iterator[Answer]:
    """All processes have one version."""
    if len(log.versions) > 1:
        summary = f"processes have several versions of NCCL: {', '.join(sorted(log.versions))}"
        yield make_finding("DDP802", summary=summary, fix="Install the same torch in all environments of the job")
    elif log.versions:
        yield f"NCCL {next(iter(log.versions))}"


def warnings(log: NcclLog) -> Iterator[Answer]:
    """Warnings of NCCL, with what to do where that is known."""
    for text, num in log.warnings.items():
        if _HARMLESS.search(text):
            continue
        times = f" ({num} times)" if num > 1 else ""
        known = next(((code, fix) for pattern, code, fix in _WARNINGS if re.search(pattern, text)), None)
        pages = find_known(f"NCCL WARN {text}")
        if known is None and not pages:
            yield f"warning of NCCL{times}: {text}"
            continue
        code, fix = known or (pages[0].code, "")
        yield make_finding(code, summary=f"NCCL warned{times}: {text}", why="", fix=fix)


def groups(log: NcclLog) -> Iterator[Answer]:
    """Every rank that began to join a group has joined it."""
    began = {rank: size for each in log.processes.values() for rank, size in each.ranks.items()}
    done = {rank for each in log.processes.values() for rank in each.complete}
    absent = sorted(set(began) - done) if done or log.warnings else []
    if absent:
        summary = f"{render_ranks(absent)} began to join a group of {max(began.values())} ranks, and did not join it"
        fix = "Look at NCCL's warnings of these ranks and of those that they connect to"
        yield make_finding("DDP105", summary=summary, ranks=absent, why="", fix=fix)
    elif began:
        yield f"{len(began)} of {max(began.values())} ranks have joined"


def network(log: NcclLog) -> Iterator[Answer]:
    """The network between hosts: InfiniBand, RoCE or TCP."""
    names = Counter(each.network for each in log.processes.values() if each.network)
    if len(names) > 1:
        by_host = {host: sorted({each.network for each in some if each.network}) for host, some in log.hosts.items()}
        evidence = [f"{host}: {', '.join(found)}" for host, found in by_host.items()]
        summary = f"processes use several networks, {' and '.join(sorted(names))}, which cannot talk to each other"
        fix = "Set the same NCCL variables on all nodes, and NCCL_IB_DISABLE=1 where one has no card"
        yield make_finding("DDP107", summary=summary, evidence=evidence, fix=fix, why="")
        return
    chosen = next(iter(names), "")
    is_off = log.variables.get("NCCL_IB_DISABLE", set()) - {"0"}
    has_cards = any(each.cards for each in log.processes.values())
    if chosen == "Socket" and len(log.hosts) > 1 and is_off:
        yield make_finding(
            "DDP807",
            summary="hosts exchange data over TCP, since NCCL_IB_DISABLE=1 turns InfiniBand and RoCE off",
            why="",
            fix="If the nodes have cards (`ibstat`), set `NCCL_IB_DISABLE=0` and name them with NCCL_IB_HCA",
            severity="info",
        )
    elif chosen == "Socket":
        why = "no InfiniBand card was found" if not has_cards else "although there are InfiniBand cards"
        yield f"TCP (NET/Socket): {why}"
    elif chosen == "IB":
        kinds = Counter(kind for each in log.processes.values() for kind in each.cards.values())
        yield from _judge_cards(log, sorted(kinds))
    elif chosen:
        yield f"network {chosen}, of a plugin"


def _judge_cards(log: NcclLog, kinds: Sequence[str]) -> Iterator[Answer]:
    cards = sorted({f"{name} ({kind})" for each in log.processes.values() for name, kind in each.cards.items()})
    if len(kinds) > 1:
        yield make_finding(
            "DDP807",
            summary=f"NCCL uses cards of two kinds: {', '.join(cards)}",
            why="Buffers are divided evenly among cards, so that the slowest one counts",
            fix=f"Name those of one kind: `NCCL_IB_HCA={_one_kind(log)}`",
        )
    else:
        yield f"InfiniBand verbs over {', '.join(cards)}"
    paths = [via for each in log.processes.values() for via in each.paths.values() if via.startswith("NET/IB")]
    if paths and not any("GDRDMA" in via for via in paths):
        evidence = sorted(text for text in log.notes if "GPU Direct" in text)[:2]
        yield make_finding(
            "DDP807",
            summary="data goes through the memory of the host on its way to the card (no GDRDMA in NET/IB)",
            evidence=evidence,
            why="GPUDirect RDMA is not available: nvidia_peermem is not loaded, or GPU and card are far apart",
            fix="`sudo modprobe nvidia_peermem`; `nvidia-smi topo -m` shows distances (NCCL_NET_GDR_LEVEL)",
            severity="info",
        )


def _one_kind(log: NcclLog) -> str:
    cards = {name.partition(":")[0]: kind for each in log.processes.values() for name, kind in each.cards.items()}
    kind = "IB" if "IB" in cards.values() else next(iter(cards.values()))
    return ",".join(sorted(name for name, each in cards.items() if each == kind))


def interfaces(log: NcclLog) -> Iterator[Answer]:
    """Interfaces reach the other hosts, and are one for each host."""
    used = {
        host: dict(pair for each in some for pair in (*each.bootstrap.items(), *each.sockets.items()))
        for host, some in log.hosts.items()
    }
    traps = {
        host: [name for name in names if name.startswith(_NOT_AVAILABLE)]
        for host, names in used.items()
        if len(log.hosts) > 1
    }
    shown = [
        f"{host}: {', '.join(f'{name} {address}' for name, address in names.items())}" for host, names in used.items()
    ]
    best = _best_interface(log)
    if any(traps.values()):
        names = sorted({name for some in traps.values() for name in some})
        summary = f"NCCL uses {', '.join(names)}, which other hosts cannot reach"
        fix = f"`export NCCL_SOCKET_IFNAME={best or '^lo,docker,veth,virbr,br-'}`"
        yield make_finding("DDP107", summary=summary, evidence=shown, fix=fix)
    elif len(log.hosts) > 1 and (same := _shared_addresses(used)):
        summary = f"several hosts have the address {', '.join(same)}"
        yield make_finding("DDP107", summary=summary, evidence=shown, fix="Name an interface with NCCL_SOCKET_IFNAME")
    elif any(len(names) > 1 for names in used.values()):
        summary = "NCCL uses several interfaces of a host, and the slowest counts"
        fix = f"If they are not alike, name the fast one: `export NCCL_SOCKET_IFNAME={best}`"
        yield make_finding("DDP107", summary=summary, evidence=shown, fix=fix, why="", severity="info")
    elif any(used.values()):
        yield "; ".join(shown)


def _shared_addresses(used: dict[str, dict[str, str]]) -> list[str]:
    counts = Counter(address for names in used.values() for address in set(names.values()))
    return sorted(address for address, num in counts.items() if num > 1)


def _best_interface(log: NcclLog) -> str:
    """Return an interface that all hosts have and that others can reach; "" if there is none."""
    by_host = [
        {name for each in some for name in (*each.bootstrap, *each.sockets) if not name.startswith(_NOT_AVAILABLE)}
        for some in log.hosts.values()
    ]
    common = set.intersection(*by_host) if by_host else set()
    return min(common, default="")


def paths(log: NcclLog) -> Iterator[Answer]:
    """GPUs of one host copy directly."""
    host_of = log.host_of()
    kinds: Counter[str] = Counter()
    inside: Counter[str] = Counter()
    for process in log.processes.values():
        for pair, via in process.paths.items():
            kind = "SHM" if via.startswith(("SHM", "direct shared")) else via.partition("/")[0]
            kinds["/".join(via.split("/")[:2]) if kind == "NET" else kind] += 1
            hosts = {host_of.get(rank) for rank in pair}
            if kind != "NET" or (len(hosts) == 1 and None not in hosts):
                inside[kind] += 1
    if inside["SHM"] or inside["NET"]:
        yield _explain_detour(log, inside)
    if kinds:
        yield "paths: " + ", ".join(f"{num} {kind}" for kind, num in kinds.most_common())


def _explain_detour(log: NcclLog, inside: Counter[str]) -> Answer:
    through = "the network" if inside["NET"] else "the memory of the host"
    is_off = [name for name in ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE") if log.variables.get(name, set()) - {"0"}]
    notes = sorted(text for text in log.notes if text.startswith("P2P"))[:2]
    num = inside["NET"] or inside["SHM"]
    fix = (
        f"Unset {' and '.join(is_off)}, unless the first collective never ends without"
        if is_off
        else "`nvidia-smi topo -p2p r` shows which pairs can; containers of a host need one /dev/shm and all GPUs"
    )
    return make_finding(
        "DDP108",
        summary=f"GPUs of one host exchange data through {through}: {num} paths, {inside['P2P']} by direct copies",
        evidence=[*(f"{name}=1" for name in is_off), *notes],
        why="Direct copies are turned off" if is_off else "The machine, its driver or the container forbids them",
        fix=fix,
        severity="warning",
    )


def rings(log: NcclLog) -> Iterator[Answer]:
    """Channels that NCCL has made."""
    if log.rings:
        first = " ".join(map(str, log.rings[min(log.rings)]))
        trees = ", and trees" if log.has_trees else ""
        yield f"{len(log.rings)} rings{trees}; the first is {first}"


def variables(log: NcclLog) -> Iterator[Answer]:
    """Variables that NCCL has read; those that it does not know are not among them."""
    for name, values in sorted(log.variables.items()):
        if len(values) > 1:
            yield make_finding(
                "DDP802",
                summary=f"{name} differs between processes: {', '.join(sorted(values))}",
                why="",
                fix="Set it to the same value on all nodes",
            )
    if log.variables:
        yield "read: " + ", ".join(f"{name}={min(values)}" for name, values in sorted(log.variables.items()))


_CHECKS = (version, warnings, groups, network, interfaces, paths, rings, variables)


def _suggest(log: NcclLog) -> Iterator[str]:
    """Yield lines to paste into a shell, with the evidence as a comment."""
    best = _best_interface(log)
    is_set = "NCCL_SOCKET_IFNAME" in log.variables
    if len(log.hosts) > 1 and best and not is_set:
        yield f"export NCCL_SOCKET_IFNAME={best}  # all hosts of the log have it"
    uses_cards = any(each.network == "IB" for each in log.processes.values())
    has_none = all(each.has_no_card or not each.cards for each in log.processes.values())
    if len(log.hosts) > 1 and has_none and not uses_cards and "NCCL_IB_DISABLE" not in log.variables:
        yield "export NCCL_IB_DISABLE=1  # no host of the log has an InfiniBand card: NCCL need not look for one"
    kinds = {kind for each in log.processes.values() for kind in each.cards.values()}
    if uses_cards and len(kinds) > 1 and "NCCL_IB_HCA" not in log.variables:
        yield f"export NCCL_IB_HCA={_one_kind(log)}  # cards of one kind; the log has {' and '.join(sorted(kinds))}"
