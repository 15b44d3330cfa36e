# SPDX-License-Identifier: Apache-2.0
"""`RankStatus`, what one rank is doing at one moment, and its stack."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import psutil

from ddpilot.environments.nvml import GpuUse, read_gpus
from ddpilot.errors import RecordError
from ddpilot.module_names import SESSION_REQUESTS
from ddpilot.record.flight_ring.reader import find_waiting, read_newest
from ddpilot.record.hook import ring_path
from ddpilot.user_files import CodeLine

if TYPE_CHECKING:
    from ddpilot.session.kernels.manager import RankKernels

_NODE_LIMIT_S = 3.0
State = Literal["idle", "busy", "dead"]
Family = list[psutil.Process]


@dataclass(frozen=True, kw_only=True)
class CollectiveStatus:
    """A collective or point-to-point operation that a rank has begun and that is not known to have ended."""

    op: str
    """Name of the operation in PyTorch's spelling, such as ``all_reduce``."""
    since_s: float
    """Start time on the monotonic clock."""
    site: str = ""
    """The user's line, such as ``Cell In[7]:3``; empty if not known."""
    group: str = ""
    """Name of the process group; empty for the default group."""
    seq: int | None = None
    """Sequence number in the group, from 0; None for point-to-point operations."""
    is_watched: bool = True
    """False if the backend (NCCL) does not report the end of the operation, so that it may have ended."""


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """Status of one rank. Usage is None if not known: for dead ranks, and GPU usage without a GPU."""

    rank: int
    state: State
    since_s: float
    """Time of the last change of state, on the monotonic clock."""
    pid: int | None = None
    node: str = ""
    """The machine on which it runs; empty for this one."""
    cell: int | None = None
    """Number of the cell that it is running; None if it runs none, or something other than a cell."""
    collective: CollectiveStatus | None = None
    cpu_percent: float | None = None
    """CPU usage of the process and its children, in percent of one core: 200 is two cores."""
    memory_bytes: int | None = None
    """Memory of the process and its children; pages shared by several processes are divided between them."""
    gpu_percent: float | None = None
    """Utilization of its GPU by all processes."""
    gpu_memory_bytes: int | None = None
    reason: str = ""
    """How it died, such as ``was killed by SIGKILL``; empty if it is alive."""


def read_statuses(kernels: RankKernels) -> tuple[RankStatus, ...]:
    """Return the status of every rank, in rank order. Takes a tenth of a second, in which CPU usage is measured."""
    nodes = kernels.processes.nodes
    if nodes is not None:
        usage = nodes.ask("usage", kernels.states.live, _NODE_LIMIT_S)
        names = {rank: nodes.node_of(rank).name for rank in range(kernels.world_size)}
    else:
        pids = {rank: pid for rank in kernels.states.live if (pid := kernels.processes.pid(rank)) is not None}
        by_pid = collect_usage(pids.values())
        usage = {rank: {"pid": pid, **by_pid.get(pid, {})} for rank, pid in pids.items()}
        names = {}
    return tuple(_status(kernels, rank, names.get(rank, ""), usage.get(rank, {})) for rank in range(kernels.world_size))


def _status(kernels: RankKernels, rank: int, node: str, usage: Mapping[str, Any]) -> RankStatus:
    reason, running = kernels.states.dead.get(rank), kernels.states.busy.get(rank)
    idle_since_s = kernels.states.since_s.get(rank, time.monotonic())
    state: State = "dead" if reason is not None else "busy" if running is not None else "idle"
    return RankStatus(
        rank=rank,
        state=state,
        since_s=running[1] if state == "busy" and running is not None else idle_since_s,
        node=node,
        cell=running[0] if running is not None else None,
        collective=None if reason is not None else _collective(kernels, rank),
        **usage,
        reason=reason or "",
    )


def _collective(kernels: RankKernels, rank: int) -> CollectiveStatus | None:
    try:
        entry = find_waiting(read_newest(ring_path(kernels.ring_folder, rank)))
    except (RecordError, OSError):  # no ring: the status has no collective
        return None
    if entry is None:
        return None
    is_default = entry.group is None or entry.group.description in ("default_pg", "") or entry.group.size == 0
    return CollectiveStatus(
        op=entry.op,
        since_s=entry.start_ns / 1e9,
        site=entry.line.place if entry.line is not None else "",
        group="" if is_default or entry.group is None else entry.group.description or entry.group.name,
        seq=entry.seq,
        is_watched=entry.is_watched,
    )


