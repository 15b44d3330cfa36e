# SPDX-License-Identifier: Apache-2.0
"""What the ranks of the tests in this folder do. Each function runs on every rank; its value goes back as JSON."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from ddpilot.environments.detect import detect_topology
from ddpilot.group.enter import init_group
from ddpilot.group.free import Freed, free_group
from ddpilot.group.models import find_models
from ddpilot.group.process_group import Group
from ddpilot.group.rebuild import Rebuilt, rebuild_group
from ddpilot.group.store import Endpoint, resolve_endpoint

Stuck = Callable[[Group], object]


def all_reduce_once() -> list[float]:
    with init_group(timeout_s=20) as group:
        tensor = torch.full((2,), float(group.rank + 1))
        return group.all_reduce(tensor).tolist() + [group.world_size, group.rank]


def enter_leave_enter(times: int) -> list[float]:
    sums = []
    for turn in range(times):
        group = init_group(timeout_s=20)
        sums.append(float(group.all_reduce(torch.tensor(float(group.rank + turn)))))
        group.leave()
    return sums


def _stuck_same(group: Group) -> object:
    # The last rank never comes; it waits elsewhere in Python and is not stuck.
    if group.rank == group.world_size - 1:
        return None
    return dist.all_reduce(torch.ones(4))


def _stuck_different(group: Group) -> object:
    if group.rank % 3 == 0:
        return dist.all_reduce(torch.ones(4))
    if group.rank % 3 == 1:
        return dist.broadcast(torch.ones(4), src=group.rank - 1)
    return dist.barrier()


def _stuck_new_group(group: Group) -> object:
    return None if group.rank == 0 else dist.new_group(list(range(group.world_size)))


def _stuck_store_wait(group: Group) -> object:
    return dist.distributed_c10d._get_default_store().wait(["a key that nobody sets"])


def _stuck_recv(group: Group) -> object:
    return dist.recv(torch.ones(4), src=(group.rank + 1) % group.world_size)


def _stuck_send(group: Group) -> object:
    # Larger than what the sockets hold, so that it waits for a receiver.
    return dist.send(torch.ones(2**24), dst=(group.rank + 1) % group.world_size)


def _stuck_backward(group: Group) -> object:
    if group.rank == 0:
        return None
    model = [found for found in find_models() if isinstance(found.module, torch.nn.Linear)][0]
    return model(torch.ones(1, 3)).sum().backward()


STUCK: dict[str, Stuck] = {
    "same": _stuck_same,
    "different": _stuck_different,
    "new_group": _stuck_new_group,
    "store_wait": _stuck_store_wait,
    "recv": _stuck_recv,
    "send": _stuck_send,
    "backward": _stuck_backward,
}


def _get_stuck_and_be_freed(kind: str, group: Group) -> tuple[Freed, float, str]:
    """Get stuck; another thread frees this rank. What was freed, seconds until this thread was free, its error."""
    dist.barrier()
    freed: list[tuple[Freed, float]] = []
    endpoint = resolve_endpoint(group.topology, os.environ)

    def free() -> None:
        time.sleep(0.6)
        at = time.monotonic()
        freed.append((free_group([(endpoint.addr, endpoint.port)]), at))

    helper = threading.Thread(target=free)
    helper.start()
    error = ""
    try:
        STUCK[kind](group)
    except RuntimeError as caught:
        error = f"{type(caught).__name__}: {caught}"
    ended = time.monotonic()
    helper.join()
    what, at = freed[0]
    return what, ended - at, error


def free_and_rebuild(kinds: list[str]) -> list[dict[str, Any]]:
    """For every kind: get stuck with a live DDP model, be freed, rebuild, all_reduce and train one step."""
    group = init_group(timeout_s=300)
    endpoint = resolve_endpoint(group.topology, os.environ)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1, bias=False))
    torch.nn.init.zeros_(model.module.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    _train_step(model, optimizer, group)
    seen = []
    for generation, kind in enumerate(kinds):
        freed, seconds, error = _get_stuck_and_be_freed(kind, group)
        rebuilt = rebuild_group(group.topology, endpoint, generation=generation, timeout_s=300, rendezvous_s=20)
        group = rebuilt.group
        total = float(group.all_reduce(torch.tensor(float(group.rank + 1))))
        _train_step(model, optimizer, group)
        weights = model.module.weight.flatten().tolist()
        seen.append({
            "kind": kind, "seconds": seconds, "error": error, "sockets": freed.group_sockets,
            "still_stuck": freed.still_stuck, "rebound": rebuilt.rebound, "unbound": rebuilt.unbound,
            "disagreements": rebuilt.disagreements, "total": total, "weights": weights,
        })  # fmt: skip
    group.leave()
    return seen


def _train_step(
    model: torch.nn.parallel.DistributedDataParallel, optimizer: torch.optim.Optimizer, group: Group
) -> None:
    """The gradient on rank r is r + 1 in every element, so that each step takes their mean off every weight."""
    optimizer.zero_grad()
    model(torch.full((1, 3), float(group.rank + 1))).sum().backward()
    optimizer.step()
