# SPDX-License-Identifier: Apache-2.0
"""What ranks do to get stuck, be freed and rebuild. Each function runs on every rank; its value goes back as JSON."""

from __future__ import annotations

import json
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from ddpilot.errors import GroupError
from ddpilot.group.creation import rebuild_group
from ddpilot.group.ddp_models import find_models
from ddpilot.group.init_group import init_group
from ddpilot.group.process_group import Group
from ddpilot.group.store import resolve_endpoint
from ddpilot.group.teardown import Freed, free_group

Stuck = Callable[[Group], object]


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
    return dist.send(torch.ones(2**22), dst=(group.rank + 1) % group.world_size)


def _stuck_backward(group: Group) -> object:
    if group.rank == 0:
        return None
    model = next(found for found in find_models() if isinstance(found.module, torch.nn.Linear))
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
    """Get stuck; a different thread frees this rank. Returns what was freed, the seconds it took, and the error."""
    dist.barrier()
    freed: list[tuple[Freed, float]] = []

    def free() -> None:
        time.sleep(0.3)
        at = time.monotonic()
        freed.append((free_group(), at))

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
        rebuilt = rebuild_group(group.topology, endpoint, generation=generation, rendezvous_s=20)
        group = rebuilt.group
        total = float(group.all_reduce(torch.tensor(float(group.rank + 1))))
        _train_step(model, optimizer, group)
        weights = model.module.weight.flatten().tolist()
        seen.append({
            "kind": kind, "seconds": seconds, "error": error,
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


def recv_from_any() -> list[str]:
    """The report of `free_group` about a receive from any source; the rank then exits without it."""
    init_group(timeout_s=300)
    receiver = threading.Thread(target=lambda: dist.recv(torch.ones(4)), daemon=True, name="receiver")
    receiver.start()
    time.sleep(0.3)
    said = list(free_group().still_stuck)
    _end_now(said)
    return said


def _end_now(result: Any) -> None:
    """End this rank with `result`, though a thread of it is stuck in C++."""
    Path(os.environ["TEST_RESULT"]).write_text(json.dumps(result))
    os._exit(0)


def free_beside_users_sockets() -> dict[str, Any]:
    """Free subgroups too, and leave alone the user's connection, which runs over loopback like gloo's."""
    group = init_group(timeout_s=300)
    everyone = dist.new_group(list(range(group.world_size)))
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as near:
        far, _ = server.accept()
        with far, select.epoll() as epoll:
            epoll.register(far.fileno(), select.EPOLLIN)
            poller = threading.Thread(target=lambda: [epoll.poll(0.01, 64) for _ in range(60)])
            poller.start()
            threading.Timer(0.3, free_group).start()
            error = ""
            try:
                if group.rank == 0:
                    dist.all_reduce(torch.ones(4), group=everyone)
                else:
                    dist.recv(torch.ones(4), src=0)
            except RuntimeError as caught:
                error = str(caught)
            poller.join()
            near.sendall(b"still here")
            return {"heard": far.recv(64).decode(), "error": error}


def free_one_rank_only() -> bool:
    """Rank 0 frees itself while all others stay alive and hold their ends; True once it got out."""
    group = init_group(timeout_s=300)
    done = f"{os.environ['TEST_RESULT']}"
    if group.rank != 0:
        while not Path(done.replace(f"{group.rank}.json", "0.out")).exists():
            time.sleep(0.02)
        return True
    threading.Timer(0.3, free_group).start()
    try:
        dist.recv(torch.ones(4), src=1)
    except RuntimeError:
        Path(done.replace("0.json", "0.out")).touch()
        return True
    return False


def rebuild_with_differences() -> dict[str, Any]:
    """One rank's parameter differs, one model is on a smaller group, one has a communication hook."""
    group = init_group(timeout_s=60)
    pair = dist.new_group([0, 1])
    wrap = torch.nn.parallel.DistributedDataParallel
    model = wrap(torch.nn.Sequential(torch.nn.Linear(2, 1, bias=False), torch.nn.BatchNorm1d(1)))
    calls: list[int] = []

    def hook(state: list[int], bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        state.append(1)
        world = dist.group.WORLD
        assert world is not None
        return default_hooks.allreduce_hook(world, bucket)

    hook.__annotations__.clear()  # torch wants types there, and finds text
    model.register_comm_hook(calls, hook)
    small = wrap(torch.nn.Linear(2, 1), process_group=pair) if group.rank < 2 else None
    with torch.no_grad():
        model.module[1].running_mean += group.rank
        model.module[0].weight += 1.0 if group.rank == 2 else 0.0
    rebuilt = rebuild_group(group.topology, resolve_endpoint(group.topology, os.environ), generation=1)
    calls.clear()
    model(torch.ones(2, 2)).sum().backward()
    rebuilt.group.leave()
    return {
        "disagreements": rebuilt.disagreements, "unbound": rebuilt.unbound, "rebound": rebuilt.rebound,
        "hooked": len(calls), "small": small is not None,
    }  # fmt: skip


def leave_when_freed() -> dict[str, Any]:
    """After freeing: the error of a second `init_group`, and the duration of leaving."""
    group = init_group(timeout_s=300)
    endpoint = resolve_endpoint(group.topology, os.environ)
    group.barrier()
    free_group()
    try:
        init_group()
    except GroupError as error:
        said = str(error)
    start = time.monotonic()
    group.leave()
    seconds = time.monotonic() - start
    again = rebuild_group(group.topology, endpoint, generation=1, rendezvous_s=20).group
    total = float(again.all_reduce(torch.tensor(1.0)))
    again.leave()
    return {"said": said, "seconds": seconds, "total": total}
