# SPDX-License-Identifier: Apache-2.0
"""Run a Trainer method on new ranks, on the current rank, or in this process, with the parent's torch settings."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from ddpilot.environments.detect import detect_topology
from ddpilot.group.device import detect_device_facts, resolve_device, use_device
from ddpilot.group.fake import FakeGroup
from ddpilot.group.init_group import init_group
from ddpilot.group.protocol import GroupLike
from ddpilot.launcher import Launcher
from ddpilot.launching.shipping.parcel import RankResults
from ddpilot.launching.shipping.torch_settings import OnRank
from ddpilot.module_names import TRAINER_PRELOAD
from ddpilot.trainer.core import TrainerCore


def is_on_ranks() -> bool:
    """True if this process is already a rank: of a launch, of torchrun, Slurm or MPI, or of a session.

    False for a notebook that is the only task of a Slurm job, or that has a process group of size 1.
    """
    if dist.is_initialized() and dist.get_world_size() > 1:
        return True
    topology = detect_topology(os.environ)
    return topology.world_size > 1 or topology.environment in ("ddpilot", "torchrun")


def report_ignored_ranks(nproc_per_node: int | str | None) -> None:
    """Report on rank 0 that `nproc_per_node` has no effect, as this process is already a rank."""
    if not isinstance(nproc_per_node, int) or nproc_per_node == 0 or not is_on_ranks():
        return
    topology = detect_topology(os.environ)
    rank, size = topology.rank, topology.world_size
    if dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
    if rank == 0 and size != nproc_per_node:
        sys.stderr.write(
            f"ddpilot: nproc_per_node={nproc_per_node} is not used: this process is rank 0 of {size} already, as its "
            "environment or process group states, and trains there\n"
        )


def run_on_ranks(
    trainer: TrainerCore, nproc_per_node: int | str | None, name: str, function: Callable[..., Any], *args: Any
) -> RankResults:
    """Call `function(trainer, *args)`, for the method `name`, on new ranks. Raises what `Launcher.run` raises."""
    launcher = trainer.launcher or Launcher()
    count = launcher.nproc_per_node if nproc_per_node is None else nproc_per_node
    launcher = replace(launcher, nproc_per_node=count, preload=(*TRAINER_PRELOAD, *launcher.preload))
    return launcher.run(OnRank(function, f"Trainer.{name}"), trainer, *args)


def run_once(
    trainer: TrainerCore, nproc_per_node: int | str | None, name: str, function: Callable[..., Any], *args: Any
) -> Any:
    """Return `function(trainer, *args)` of this rank, of this process if `nproc_per_node` is 0, or of a new rank 0."""
    if is_on_ranks() or nproc_per_node == 0:
        return function(trainer, *args)
    return run_on_ranks(trainer, nproc_per_node, name, function, *args)[0]


def group_here() -> GroupLike:
    """Return the group of this rank; outside of ranks a group of size 1 without a network. Collective on ranks."""
    if is_on_ranks():
        return init_group()
    return FakeGroup(device=use_device(resolve_device(detect_device_facts(os.environ, 0))), backend="none")
