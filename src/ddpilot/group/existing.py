# SPDX-License-Identifier: Apache-2.0
"""The group that torch already has in this process, as a `Group`: torch's state is the only state there is."""

from __future__ import annotations

import os
import weakref

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ddpilot.environments.topology import Topology
from ddpilot.errors import GroupError
from ddpilot.group.device import backend_of, detect_device_facts, resolve_device, use_device
from ddpilot.group.marks import read_member
from ddpilot.group.process_group import Group
from ddpilot.group.roster import Member


def existing_group(topology: Topology, backend: str | None = None) -> Group:
    """torch's default group: equal to what `init_group` returned where that made it, else adopted.

    `topology`: what the environment says. For an adopted group rank and world size are torch's; the position on the
    node is the environment's, or where that knows of no job, as if all ranks were on this node. Raises GroupError
    where `backend` is given and is not the group's, and where the group's store is gone. Not collective.
    """
    group = dist.group.WORLD
    assert group is not None  # asked for only where is_initialized()
    rank, has = dist.get_rank(), c10d.get_backend_config()
    member = _member(rank)
    local = (topology.local_rank, topology.local_world_size)
    local_rank, local_world_size = local if topology.is_distributed else (rank, dist.get_world_size())
    device = torch.device(member.device) if member else _current_device(local_rank)
    if backend is not None and not is_backend(backend, has, device.type):
        raise GroupError(
            "entering the group",
            found=f"a group with backend {has!r} is already there, and {backend!r} was asked for",
            fix="Leave the first group before you enter another, or ask for the same backend.",
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
            "looking at the group that this rank is in",
            found="its store does not answer: it was freed, or the process that hosts it ended",
            fix="Call torch.distributed.destroy_process_group(), then enter a new group.",
            rank=rank,
        ) from error
    except RuntimeError:
        return None  # a store that cannot be read (MPI has none) is not one that ddpilot wrote into


def is_backend(asked: str, has: str, kind: str) -> bool:
    """True if a group with backends `has` is what `asked` means on a rank whose device is of type `kind`.

    A single name, such as "nccl", is the backend of that device: a group with "cpu:gloo,cuda:nccl" has it on a GPU.
    """
    return set(asked.split(",")) <= set(has.split(",")) or asked == backend_of(has, kind)


def _current_device(local_rank: int) -> torch.device:
    """The device that code which made its own group uses: the current one where it has begun, else the default."""
    facts = detect_device_facts(os.environ, local_rank)
    if facts.accelerator is not None:
        module = torch.get_device_module(facts.accelerator)
        has_begun = getattr(module, "is_initialized", None)
        if has_begun is not None and has_begun():
            return torch.device(facts.accelerator, module.current_device())
    return use_device(resolve_device(facts))
