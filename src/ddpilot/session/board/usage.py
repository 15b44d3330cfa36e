# SPDX-License-Identifier: Apache-2.0
"""Measure CPU and memory usage of processes, and their GPU usage if there is an NVIDIA driver."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import psutil

from ddpilot.environments.nvml import GpuUse, read_gpus


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Usage of one process and all its descendants, such as the workers of a `DataLoader`."""

    cpu_percent: float
    """In percent of one core: 200 is two cores."""
    memory_bytes: int
    """Memory; where the platform reports PSS, pages shared by several processes are divided between them."""
    gpu_percent: float | None
    """Utilization, by all processes, of the busiest GPU that it uses; None if it uses none or the driver does not
    report it."""
    gpu_memory_bytes: int | None
    """Its own memory on all GPUs; None if not known."""


def collect_usage(pids: Iterable[int], *, interval_s: float = 0.1) -> dict[int, Usage]:
    """Return the usage of each process in `pids`; processes that have ended are left out.

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
        pid: Usage(
            cpu_percent=max(0.0, 100 * (cpu_after[pid] - cpu_before[pid]) / duration_s),
            memory_bytes=memory[pid],
            gpu_percent=_busiest(families[pid], gpus),
            gpu_memory_bytes=_sum_gpu_memory(families[pid], gpus),
        )
        for pid in asked
        if pid in cpu_before and pid in cpu_after and memory[pid]
    }


Family = list[psutil.Process]


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