def describe_stack(frames: Sequence[CodeLine]) -> str:
    """Return those of `frames` (innermost first) that belong to the cell or function; "idle" if none is running."""
    if not frames:
        return "no answer: the process does not run Python code now"
    cells = [index for index, frame in enumerate(frames) if frame.file.startswith("Cell In[")]
    calls = [index for index, frame in enumerate(frames) if frame.file.endswith(SESSION_REQUESTS)]
    end = cells[-1] + 1 if cells else calls[0] if calls else 0
    return "\n".join(f'  File "{each.file}", line {each.line} in {each.function}' for each in frames[:end]) or "idle"


def collect_usage(pids: Iterable[int], *, interval_s: float = 0.1) -> dict[int, dict[str, Any]]:
    """Return the usage of each process in `pids`, named as in `RankStatus`; processes that have ended are left out.

    All descendants count too, such as the workers of a `DataLoader`. The GPU's utilization, by all processes, is that
    of the busiest GPU that it uses; its memory is its own, on all GPUs.

    Takes `interval_s` seconds, in which CPU usage is measured, and about 5 ms per process.
    """
    asked = tuple(pids)
    if not asked:
        return {}
    cpu_before, began_s = _read_cpu(_families(asked)), time.monotonic()
    time.sleep(interval_s)
    families = _families(asked)
    cpu_after, duration_s = _read_cpu(families), time.monotonic() - began_s
    memory, gpus = {pid: _read_memory(family) for pid, family in families.items()}, read_gpus()
    return {
        pid: {
            "cpu_percent": max(0.0, 100 * (cpu_after[pid] - cpu_before[pid]) / duration_s),
            "memory_bytes": memory[pid],
            "gpu_percent": _busiest(families[pid], gpus),
            "gpu_memory_bytes": _sum_gpu_memory(families[pid], gpus),
        }
        for pid in asked
        if pid in cpu_before and pid in cpu_after and memory[pid]
    }


def _families(pids: Iterable[int]) -> dict[int, Family]:
    """Return each process with all its descendants, by pid, from one listing of the machine's processes."""
    children: dict[int, Family] = {}
    processes: dict[int, psutil.Process] = {}
    for process in psutil.process_iter(["ppid"]):
        processes[process.pid] = process
        children.setdefault(process.info["ppid"], []).append(process)
    families = {}
    for pid in pids:
        if pid in processes:
            family = families[pid] = [processes[pid]]
            for member in family:  # grows during iteration
                family += children.get(member.pid, [])
    return families


def _read_cpu(families: Mapping[int, Family]) -> dict[int, float]:
    """Return the CPU seconds used by each family, by pid, including children that have ended."""
    used: dict[int, float] = {}
    for pid, family in families.items():
        for process in family:
            try:
                times = process.cpu_times()
            except psutil.Error:  # the process has just ended
                continue
            ended_s = getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0)
            used[pid] = used.get(pid, 0.0) + times.user + times.system + ended_s
    return used


def _read_memory(family: Family) -> int:
    num_bytes = 0
    for process in family:
        try:
            num_bytes += _share(process)
        except psutil.Error:
            continue
    return num_bytes


def _share(process: psutil.Process) -> int:
    try:
        memory = process.memory_full_info()
    except psutil.AccessDenied:
        return int(process.memory_info().rss)
    return int(getattr(memory, "pss", memory.uss))


def _busiest(family: Family, gpus: Iterable[GpuUse]) -> float | None:
    mine = {process.pid for process in family}
    return max((gpu.percent for gpu in gpus if mine & set(gpu.memory_bytes) and gpu.percent is not None), default=None)


def _sum_gpu_memory(family: Family, gpus: Iterable[GpuUse]) -> int | None:
    known = [gpu.memory_bytes.get(process.pid) for process in family for gpu in gpus]
    return sum(found) if (found := [num_bytes for num_bytes in known if num_bytes is not None]) else None
