# SPDX-License-Identifier: Apache-2.0
"""Where a trainer's verbs run: on ranks that are started for them, on the rank that this is, or in this process."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import nn

from ddpilot.api.launch import Launcher
from ddpilot.environments.detect import detect_topology
from ddpilot.group.device import detect_device_facts, resolve_device, use_device
from ddpilot.group.enter import init_group
from ddpilot.group.fake import FakeGroup
from ddpilot.group.protocol import GroupLike
from ddpilot.launching.results import RankResults
from ddpilot.trainer.settings import TorchSettings

HEAVY = "ddpilot.trainer.heavy"


def is_on_ranks() -> bool:
    """Whether this process is a rank already: of a launch, of torchrun, Slurm or MPI, of a session.

    A notebook that is the one task of a Slurm job, or has a group of its own, is none.
    """
    if dist.is_initialized() and dist.get_world_size() > 1:
        return True
    topology = detect_topology(os.environ)
    return topology.world_size > 1 or topology.environment in ("ddpilot", "torchrun")


def share_weights(model: nn.Module, group: GroupLike) -> None:
    """Give all ranks rank 0's weights, as a fit does: a script on ranks may have made others on each. Collective."""
    if group.world_size > 1:
        for parameter in model.parameters():
            group.broadcast(parameter.data)


def say_ignored(nproc_per_node: int | str | None) -> None:
    """Say on rank 0 that a number of ranks was asked for where this process is a rank already."""
    if not isinstance(nproc_per_node, int) or nproc_per_node == 0 or not is_on_ranks():
        return
    topology = detect_topology(os.environ)
    rank, size = topology.rank, topology.world_size
    if dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
    if rank == 0 and size != nproc_per_node:
        sys.stderr.write(
            f"ddpilot: nproc_per_node={nproc_per_node} is not used: this process is rank 0 of {size} already, "
            "as its environment or process group says, and trains there\n"
        )


class _Verb:
    """A method of the trainer's by the name that the user called; errors tell of that one.

    It brings the settings of torch that change numbers along, as they are where it is made.
    """

    def __init__(self, name: str) -> None:
        self._settings = TorchSettings()
        self._name = f"_{name}_here"
        self.__qualname__ = f"Trainer.{name}"

    def __call__(self, trainer: Any, *args: Any, **kwargs: Any) -> Any:
        self._settings.apply()
        return getattr(trainer, self._name)(*args, **kwargs)


def run_on_ranks(
    launcher: Launcher | None, nproc_per_node: int | str | None, name: str, trainer: Any, *args: Any, **kwargs: Any
) -> RankResults:
    """Call `trainer._<name>_here` on ranks that are started for it. Raises what `Launcher.run` raises."""
    launcher = launcher or Launcher()
    count = launcher.nproc_per_node if nproc_per_node is None else nproc_per_node
    preload = (HEAVY, *launcher.preload)
    return replace(launcher, nproc_per_node=count, preload=preload).run(_Verb(name), trainer, *args, **kwargs)


def group_here() -> GroupLike:
    """The group of this rank; of a process that is none, a group of one that needs no network. Collective on ranks."""
    if is_on_ranks():
        return init_group()
    return FakeGroup(device=use_device(resolve_device(detect_device_facts(os.environ, 0))), backend="none")
