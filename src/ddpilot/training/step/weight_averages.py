# SPDX-License-Identifier: Apache-2.0
"""Averages of the weights over the training, exponential (EMA) or equal (SWA), and over the ranks (local SGD)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from ddpilot.errors import LoopError
from ddpilot.group.protocol import GroupLike
from ddpilot.training.models.sharding import local_parts
from ddpilot.training.models.strategy import strategy_of
from ddpilot.training.options import Interval

_DID = "averaging weights"


@dataclass(frozen=True, kw_only=True)
class Averaging:
    """How weights are averaged during training. Raises LoopError for invalid values."""

    decay: float | None = None
    """Decay of an exponential moving average (EMA), such as 0.999; None: all averaged weights count the same (SWA)."""
    start: int | str | None = None
    """"75 epochs" or "1000 updates" (an int counts updates): until then, the average is the model. None: averaging
    starts with the first update or epoch at which `every` is due."""
    every: int | str = 1
    """"1 epoch" or "100 updates" (an int counts updates) between averaged weights, counted over the whole training."""
    batch_norm_batches: int | None = None
    """For `Trainer`, at the end of a fit with SWA: maximum number of training batches for the BatchNorm statistics of
    the average. None: one epoch; 0: statistics are not computed."""

    def __post_init__(self) -> None:
        if self.decay is not None and not 0 < self.decay < 1:
            fix = "Give a decay between 0 and 1, such as 0.999, or None for an equal average."
            raise LoopError(_DID, found=f"`decay` is {self.decay!r}", fix=fix)
        self.read()
        batches = self.batch_norm_batches
        if batches is not None and (isinstance(batches, bool) or batches < 0):
            found = f"`batch_norm_batches` is {batches!r}"
            raise LoopError(_DID, found=found, fix="Give a number of batches, or None for one epoch.")

    def read(self) -> tuple[Interval | None, Interval]:
        """Return `start` and `every` as intervals; `start` is None if it is not given."""
        start = None if self.start in (None, 0) else Interval.parse(self.start, did=_DID, name="start")
        return start, Interval.parse(self.every, did=_DID, name="every")


class WeightAverage(AveragedModel):
    """An average of the weights of `model`, updated by `after_update` and `after_epoch` when it is due.

    It does not wait for the device, as torch's own does, which reads its update counter each time. Buffers are those of
    the model.
    """

    def __init__(self, model: nn.Module, options: Averaging) -> None:
        super().__init__(model)
        for parameter in self.module.parameters():
            if parameter.dtype in (
                torch.bfloat16,
                torch.float16,
            ):  # a small step towards the model would be rounded away
                parameter.data = parameter.data.float()
        self.options = options
        self._start, self._every = options.read()
        self._known: tuple[torch.Tensor, int, int] | None = None
        """The counter tensor after an update made here, its version at that time and its value; None before that."""

    @property
    def has_begun(self) -> bool:
        """True once weights were averaged; waits for the device before that."""
        return self._is_known() or bool(self.n_averaged.item())

    @property
    def needs_batch_norm(self) -> bool:
        """True if BatchNorm statistics of the average have to be computed at the end: those of the model are not its.

        Not for an exponential average, whose weights stay close to those of the model.
        """
        return (
            self.options.decay is None
            and self.options.batch_norm_batches != 0
            and any(isinstance(layer, _BatchNorm) and layer.track_running_stats for layer in self.modules())
        )

    def after_update(self, model: nn.Module, before: int, now: int, epoch: int) -> None:
        """Average the weights if that is due after the updates since number `before`; `epoch`: the current one."""
        if self._every.counts_updates and self._every.is_due(before, now) and self._has_started(now, epoch):
            self.update_parameters(model)

    def after_epoch(self, model: nn.Module, update: int, num_epochs: int) -> None:
        """Average the weights if that is due at the end of an epoch, of which `num_epochs` are complete."""
        is_due = not self._every.counts_updates and self._every.is_due(num_epochs - 1, num_epochs)
        if is_due and self._has_started(update, num_epochs):
            self.update_parameters(model)

    def _has_started(self, update: int, num_epochs: int) -> bool:
        start = self._start
        return start is None or (update if start.counts_updates else num_epochs) >= start.count

    @torch.no_grad()
    def follow(self, model: nn.Module) -> None:
        """Take over the weights of `model` if nothing was averaged yet."""
        if not self.has_begun:
            for own, new in zip(_parameters(self.module), _parameters(model), strict=True):
                own.copy_(new)
            self._copy_buffers(model)

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Update the average with the parameters of `model`; the first one copies them. Buffers are always copied."""
        known = self._known
        count = known[2] if known is not None and self._is_known() else int(self.n_averaged.item())
        weight = 1 / (count + 1) if self.options.decay is None else 1 - self.options.decay
        by_kind: dict[tuple[torch.device, torch.dtype], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for own, new in zip(_parameters(self.module), _parameters(model), strict=True):
            averages, values = by_kind.setdefault((own.device, own.dtype), ([], []))
            averages.append(own)
            values.append(new.to(own.device, own.dtype))
        for (_, dtype), (averages, values) in by_kind.items():
            if count and (dtype.is_floating_point or dtype.is_complex):
                torch._foreach_lerp_(averages, values, weight)
            else:
                torch._foreach_copy_(averages, values)
        self._copy_buffers(model)
        self.n_averaged += 1
        self._known = self.n_averaged, self.n_averaged._version, count + 1

    def _copy_buffers(self, model: nn.Module) -> None:
        for own, new in zip(self.module.buffers(), model.buffers(), strict=True):
            own.copy_(new)

    def _is_known(self) -> bool:
        known = self._known
        return known is not None and known[0] is self.n_averaged and known[1] == self.n_averaged._version

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_known": None}  # a copy's counter starts with its own version


def _parameters(model: nn.Module) -> list[torch.Tensor]:
    """Return the parameters of `model`, or this rank's shards of them, without gradients."""
    strategy_of(model).settle()
    return [one.detach() for one in local_parts(list(model.parameters()))]


class WeightAverages:
    """The averages that a loop updates by itself, after the updates of each batch and at the end of each epoch."""

    def __init__(self) -> None:
        self.pairs: list[tuple[WeightAverage, nn.Module]] = []
        """The averages, with the models that they are of."""
        self._last: int | None = None

    def add(self, average: WeightAverage, model: nn.Module) -> None:
        """Add the `average` of `model`, which is not in DDP."""
        self.pairs.append((average, model))

    def count_from(self, num_updates: int) -> None:
        """Count updates from this number on, at the beginning of a pass and after a checkpoint was loaded."""
        self._last = num_updates

    def after_update(self, num_updates: int, epoch: int) -> None:
        """Update the averages that are due, once for all updates since the last call."""
        if not self.pairs or self._last is None or num_updates <= self._last:
            return
        before, self._last = self._last, num_updates
        for average, model in self.pairs:
            average.after_update(model, before, num_updates, epoch)

    def after_epoch(self, num_updates: int, num_epochs: int) -> None:
        """Update the averages that are due at the end of an epoch."""
        for average, model in self.pairs:
            average.after_epoch(model, num_updates, num_epochs)

    def settle(self, num_updates: int, epoch: int) -> None:
        """Before an evaluation: update the averages, and let those that have not begun be their models."""
        self.after_update(num_updates, epoch)
        for average, model in self.pairs:
            average.follow(model)


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
