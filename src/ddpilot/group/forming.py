# SPDX-License-Identifier: Apache-2.0
"""Make a process group on a store, once it is known where to meet: shared by entering and rebuilding."""

from __future__ import annotations

import os
import socket
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from ddpilot.environments.topology import Topology
from ddpilot.errors import GroupError
from ddpilot.group.device import DeviceChoice, device_identity, share_devices
from ddpilot.group.marks import mark_entered
from ddpilot.group.process_group import Group
from ddpilot.group.roster import Member, find_sharing, take_turn, wait_for_all


def form_group(
    base: Store,
    topology: Topology,
    choice: DeviceChoice,
    device: torch.device,
    timeout_s: float | None,
    rendezvous_s: float,
) -> Group:
    """Meet the other ranks in `base` and initialise torch's default group. Collective.

    `timeout_s`: limit of every collective, None for torch's default; `rendezvous_s`: how long to wait for the other
    ranks. Raises what `take_turn` and `wait_for_all` raise, and GroupError where torch cannot make the group.
    """
    me = Member.here(topology.rank, topology.world_size, str(device), choice.backend, device_identity(device))
    store = take_turn(base, me)
    members = wait_for_all(store, me, rendezvous_s)
    choice = share_devices(choice, find_sharing(members))
    if choice.why and topology.local_rank == 0:
        warnings.warn(choice.why, stacklevel=3)
    with _on_loopback(topology.local_world_size == topology.world_size):
        _initialise(store, topology, choice.backend, timeout_s)
    mark_entered(me)
    group = dist.group.WORLD
    assert group is not None  # init_process_group has just returned
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


def _initialise(store: Store, topology: Topology, backend: str, timeout_s: float | None) -> None:
    try:
        dist.init_process_group(
            backend,
            store=PrefixStore("group", store),
            rank=topology.rank,
            world_size=topology.world_size,
            timeout=None if timeout_s is None else timedelta(seconds=timeout_s),
        )
    except (RuntimeError, ValueError) as error:
        raise GroupError(
            f"initialising a {backend} group of {topology.world_size} ranks",
            found=str(error).splitlines()[0],
            fix="All ranks met in the store, so look at what connects them: the network interface "
            "(GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME), or a rank that ended just now.",
            rank=topology.rank,
        ) from error


@contextmanager
def _on_loopback(single_node: bool) -> Iterator[None]:
    """Let gloo use the loopback interface for a group on one machine, unless the user chose an interface.

    gloo asks the host name for its address otherwise: that may not resolve, and opens a port to the network. It reads
    the variable in C++, so it has to be set for that moment.
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
