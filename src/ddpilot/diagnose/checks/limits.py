# SPDX-License-Identifier: Apache-2.0
"""Check memory and limits: /dev/shm, open files, locked memory, and memory and cores of the container."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

from ddpilot.diagnose.facts import Answers, Facts, in_units
from ddpilot.errors import LaunchError
from ddpilot.findings.catalog import make_finding
from ddpilot.launching.rank_environment import count_cores
from ddpilot.launching.system_limits import check_open_files

_WORKERS = 2
"""DataLoader workers that are assumed for each rank if none are given."""
_PREFETCHED = 2
"""Batches that each DataLoader worker keeps ready, torch's default `prefetch_factor`."""
_BATCH_BYTES = 20_000_000
"""32 images of 3 x 224 x 224 in float32."""
_RANK_BYTES = 500_000_000
_WORKER_BYTES = 250_000_000
_FEW_FILES = 1024
_UNLIMITED_BYTES = 1 << 60
"""cgroup v1 writes a number above this one for "no limit"."""


def shared_memory(facts: Facts) -> Answers:
    """/dev/shm against the batches that DataLoader workers keep in it."""
    if sys.platform != "linux":
        yield "DataLoader workers use no /dev/shm on this system"
        return
    folder = facts.root / "dev/shm"
    try:
        found = os.statvfs(folder)
    except OSError as error:
        yield make_finding("DDP601", summary=f"{folder}: {error.strerror}", severity="warning")
        return
    free, total = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
    workers = _count_workers(facts)
    needed = facts.nproc_per_node * workers * _PREFETCHED * _BATCH_BYTES
    has = f"{folder} has {in_units(free)} free of {in_units(total)}"
    what = f"{facts.nproc_per_node} ranks x {workers} workers x {_PREFETCHED} batches of {in_units(_BATCH_BYTES)}"
    if free < needed:
        yield make_finding("DDP601", summary=f"{has}; {what} need {in_units(needed)}")
    else:
        yield f"{has}; {what} need {in_units(needed)}" if needed else has


def open_files(facts: Facts) -> Answers:
    """The limit of open files against the ranks' sockets and workers."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        check_open_files("starting the ranks", facts.nproc_per_node * facts.nnodes)
    except LaunchError as error:
        yield make_finding("DDP801", summary=error.found, fix=error.fix, severity="error")
        return
    text = f"{_limit(soft)} at a time, at most {_limit(hard)}"
    if soft != resource.RLIM_INFINITY and soft < _FEW_FILES:
        fix = f"`ulimit -n {_FEW_FILES if hard < 0 else min(hard, 65536)}` in the shell that starts the job"
        summary = f"few open files (RLIMIT_NOFILE): {text}; DataLoader workers pass each tensor as a file"
        yield make_finding("DDP801", summary=summary, fix=fix)
    else:
        yield text


def locked_memory(facts: Facts) -> Answers:
    """The limit of locked memory, which InfiniBand needs."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    cards = sorted(path.name for path in (facts.root / "sys/class/infiniband").glob("*"))
    text = "unlimited" if soft == resource.RLIM_INFINITY else in_units(soft)
    if cards and soft != resource.RLIM_INFINITY:
        summary = f"this process may lock {text} of memory (RLIMIT_MEMLOCK), and {', '.join(cards)} need all of it"
        fix = "`ulimit -l unlimited` in the shell that starts the job; docker: `--ulimit memlock=-1`"
        yield make_finding("DDP801", summary=summary, fix=fix, severity="error")
    else:
        yield text if cards else f"{text}; only InfiniBand needs more, and there is none"


def _limit(number: int) -> str:
    return "unlimited" if number == resource.RLIM_INFINITY else str(number)


def memory(facts: Facts) -> Answers:
    """Free memory of the machine and the limit of the container against what ranks and workers need at least."""
    limit = read_cgroup_limit(facts.root, "memory", "memory.max", "memory.limit_in_bytes")
    free = psutil.virtual_memory().available
    workers = _count_workers(facts)
    needed = facts.nproc_per_node * (_RANK_BYTES + workers * _WORKER_BYTES)
    has = f"{in_units(free)} available"
    if limit is not None and limit < _UNLIMITED_BYTES:
        has, free = f"{has}, this cgroup may use {in_units(limit)}", min(free, int(limit))
    text = f"{has}; {facts.nproc_per_node} ranks with {workers} workers each need about {in_units(needed)}"
    if free < needed:
        yield make_finding("DDP702", summary=f"{text}, without model and data", fix=_MORE_MEMORY, severity="warning")
    else:
        yield text


def _count_workers(facts: Facts) -> int:
    return _WORKERS if facts.num_workers is None else facts.num_workers


_MORE_MEMORY = "Ask for more (Slurm's `--mem`, the container's limit), or start fewer ranks and workers"


def cores(facts: Facts) -> Answers:
    """Cores that this process may use against ranks, workers and OMP_NUM_THREADS."""
    have, where = count_cores_of_job(facts.root)
    num, workers = facts.nproc_per_node, facts.num_workers or 0
    given = facts.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    threads = int(given) if given.isdigit() else 1
    text = f"{have:g} cores ({where}); {num} ranks"
    text += f" with OMP_NUM_THREADS={threads}" if given else ""
    text += f" and {workers} workers each" if workers else ""
    share = int(have / num)
    if num * (threads + workers) > have and (num > have or threads > 1 or workers):
        fixes = [f"start at most {max(1, int(have))} ranks here"] if num > have else []
        fixes += [f"`export OMP_NUM_THREADS={max(1, share - workers)}`"] if threads > 1 and num <= have else []
        fixes += [f"at most {max(0, share - 1)} DataLoader workers per rank"] if workers and workers >= share else []
        summary = f"{text} are {num * (threads + workers)} threads and workers"
        yield make_finding("DDP804", summary=summary, fix="; ".join([*fixes, "or ask for more cores"]))
    else:
        yield text


def count_cores_of_job(root: Path) -> tuple[float, str]:
    """The number of cores that this process may use, and what limits it: its affinity or the quota of its cgroup."""
    have = count_cores()
    quota = read_cgroup_limit(root, "cpu", "cpu.max", "cpu.cfs_quota_us")
    return (quota, "quota of the cgroup") if quota is not None and quota < have else (have, "affinity")


def read_cgroup_limit(root: Path, controller: str, name: str, name_v1: str) -> float | None:
    """The lowest limit of this process's cgroup and those around it, in bytes or cores; None if there is none.

    `name`: the file of cgroup v2, `name_v1` that of version 1. A container may show its own cgroup as the root.
    """
    limits = [
        limit
        for folder in _cgroup_folders(root, controller)
        for file in (folder / name, folder / name_v1)
        if (limit := _read_limit(file)) is not None
    ]
    return min(limits, default=None)


def _cgroup_folders(root: Path, controller: str) -> Iterator[Path]:
    mount = root / "sys/fs/cgroup"
    try:
        entries = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for entry in entries:
        _, controllers, path = entry.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = mount / controller if controllers else mount
        folder = top / path.lstrip("/")
        yield from (each for each in (folder, *folder.parents) if each.is_relative_to(top))


def _read_limit(file: Path) -> float | None:
    try:
        words = file.read_text().split()
        period = words[1] if len(words) > 1 else "1"
        if file.name == "cpu.cfs_quota_us":
            period = file.with_name("cpu.cfs_period_us").read_text()
        return None if words[0] in ("max", "-1") else int(words[0]) / int(period)
    except (OSError, ValueError, IndexError):
        return None
