# SPDX-License-Identifier: Apache-2.0
"""`LocalUpdates`: each rank updates its own weights (local SGD), which are averaged every few updates and when read."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from ddpilot.errors import LoopError
from ddpilot.group.protocol import GroupLike


class LocalUpdates:
    """The models of a loop that were prepared with `sync_every`. Does nothing without one.

    The mean of moving averages is the moving average of the means, so an `AveragedModel` is averaged with the weights.
    """

    def __init__(self, group: GroupLike, num_updates: Callable[[], int]) -> None:
        self._group = group
        self._num_updates = num_updates
        self._every = self._start = 0
        self._models: list[nn.Module] = []
        self._averages: list[AveragedModel] = []
        self.is_equal = True
        """True if all ranks have the same weights. The same on every rank."""

    @property
    def is_on(self) -> bool:
        """True if a model was prepared with `sync_every`, on several ranks."""
        return bool(self._models)

    def add(self, model: DistributedDataParallel, every: int, start: int) -> None:
        """Let `model` keep its local gradients from update `start` on. Raises LoopError for different intervals."""
        if self.is_on and (every, start) != (self._every, self._start):
            found = f"`sync_every={every}, sync_start={start}` and, for another model, {self._every} and {self._start}"
            raise LoopError("preparing a model", found=found, fix="Average all models of a loop together.")
        self._every, self._start = every, start
        self._models = [*(one for one in self._models if one is not model.module), model.module]
        model.register_comm_hook(self, local_hook)

    def add_average(self, averaged: AveragedModel) -> None:
        """Average `averaged`, a moving average of weights, with the models."""
        self._averages.append(averaged)

    @property
    def is_local(self) -> bool:
        """True if the gradients of the next update are not all-reduced."""
        return self._num_updates() >= self._start

    def note_step(self) -> None:
        """Record that an optimizer has stepped, before its update is counted."""
        if self._models and self.is_local:
            self.is_equal = False

    def after_update(self, *, ends: bool) -> None:
        """Average the weights if it is due, and always if the pass over the data `ends` here. Collective then."""
        if not self.is_equal and (ends or (self._num_updates() - self._start) % self._every == 0):
            self.average()

    def average_before_reading(self) -> None:
        """Average the weights, for code that finds this state in a DDP model. Collective, unless they are equal."""
        self.average()

    @torch.no_grad()
    def average(self) -> None:
        """Average the weights over all ranks, unless they are equal. Collective then."""
        if self.is_equal:
            return
        self.is_equal = True
        weights = {one: None for model in self._models for one in model.parameters() if one.requires_grad}
        means = {one: None for averaged in self._averages for one in averaged.module.parameters()}
        by_dtype: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for one in (*weights, *means):
            by_dtype.setdefault((one.dtype, one.device), []).append(one.detach())
        for tensors in by_dtype.values():
            flat = torch.cat([one.reshape(-1) for one in tensors]).div_(self._group.world_size)
            self._group.all_reduce(flat)
            parts = torch.split(flat, [one.numel() for one in tensors])
            for tensor, part in zip(tensors, parts, strict=True):
                tensor.copy_(part.view_as(tensor))


def local_hook(local: LocalUpdates, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Return this rank's gradients as they are, or all-reduce them before the first local update."""
    if not local.is_local:
        return default_hooks.allreduce_hook(None, bucket)  # type: ignore[arg-type]
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


# DDP compares the annotations of a hook with the classes themselves, and here annotations are strings.
local_hook.__annotations__.update({"bucket": GradBucket, "return": torch.futures.Future[torch.Tensor]})
