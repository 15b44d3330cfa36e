# SPDX-License-Identifier: Apache-2.0
"""Return torch's existing default group as a `Group`. torch's state is the only state; ddpilot keeps no copy of it."""

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
from ddpilot.group.members import Member
from ddpilot.group.process_group import Group


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
