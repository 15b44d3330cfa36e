# SPDX-License-Identifier: Apache-2.0
"""Run a Trainer method on new ranks, on the current rank, or in this process, with the parent's torch settings."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from ddpilot.environments.detect import detect_topology
from ddpilot.group.device import detect_device_facts, resolve_device, use_device
from ddpilot.group.fake import FakeGroup
from ddpilot.group.init_group import init_group
from ddpilot.group.protocol import GroupLike
from ddpilot.launcher import Launcher
from ddpilot.launching.shipping.rank_results import RankResults
from ddpilot.module_names import TRAINER_PRELOAD

if TYPE_CHECKING:
    from ddpilot.trainer.core import TrainerCore


def is_on_ranks() -> bool:
    """True if this process is already a rank: of a launch, of torchrun, Slurm or MPI, or of a session.

    False for a notebook that is the only task of a Slurm job, or that has a process group of size 1.
    """
    if dist.is_initialized() and dist.get_world_size() > 1:
        return True
    topology = detect_topology(os.environ)
    return topology.world_size > 1 or topology.environment in ("ddpilot", "torchrun")


def share_weights(model: nn.Module, group: GroupLike) -> None:
    """Broadcast rank 0's parameters, as a fit does: a script may have initialized each rank differently. Collective."""
    if group.world_size > 1:
        for parameter in model.parameters():
            group.broadcast(parameter.data)


def say_ignored(nproc_per_node: int | str | None) -> None:
    """Report on rank 0 that `nproc_per_node` has no effect, as this process is already a rank."""
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


class _OnRank:
    """Calls `function` on a rank, with the torch settings that affect results as they are in the parent.

    `label`: the name of the public method, which errors show.
    """

    def __init__(self, function: Callable[..., Any], label: str) -> None:
        self._settings = TorchSettings()
        self._function = function
        self.__qualname__ = label

    def __call__(self, *args: Any) -> Any:
        self._settings.apply()
        return self._function(*args)


def run_on_ranks(
    trainer: TrainerCore, nproc_per_node: int | str | None, name: str, function: Callable[..., Any], *args: Any
) -> RankResults:
    """Call `function(trainer, *args)`, for the method `name`, on new ranks. Raises what `Launcher.run` raises."""
    launcher = trainer.launcher or Launcher()
    count = launcher.nproc_per_node if nproc_per_node is None else nproc_per_node
    preload = (TRAINER_PRELOAD, *launcher.preload)
    on_rank = _OnRank(function, f"Trainer.{name}")
    return replace(launcher, nproc_per_node=count, preload=preload).run(on_rank, trainer, *args)


def group_here() -> GroupLike:
    """Return the group of this rank; outside of ranks a group of size 1 without a network. Collective on ranks."""
    if is_on_ranks():
        return init_group()
    return FakeGroup(device=use_device(resolve_device(detect_device_facts(os.environ, 0))), backend="none")


@dataclass(frozen=True)
class TorchSettings:
    """The settings of the process that creates it. Reading and setting them does not initialize a GPU."""

    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    matmul_precision: str = field(default_factory=torch.get_float32_matmul_precision)
    is_deterministic: bool = field(default_factory=torch.are_deterministic_algorithms_enabled)
    only_warns: bool = field(default_factory=torch.is_deterministic_algorithms_warn_only_enabled)
    cudnn_benchmark: bool = field(default_factory=lambda: torch.backends.cudnn.benchmark)
    cudnn_deterministic: bool = field(default_factory=lambda: torch.backends.cudnn.deterministic)

    def apply(self) -> None:
        """Apply the settings in this process."""
        torch.set_default_dtype(self.dtype)
        torch.set_float32_matmul_precision(self.matmul_precision)
        torch.use_deterministic_algorithms(self.is_deterministic, warn_only=self.only_warns)
        torch.backends.cudnn.benchmark = self.cudnn_benchmark
        torch.backends.cudnn.deterministic = self.cudnn_deterministic
