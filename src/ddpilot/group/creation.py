# SPDX-License-Identifier: Apache-2.0
"""Create a process group on a store; used both to enter and to rebuild a group."""

from __future__ import annotations

import os
import re
import socket
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from ddpilot.environments.topology import Topology
from ddpilot.errors import GroupError
from ddpilot.group.device import DeviceChoice, backend_of, device_identity, is_asynchronous, share_devices
from ddpilot.group.marks import mark_entered
from ddpilot.group.members import Member, find_sharing, take_turn, wait_for_all
from ddpilot.group.process_group import Group
from ddpilot.group.teardown import take_down

_NCCL_TIMEOUT = timedelta(minutes=10)
_NONBLOCKING_VARIABLE = "TORCH_NCCL_USE_COMM_NONBLOCKING"
_BLOCKING_SINCE = (2, 7, 1)
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
    if binds and backend_of(backend, device.type) == "nccl" and _torch_version() < _BLOCKING_SINCE:
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
            fix="All ranks met in the store, so look at what connects them: the network interface "
            "(GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME), or a rank that ended just now.",
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


def _torch_version() -> tuple[int, ...]:
    numbers = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", torch.__version__)
    return tuple(int(number or 0) for number in numbers.groups()) if numbers else _BLOCKING_SINCE


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
