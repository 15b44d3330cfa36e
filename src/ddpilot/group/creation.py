# SPDX-License-Identifier: Apache-2.0
"""Create the process group, adopt one that other code created, or rebuild it after a failure.

torch's state is the only state; ddpilot keeps no copy of it. Needs a PyTorch that has torch.distributed.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed import distributed_c10d as c10d
from torch.distributed.constants import default_pg_timeout

from ddpilot.environments.detect import detect_topology
from ddpilot.environments.topology import Topology
from ddpilot.errors import GroupError
from ddpilot.group.ddp_models import bind_model, compare_models, find_models
from ddpilot.group.device import (
    DeviceChoice,
    backend_of,
    detect_device_facts,
    device_identity,
    is_asynchronous,
    resolve_device,
    share_devices,
    use_device,
)
from ddpilot.group.members import Member, find_sharing, mark_entered, read_member, take_turn, wait_for_all
from ddpilot.group.process_group import Group
from ddpilot.group.store import Endpoint, connect_store, resolve_endpoint
from ddpilot.group.teardown import let_works_end, take_down

_AT_EXIT_S = 2.0

CHECKS_BEFORE_JOINING: list[Callable[[], None]] = []
"""Called by `join_group` before this process waits for the other ranks; they raise if those cannot all come."""


def join_group(backend: str | None, timeout_s: float | None, distributed: bool | None) -> Group:
    """The group of this job, existing or new, as documented for `init_group`. Collective."""
    let_works_end()
    environ = dict(os.environ)
    topology = detect_topology(environ, distributed=distributed)
    backend = backend or environ.get("DDPILOT_BACKEND") or None
    if dist.is_initialized():
        return existing_group(topology, backend)
    if topology.is_distributed:
        for check in CHECKS_BEFORE_JOINING:
            check()
    choice = resolve_device(detect_device_facts(environ, topology.local_rank), backend)
    device = use_device(choice)
    limit_s = default_pg_timeout.total_seconds() if timeout_s is None else timeout_s
    alone = not topology.is_distributed
    store = HashStore() if alone else connect_store(resolve_endpoint(topology, environ), limit_s)
    group = form_group(store, topology, choice, device, timeout_s, limit_s)
    atexit.unregister(_leave_at_exit)
    atexit.register(_leave_at_exit)
    return group


def _leave_at_exit() -> None:
    if not dist.is_initialized():
        return
    failed = getattr(sys, "last_type", None) is not None  # set by the interpreter after an uncaught exception
    try:
        group = existing_group(detect_topology({}, distributed=False))
    except GroupError:  # the store is gone already, and the other ranks with it
        take_down(healthy=False)
    else:
        group.leave(peers_limit_s=0.0 if failed else _AT_EXIT_S)


_NCCL_TIMEOUT = timedelta(minutes=10)
_NONBLOCKING_VARIABLE = "TORCH_NCCL_USE_COMM_NONBLOCKING"
_BLOCKING_SINCE = "2.7.1"
"""From 2.6 until this version, `device_id` made NCCL's communicators non-blocking; NCCL 2.26 then hangs
(pytorch#153960)."""


def form_group(
    base: Store,
    topology: Topology,
    choice: DeviceChoice,
    device: torch.device,
    timeout_s: float | None,
    rendezvous_s: float,
) -> Group:
    """Wait for the other ranks in `base` and initialize torch's default group. Collective.

    `timeout_s`: timeout of every collective, None for torch's default; `rendezvous_s`: timeout of the wait for the
    other ranks. Raises what `take_turn` and `wait_for_all` raise, and GroupError if torch cannot create the group.
    """
    me = Member.here(topology.rank, topology.world_size, str(device), choice.backend, device_identity(device))
    store = take_turn(base, me)
    members = wait_for_all(store, me, rendezvous_s)
    choice = share_devices(choice, find_sharing(members))
    if choice.why and topology.local_rank == 0:
        warnings.warn(choice.why, stacklevel=3)
    with _on_loopback(topology.local_world_size == topology.world_size):
        group = _initialise(store, topology, choice.backend, device, timeout_s)
    mark_entered(me)
    return Group(
        rank=topology.rank,
        world_size=topology.world_size,
        local_rank=topology.local_rank,
        local_world_size=topology.local_world_size,
        topology=topology,
        device=device,
        backend=choice.backend,
        process_group_ref=weakref.ref(group),
    )


def binds_device(backend: str, device: torch.device, world_size: int) -> bool:
    """True if the communicator of `device` must be created with the group instead of by its first collective.

    A backend of a device creates it lazily and then blocks, without a timeout and without a way to abort, until every
    rank has joined. In `form_group` all ranks are known to be present.
    """
    return world_size > 1 and is_asynchronous(backend, device)


def _initialise(
    store: Store, topology: Topology, backend: str, device: torch.device, timeout_s: float | None
) -> dist.ProcessGroup:
    binds = binds_device(backend, device, topology.world_size)
    if binds and backend_of(backend, device.type) == "nccl" and torch.__version__ < _BLOCKING_SINCE:
        os.environ.setdefault(_NONBLOCKING_VARIABLE, "0")
    try:
        dist.init_process_group(
            backend,
            store=PrefixStore("group", store),
            rank=topology.rank,
            world_size=topology.world_size,
            timeout=None if timeout_s is None else timedelta(seconds=timeout_s),
            device_id=device if binds else None,
        )
        group = dist.group.WORLD
        assert group is not None  # init_process_group has just returned
        if (limit := device_timeout(backend, device, timeout_s)) is not None:
            _own_backend(group, device)._set_default_timeout(limit)
        if binds:
            _connect(group, device)
        return group
    except (RuntimeError, ValueError) as error:
        take_down(healthy=False)
        raise GroupError(
            f"initialising a {backend} group of {topology.world_size} ranks",
            found=str(error).splitlines()[0],
            fix="All ranks have joined the store, so check the connections between them: the network interface "
            "(GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME), or a rank that has just exited.",
            rank=topology.rank,
        ) from error


def device_timeout(backend: str, device: torch.device, timeout_s: float | None) -> timedelta | None:
    """Timeout of NCCL's collectives if none was requested: 10 minutes, as torch uses for a group with NCCL alone.

    torch uses gloo's 30 minutes for a group that has gloo too. None if the group's timeout applies to the device.
    """
    return _NCCL_TIMEOUT if timeout_s is None and backend_of(backend, device.type) == "nccl" else None


def _own_backend(group: dist.ProcessGroup, device: torch.device) -> Any:
    own: Any = group._get_backend(device)
    while hasattr(own, "wrapped_pg"):  # TORCH_DISTRIBUTED_DEBUG=DETAIL
        own = own.wrapped_pg
    return own


def _connect(group: dist.ProcessGroup, device: torch.device) -> None:
    """Create the communicator of `device` if torch has not; it does so for backends that support splitting."""
    own = _own_backend(group, device)
    if not own.supports_splitting:
        own.allreduce([torch.zeros(1, device=device)]).wait()  # bypasses the recorder: it is not the user's collective
        torch.accelerator.synchronize(device)


@contextmanager
def _on_loopback(single_node: bool) -> Iterator[None]:
    """Context manager that makes gloo use the loopback interface for a single-node group, unless the user chose one.

    gloo otherwise uses the host name's address, which may not resolve and opens a port to the network. gloo reads the
    variable in C++, so it must be set in the environment.
    """
    names = [name for _, name in socket.if_nameindex() if name.startswith("lo")] if single_node else []
    if not names or "GLOO_SOCKET_IFNAME" in os.environ:
        yield
        return
    os.environ["GLOO_SOCKET_IFNAME"] = names[0]
    try:
        yield
    finally:
        os.environ.pop("GLOO_SOCKET_IFNAME", None)


def existing_group(topology: Topology, backend: str | None = None) -> Group:
    """torch's default group as a `Group`: equal to `init_group`'s result if that created it, otherwise adopted.

    `topology`: as detected from the environment. The rank and world size of an adopted group are torch's; the local
    rank and size come from the environment, or assume that all ranks are on this node if it describes no job. Raises
    GroupError if `backend` is given and differs from the group's, and if the group's store is gone. Not collective.
    """
    group = dist.group.WORLD
    assert group is not None  # callers check is_initialized()
    rank, has = dist.get_rank(), c10d.get_backend_config()
    member = _member(rank)
    local = (topology.local_rank, topology.local_world_size)
    local_rank, local_world_size = local if topology.is_distributed else (rank, dist.get_world_size())
    device = torch.device(member.device) if member else _current_device(local_rank)
    if backend is not None and not is_backend(backend, has, device.type):
        raise GroupError(
            "entering the group",
            found=f"a group with backend {has!r} exists, and {backend!r} was requested",
            fix="Leave that group before you enter a new one, or request the same backend.",
            rank=rank,
        )
    return Group(
        rank=rank,
        world_size=dist.get_world_size(),
        local_rank=local_rank,
        local_world_size=local_world_size,
        topology=topology,
        device=device,
        backend=member.backend if member else has,
        process_group_ref=weakref.ref(group),
        adopted=member is None,
    )


def _member(rank: int) -> Member | None:
    try:
        return read_member(c10d._get_default_store(), rank)
    except dist.DistNetworkError as error:
        raise GroupError(
            "reading the store of the existing group",
            found="its store does not answer: it was freed, or the process that hosts it ended",
            fix="Call torch.distributed.destroy_process_group(), then enter a new group.",
            rank=rank,
        ) from error
    except RuntimeError:
        return None  # ddpilot has not written to a store that cannot be read (MPI has none)


def is_backend(asked: str, has: str, kind: str) -> bool:
    """True if a group with backends `has` satisfies a request for `asked` on a rank with device type `kind`.

    A single name, such as "nccl", is the backend of that device: "cpu:gloo,cuda:nccl" satisfies it on a GPU.
    """
    return set(asked.split(",")) <= set(has.split(",")) or asked == backend_of(has, kind)


def _current_device(local_rank: int) -> torch.device:
    """The device of code that created its own group: the current device if it is initialized, else the default."""
    facts = detect_device_facts(os.environ, local_rank)
    if facts.accelerator is not None:
        module = torch.get_device_module(facts.accelerator)
        has_begun = getattr(module, "is_initialized", None)
        if has_begun is not None and has_begun():
            return torch.device(facts.accelerator, module.current_device())
    return use_device(resolve_device(facts))


@dataclass(frozen=True)
class Rebuilt:
    """Result of `rebuild_group`: the new group, and how the models of the old one were handled."""

    group: Group
    rebound: int
    """Number of DDP models that now use the new group."""
    unbound: tuple[str, ...] = ()
    """One sentence for every DDP model of this rank that could not be bound to the new group."""
    disagreements: tuple[str, ...] = ()
    """One sentence for every parameter that differs across ranks; the same on every rank."""


def rebuild_group(
    topology: Topology,
    endpoint: Endpoint,
    *,
    generation: int,
    backend: str | None = None,
    rendezvous_s: float | None = None,
) -> Rebuilt:
    """Destroy the old group of this rank and enter a new one on the store at `endpoint`. Collective.

    Every rank calls it, including restarted ranks, in the thread that runs user code, after `free_group` has returned
    on all of them. `generation` must be the same on all ranks and must not have been used on that store before, even by
    a failed attempt. `rendezvous_s`: timeout of the wait for the other ranks (default: torch's). All DDP models that
    are alive are bound to the new group in place. Gradients of an interrupted step keep their values, so set them to
    zero. With NCCL, the optimizer step may have been applied with such gradients on the device: see `Freed.aborted`.

    Raises RendezvousError and GroupError like `init_group`. Parameters that differ across ranks (because a rank had
    stepped before the failure, or was restarted) do not raise; they are listed in `Rebuilt.disagreements`.
    """
    kept = find_models()
    take_down(healthy=False)
    limit_s = rendezvous_s or default_pg_timeout.total_seconds()
    own = replace(endpoint, prefix=f"{endpoint.prefix}/generation{generation}")
    choice = resolve_device(detect_device_facts(os.environ, topology.local_rank), backend)
    device = use_device(choice)
    group = form_group(connect_store(own, limit_s), topology, choice, device, None, limit_s)
    bound = [bind_model(model, group.process_group) for model in kept]
    unbound = tuple(
        f"{type(model.module).__name__} was on a group of {model.process_group.size()} ranks: wrap it again"
        for model, done in zip(kept, bound, strict=True)
        if not done
    )
    disagreements = compare_models([model for model, done in zip(kept, bound, strict=True) if done], group)
    return Rebuilt(group, sum(bound), unbound, disagreements)
