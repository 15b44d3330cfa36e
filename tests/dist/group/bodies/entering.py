# SPDX-License-Identifier: Apache-2.0
"""What ranks do to enter and leave groups. Each function runs on every rank; its value goes back as JSON."""

from __future__ import annotations

import os
import random
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy
import psutil
import torch
import torch.distributed as dist

from ddpilot.errors import GroupError, RendezvousError
from ddpilot.group.init_group import init_group
from ddpilot.group.store import number_env_rendezvous


def nothing() -> None:
    """Return at once: torch and this module are imported then."""


def all_reduce_once() -> dict[str, Any]:
    """Enter, all_reduce once, leave; also what the group looked like while it was there."""
    before = dict(os.environ)
    with init_group(timeout_s=20) as group:
        again = init_group()
        total = float(group.all_reduce(torch.tensor(float(group.rank + 1))))
        seen = {
            "total": total, "mean": float(group.all_reduce(torch.tensor(float(group.rank)), "avg")),
            "rank": group.rank, "local_rank": group.local_rank, "world_size": group.world_size,
            "device": str(group.device), "backend": group.backend, "adopted": group.adopted, "same": again == group,
            "listening": _listening_hosts(), "objects": group.all_gather_object({"rank": group.rank}),
            "from_one": group.broadcast_object(f"of rank {group.rank}", src=1),
            "tensor": float(group.broadcast(torch.tensor(float(group.rank)), src=1)),
        }  # fmt: skip
        group.barrier()
    group.leave()
    return {**seen, "live": group.is_live, "threads": _torch_threads(), "same_environ": dict(os.environ) == before}


def _listening_hosts() -> list[str]:
    found = psutil.Process().net_connections(kind="tcp")
    return sorted({connection.laddr.ip for connection in found if connection.status == psutil.CONN_LISTEN})


def _torch_threads() -> list[str]:
    names = [Path(task, "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    return sorted(name for name in names if "gloo" in name)


def enter_leave_enter(times: int) -> list[float]:
    """Every turn's all_reduce of rank + turn."""
    sums = []
    for turn in range(times):
        group = init_group(timeout_s=20)
        sums.append(float(group.all_reduce(torch.tensor(float(group.rank + turn)))))
        group.leave()
    return sums


def train_alone() -> dict[str, Any]:
    """One DDP step without any job."""
    with init_group() as group:
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
        torch.nn.init.zeros_(model.module.weight)
        model(torch.ones(1, 1)).sum().backward()
        torch.optim.SGD(model.parameters(), lr=1.0).step()
        return {
            "environment": group.topology.environment, "world_size": group.world_size,
            "weight": float(model.module.weight), "listening": _listening_hosts(),
        }  # fmt: skip


def error_of_entering(late_rank: int, changes: dict[str, dict[str, str]], timeout_s: float) -> dict[str, Any]:
    """What `init_group` raises, how long it took; `late_rank` never enters, `changes`: environment by rank."""
    rank = int(os.environ["RANK"])
    os.environ.update(changes.get(str(rank), {}))
    start = time.monotonic()
    if rank == late_rank:
        return {}
    try:
        init_group(timeout_s=timeout_s)
    except GroupError as error:
        missing = list(error.missing) if isinstance(error, RendezvousError) else None
        return {
            "type": type(error).__name__, "text": str(error), "missing": missing,
            "seconds": time.monotonic() - start, "pid": os.getpid(),
        }  # fmt: skip
    raise AssertionError("init_group returned")


def adopt_a_group() -> dict[str, Any]:
    """A group that user code made: adopted, not destroyed by leave, destroyed on request."""
    dist.init_process_group("gloo")
    with init_group() as group:
        total = float(group.all_reduce(torch.tensor(1.0)))
    kept = dist.is_initialized()
    try:
        init_group("nccl")
    except GroupError as error:
        refused = str(error)
    group.leave(destroy_adopted=True)
    return {
        "adopted": group.adopted, "rank": group.rank, "total": total, "kept": kept, "refused": refused,
        "destroyed": not dist.is_initialized(),
    }  # fmt: skip


def seeded(seed: int) -> list[float]:
    """One random number of Python, torch and numpy each, after entering with `seed`."""
    with init_group(seed=seed):
        return [random.random(), float(torch.rand(())), float(numpy.random.random())]


def end_without_leaving(dying_rank: int) -> float:
    """Enter and return without leaving; `dying_rank` is killed. The time at which the body ended."""
    group = init_group(timeout_s=300)
    group.barrier()
    if group.rank == dying_rank:
        os.kill(os.getpid(), signal.SIGKILL)
    return time.time()


def raw_groups(init: str, times: int) -> list[float]:
    """Raw torch, as a tutorial has it: `times` groups one after the other, each with one all_reduce."""
    number_env_rendezvous(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    sums = []
    for turn in range(times):
        if init == "env":
            dist.init_process_group("gloo", timeout=timedelta(seconds=20))
        elif init == "tutorial":
            os.environ["MASTER_ADDR"] = "localhost"
            os.environ["MASTER_PORT"] = "12355"
            dist.init_process_group("gloo", rank=rank, world_size=world_size, timeout=timedelta(seconds=20))
        else:
            url = "tcp://127.0.0.1:23456"
            dist.init_process_group("gloo", init_method=url, rank=rank, world_size=world_size)
        tensor = torch.tensor(float(rank + turn))
        dist.all_reduce(tensor)
        sums.append(float(tensor))
        dist.destroy_process_group()
    return sums
