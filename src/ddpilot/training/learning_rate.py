# SPDX-License-Identifier: Apache-2.0
"""Searches for a learning rate by a short training in which it grows, jointly over ranks and on copies."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from ddpilot.errors import LoopError
from ddpilot.group.device import fork_rng
from ddpilot.training.batch_groups import Loader
from ddpilot.training.models.ddp import unwrap
from ddpilot.training.models.optimizers import ShardedState
from ddpilot.training.models.sharding import is_sharded

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ddpilot.training.loop import Loop

_MIN_UPDATES = 20
_BETA = 0.98
"""Weight of earlier losses in the moving average."""
_DIVERGED = 4.0
"""The search ends when the averaged loss is above the lowest one by this factor."""


@dataclass(frozen=True, kw_only=True)
class LearningRateSearch:
    """The result of a search for a learning rate, the same on every rank."""

    lr: float
    """The suggestion, from the middle of the longest fall of the loss."""
    lrs: tuple[float, ...]
    """The learning rate of each update."""
    losses: tuple[float, ...]
    """The mean loss of each update over the samples of all ranks."""
    smoothed: tuple[float, ...]
    """The moving averages of `losses`, by which `lr` is chosen."""
    diverged: bool
    """True if the search ended because the loss diverged, False if it reached the highest learning rate."""

    def __str__(self) -> str:
        end = "the loss diverged" if self.diverged else "the end of the range was reached"
        return (
            f"lr={self.lr:.3g}, after {len(self.lrs)} updates from {self.lrs[0]:.3g} to {self.lrs[-1]:.3g}, where {end}"
        )

    def plot(self) -> Figure:
        """Return a figure of the losses over the learning rates, with the suggestion. Raises LoopError."""
        try:
            from matplotlib import pyplot
        except ImportError as error:
            raise LoopError("plotting", found="matplotlib is not installed", fix="pip install matplotlib") from error
        figure, axis = pyplot.subplots(figsize=(5.5, 3.5), layout="tight")
        axis.plot(self.lrs, self.losses, alpha=0.3, label="loss")
        axis.plot(self.lrs, self.smoothed, label="moving average")
        axis.axvline(self.lr, color="C3", label=f"suggestion {self.lr:.3g}")
        top = max(self.smoothed[: max(1, len(self.smoothed) - 5)])
        axis.set(xscale="log", xlabel="learning rate", ylabel="loss", ylim=(None, 1.2 * top if top > 0 else None))
        axis.grid(alpha=0.3)
        axis.legend()
        pyplot.close(figure)
        return figure


def find_learning_rate(
    loop: Loop,
    model: nn.Module,
    optimizer: Optimizer,
    loader: Loader,
    step: Callable[[nn.Module, Any], Any],
    *,
    min_lr: float = 1e-7,
    max_lr: float = 10.0,
    num_updates: int = 100,
) -> LearningRateSearch:
    """Suggest a learning rate, from updates in which it grows from `min_lr` to `max_lr`. Collective.

    The updates use copies of model and optimizer, which take the memory of a second model and of its optimizer.
    Afterwards weights, buffers, optimizer state, random states and the position in the data are unchanged. Ranks get
    the same suggestion; at a different number of ranks the losses are equal up to rounding.

    - `model`, `optimizer`: before or after `prepare`. With several parameter groups the ratios of their rates are kept,
      and the result has the rates of the first group.
    - `loader`: a loader of `loop`; repeated if it has fewer batches.
    - `step(model, batch)`: returns this rank's mean loss, or (mean loss, count).
    - `num_updates`: number of updates.

    The search is from Smith 2015, "Cyclical Learning Rates for Training Neural Networks" (arXiv:1506.01186). The
    suggestion is fastai's "valley": a point in the middle of the longest fall of the averaged loss.

    Raises LoopError, on all ranks, for invalid limits, for sharded parameters or optimizer state, and if there are no
    batches. Raises it also if the loss diverges within the first updates or never falls.
    """
    check_range(min_lr, max_lr, num_updates)
    if is_sharded(unwrap(model)) or isinstance(optimizer, ShardedState):
        found = "parameters or optimizer state that are sharded, of which no copy can be made"
        raise _error(found, "Search before `prepare`, or without `shard=`.", loop.rank)
    with fork_rng([loop.device]):
        trial = loop.trial()
        copied, own = trial.prepare(*copy.deepcopy((unwrap(model), optimizer)))

        def train_batch(batch: Any) -> tuple[float, float]:
            with trial.accumulate(copied):
                loss = step(copied, batch)
                loss, count = loss if isinstance(loss, tuple) else (loss, None)
                trial.backward(loss, count)
            trial.step(own)
            return joint_mean(trial, loss, count)

        found_here = sweep(trial, loader, own, train_batch, min_lr, max_lr, num_updates)
    loop.print(found_here)
    return found_here


def check_range(min_lr: float, max_lr: float, num_updates: int) -> None:
    """Raise LoopError for limits of the learning rate or a number of updates that allow no search."""
    if not 0 < min_lr < max_lr or not math.isfinite(max_lr):
        raise _error(f"`min_lr={min_lr}` and `max_lr={max_lr}`", "Give 0 < min_lr < max_lr.")
    if num_updates < _MIN_UPDATES:
        raise _error(f"`num_updates` is {num_updates}", f"Give {_MIN_UPDATES} or more; 100 are usual.")


def joint_mean(loop: Loop, loss: Any, count: float | None) -> tuple[float, float]:
    """Return the mean loss of the current batch over all ranks, and its weight. Collective."""
    assert loop.batch is not None  # called inside `batches`
    mean = float(loop.reduce(loss, count=count))
    weight = loop.batch.global_count if count is None else float(loop.reduce(float(count), "sum"))
    return mean, float(weight)


def sweep(
    loop: Loop,
    loader: Loader,
    optimizer: Optimizer,
    train_batch: Callable[[Any], tuple[float, float]],
    min_lr: float,
    max_lr: float,
    num_updates: int,
) -> LearningRateSearch:
    """Train with growing learning rates, and choose one. Collective.

    `train_batch`: trains on a batch and returns the mean loss over all ranks, with its weight in the update.
    """
    search = _Sweep(optimizer, min_lr, max_lr, num_updates)
    while not search.is_over:
        before, is_over = len(search.losses), False
        for batch in loop.batches(loader):
            search.add(*train_batch(batch))
            assert loop.batch is not None  # inside `batches`
            if loop.batch.is_last:
                search.end_update()
            is_over = search.diverged or len(search.losses) == num_updates
            if is_over:
                break
        if loop.should_stop:
            raise _error(f"a stop of all ranks ({', '.join(loop.stop_reasons)})", "Search again.", loop.rank)
        if len(search.losses) == before and not is_over:
            raise _error(f"no batches in epoch {loop.epoch} of the loader", "Give one with samples.", loop.rank)
    return search.result(loop.rank)


class _Sweep:
    """The learning rates and losses of a search; the same on every rank."""

    def __init__(self, optimizer: Optimizer, min_lr: float, max_lr: float, num_updates: int) -> None:
        first = float(optimizer.param_groups[0]["lr"])
        self._groups = [(group, float(group["lr"]) / first if first else 1.0) for group in optimizer.param_groups]
        growth = (max_lr / min_lr) ** (1 / (num_updates - 1))
        self._planned = [min_lr * growth**number for number in range(num_updates)]
        self.losses: list[float] = []
        self.smoothed: list[float] = []
        self._average = self._total = self._weight = 0.0
        self.diverged = False
        self._set_lr()

    @property
    def is_over(self) -> bool:
        """True after the last update, and once the loss has diverged."""
        return self.diverged or len(self.losses) == len(self._planned)

    def add(self, mean: float, weight: float) -> None:
        """Add the mean loss of a batch."""
        self._total += mean * weight
        self._weight += weight

    def end_update(self) -> None:
        """Record the update, and set the next learning rate."""
        loss = self._total / self._weight if self._weight else math.nan
        self._total = self._weight = 0.0
        self._average = _BETA * self._average + (1 - _BETA) * loss
        smoothed = self._average / (1 - _BETA ** (len(self.losses) + 1))
        best = min([smoothed, *self.smoothed])
        self.diverged = not math.isfinite(smoothed) or smoothed > best + (_DIVERGED - 1) * abs(best)
        if math.isfinite(smoothed):
            self.losses.append(loss)
            self.smoothed.append(smoothed)
        if not self.is_over:
            self._set_lr()

    def _set_lr(self) -> None:
        lr = self._planned[len(self.losses)]
        for group, ratio in self._groups:
            old = group["lr"]
            group["lr"] = old.fill_(lr * ratio) if isinstance(old, torch.Tensor) else lr * ratio

    def result(self, rank: int) -> LearningRateSearch:
        """Return the result. Raises LoopError if there is nothing to choose from."""
        lrs, number = self._planned[: len(self.losses)], len(self.losses)
        if number < _MIN_UPDATES:
            at = self._planned[min(number, len(self._planned) - 1)]
            found = f"the loss diverged after {number} updates, at a learning rate of {at:.3g}"
            raise _error(found, "Give a smaller `min_lr`; check that the loss is finite at the start.", rank)
        first, last = number // 10, number - 5
        place = find_valley(self.smoothed[first:last])
        if place is None:
            found = f"the loss never fell between learning rates of {lrs[0]:.3g} and {lrs[-1]:.3g}"
            raise _error(found, "Check that the model is trained; or give other `min_lr` and `max_lr`.", rank)
        return LearningRateSearch(
            lr=lrs[first + place],
            lrs=tuple(lrs),
            losses=tuple(self.losses),
            smoothed=tuple(self.smoothed),
            diverged=self.diverged,
        )


def find_valley(losses: Sequence[float]) -> int | None:
    """Return the index in the middle of the longest valley of `losses`; None if it is shorter than three losses.

    The valley is the longest subsequence in which each loss is below the previous one, and the middle is half of its
    length before its end, as in fastai's suggestion "valley" (fastai/callback/schedule.py).
    """
    lengths = [1] * len(losses)
    for index, loss in enumerate(losses):
        lengths[index] += max((lengths[j] for j in range(index) if loss < losses[j]), default=0)
    if not lengths or max(lengths) < 3:
        return None
    end = lengths.index(max(lengths))
    start = end - lengths[end]
    third = (end - start) / 3
    return start + int(third) + int(third / 2)


def _error(found: str, fix: str, rank: int | None = None) -> LoopError:
    return LoopError("searching for a learning rate", found=found, fix=fix, rank=rank)
