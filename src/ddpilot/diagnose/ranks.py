# SPDX-License-Identifier: Apache-2.0
"""The part of `ddpilot doctor` that runs in each rank: join the group, check values, measure times. Imports torch."""

from __future__ import annotations

import functools
import os
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ddpilot.diagnose.agreement import hash_code, hash_package
from ddpilot.diagnose.facts import RankReport
from ddpilot.diagnose.reachability import find_link
from ddpilot.environments.detect import detect_topology
from ddpilot.errors import DdpilotError
from ddpilot.gpu_check.child import read_facts
from ddpilot.group.device import backend_of, device_identity
from ddpilot.group.init_group import init_group
from ddpilot.group.measurements import time_all_reduce, time_calls
from ddpilot.group.process_group import Group
from ddpilot.launching.rank_environment import count_cores

_SMALL_BYTES = 8
_PAIR_SIZES = (_SMALL_BYTES, 64_000, 4_000_000)
_CPU_SIZES = (_SMALL_BYTES, 64_000, 1_000_000, 16_000_000)
_DEVICE_SIZES = (_SMALL_BYTES, 1_000_000, 64_000_000, 256_000_000)


def examine_rank(limit_s: float | None, script: Path | None = None) -> RankReport:
    """Join the group, check values and measure. Collective. An error ends the report, which contains it.

    `limit_s`: timeout of the group, in seconds; None: the ranks cannot form one, and report their versions only.
    `script`: the first rank of a node reports the hashes of it and of the Python files below its folder.
    """
    topology = detect_topology(os.environ)
    report = RankReport(
        rank=topology.rank,
        world_size=topology.world_size,
        node_rank=topology.node_rank,
        host=socket.gethostname(),
        versions=_read_versions(),
        code=_read_code(script) if script is not None and topology.local_rank == 0 else {},
        num_threads=torch.get_num_threads(),
    )
    if limit_s is None:
        return report
    try:
        began_s = time.monotonic()
        with init_group(timeout_s=limit_s) as group:
            link, link_bytes_per_s = find_link(_uuid(group), topology.nnodes)
            report = replace(
                report,
                joined_s=time.monotonic() - began_s,
                device=str(group.device),
                identity=device_identity(group.device),
                backend=group.backend,
                link=link,
                link_bytes_per_s=link_bytes_per_s,
            )
            report = replace(report, wrong=check_values(group))
            return replace(report, group_times=measure_group(group), pair_times=measure_pairs(group))
    except (DdpilotError, RuntimeError) as error:
        return replace(report, failure=_describe(error))


def _read_code(script: Path) -> dict[str, str]:
    path = script.resolve()
    return hash_code(path.parent, path)


def _read_versions() -> dict[str, Any]:
    arch_list = torch.cuda.get_arch_list() if torch.version.cuda else []
    version = f"{metadata.version('ddpilot')} ({hash_package()})"
    return {**read_facts(), "arch_list": arch_list, "num_cores": count_cores(), "ddpilot": version}


def _describe(error: Exception) -> dict[str, Any]:
    if isinstance(error, DdpilotError):
        missing = list(getattr(error, "missing", ()))
        return {"did": error.did, "found": error.found, "fix": error.fix, "missing": missing}
    found = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return {"did": "calling collectives", "found": found, "fix": "", "missing": []}


def _uuid(group: Group) -> str:
    """UUID of the NVIDIA device that NCCL uses; "" if gloo exchanges the data."""
    is_nccl = group.device.type == "cuda" and backend_of(group.backend, "cuda") == "nccl"
    return str(getattr(torch.cuda.get_device_properties(group.device), "uuid", "")) if is_nccl else ""


def check_values(group: Group) -> tuple[str, ...]:
    """One sentence for each collective whose result is not what the ranks' numbers give. Collective."""
    rank, size, wrong = group.rank, group.world_size, []
    for num in (1, 1_000_003):
        numbers = torch.full((num,), rank + 1.0, device=group.device)
        dist.all_reduce(numbers)
        if not torch.all(numbers == size * (size + 1) / 2):
            wrong.append(f"all_reduce of {num} numbers: {numbers[0].item():g}, not {size * (size + 1) / 2:g}")
    for root in {0, size - 1}:
        number = torch.full((1000,), float(rank), device=group.device)
        dist.broadcast(number, root)
        if not torch.all(number == root):
            wrong.append(f"broadcast from rank {root}: {number[0].item():g}, not {root}")
    gathered: list[Any] = [None] * size
    dist.gather_object({"rank": rank}, gathered if rank == 0 else None)
    if rank == 0 and gathered != [{"rank": each} for each in range(size)]:
        wrong.append(f"gather_object: {gathered}")
    return tuple(wrong)


def measure_group(group: Group) -> tuple[tuple[int, float], ...]:
    """(bytes, seconds) of an all_reduce for several sizes: the fastest of some calls. Collective."""
    sizes = _CPU_SIZES if group.device.type == "cpu" else _DEVICE_SIZES
    times_s = time_all_reduce(dist.group.WORLD, group.device, sizes)
    return tuple((num_bytes, min(each)) for num_bytes, each in zip(sizes, times_s, strict=True))


def measure_pairs(group: Group) -> tuple[tuple[int, tuple[tuple[int, float], ...]], ...]:
    """(other rank, ((bytes, seconds one way), by size)) for each other rank. Collective.

    The fastest of some calls, since a busy core delays the others. Pairs without a common rank are measured at the
    same time: in turn t, ranks whose sum is t modulo the world size.
    """
    found = []
    for turn in range(group.world_size):
        peer = (turn - group.rank) % group.world_size
        dist.barrier()
        if peer == group.rank:
            continue
        times = []
        for num_bytes in _PAIR_SIZES:
            tensor = torch.zeros(num_bytes // 4, device=group.device)
            call = functools.partial(_exchange, tensor, peer, group.rank)
            times.append((num_bytes, min(time_calls(call, group.device, num_bytes)) / 2))
        found.append((peer, tuple(times)))
    return tuple(sorted(found))


def _exchange(tensor: torch.Tensor, peer: int, rank: int) -> None:
    """Send `tensor` to `peer` and receive it back, or the other way round on the higher rank."""
    steps: list[Callable[[torch.Tensor, int], object]] = [dist.send, dist.recv]
    for step in steps if rank < peer else reversed(steps):
        step(tensor, peer)
