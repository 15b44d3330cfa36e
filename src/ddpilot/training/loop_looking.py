# SPDX-License-Identifier: Apache-2.0
"""The verbs of a `Loop` that look at what all ranks have."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.data import DataLoader

from ddpilot.data.options import naming_rank
from ddpilot.data.shard import shard_loader
from ddpilot.training.evaluating import evaluate
from ddpilot.training.grouping import Loader
from ddpilot.training.loop_state import LoopState
from ddpilot.training.predicting import predict
from ddpilot.training.reducing import gather_batch, gather_rows, reduce_value


class LookingLoop(LoopState):
    """Values, rows, metrics and outputs of all ranks together."""

    def reduce(
        self, value: Any, op: Literal["mean", "sum", "min", "max"] = "mean", *, count: float | None = None
    ) -> torch.Tensor:
        """`value` (a number or a tensor of the same shape on all ranks) over all ranks. Collective.

        "mean" weights each rank by `count`, by default its samples in the current batch, so the mean of the batch's
        local losses is that of all its samples. Outside of `batches` that is 1, and for the very tensor that `backward`
        took last still its batch's.
        """
        self._leaving.meet()
        weight = self._updates.count_behind(value) if count is None else count
        return reduce_value(value, op, weight, self.group)

    def gather(self, data: Any) -> Any:
        """The rows of all ranks in the order of ranks, on every rank, on the CPU. Collective.

        `data`: tensors with any number of rows on each rank, tuples and dicts of them, or lists.
        """
        self._leaving.meet()
        return gather_rows(data, self.group)

    def gather_batch(self, rows: torch.Tensor) -> tuple[torch.Tensor, int]:
        """The rows of all ranks, on every rank, and the number of the first one that is this rank's. Collective.

        For a loss that compares samples of the batch with each other: gradients flow back to the rank that each row
        comes from, from the losses of all ranks. `rows`: (n, ...) on the device, of any dtype, with any number of rows
        on each rank, 0 too; returns (sum of n, ...) in the order of ranks. The backward pass is collective as well.
        Raises LoopError on all ranks for rows of different shapes or dtypes.
        """
        self._leaving.meet()
        return gather_batch(rows, self.group)

    def evaluate(
        self,
        model: nn.Module,
        loader: Loader | DataLoader[Any],
        metrics: Mapping[str, Any],
        *,
        forward: Callable[[nn.Module, Any], tuple[Any, ...]] | None = None,
    ) -> dict[str, Any]:
        """The value of each metric over all samples of `loader`, each counted once; the same on every rank. Collective.

        `loader`: what `loader` or `shard` made, or a plain DataLoader, which is divided here.
        `metrics`: name -> torchmetrics object (left as it is), or function of (output, target) that returns a value
        per sample, the batch's mean, or (mean, count of what it is over); NaN where there are no samples. The model
        runs unwrapped, in eval mode, with rank 0's buffers, and not at all where a rank has no sample.
        `forward(model, batch)` returns what metrics are called with; default: `(model(*batch[:-1]), batch[-1])`, or
        `(model(**batch), batch)` for a mapping. `metrics` may be a torchmetrics MetricCollection. Torch's random state
        is left as it was.
        """
        self._leaving.meet()
        self._keeper.say_resumed()
        with naming_rank(self.rank), self.autocast():
            return evaluate(model, self._divided(loader), metrics, self.group, forward)

    def predict(
        self,
        model: nn.Module,
        loader: Loader | DataLoader[Any],
        *,
        to: str | os.PathLike[str] | None = None,
        on_all_ranks: bool = False,
        forward: Callable[[nn.Module, Any], Any] | None = None,
    ) -> Any:
        """The model's outputs for all samples of `loader`, in the order of the dataset, on rank 0. Collective.

        `loader`: what `loader` or `shard` made, or a plain DataLoader, which is divided here.
        Outputs: tensors with a row per sample, tuples and dicts of them, or a list with an object per sample; on the
        CPU. None on the other ranks, unless `on_all_ranks`, and where there are no samples. `to`: a folder that rank 0
        writes batch by batch, so that memory holds one batch only; `read_predictions` reads it; the path is returned
        on every rank. `forward(model, batch)`; default: `model(*batch[:-1])` of a tuple, `model(batch[0])` of
        one item, `model(**batch)` of a mapping, `model(batch)` of anything else.
        """
        self._leaving.meet()
        self._keeper.say_resumed()
        with naming_rank(self.rank), self.autocast():
            return predict(model, self._divided(loader), self.group, to=to, on_all_ranks=on_all_ranks, forward=forward)

    def _divided(self, loader: Loader | DataLoader[Any]) -> Loader:
        if not isinstance(loader, DataLoader):
            return loader
        # Which batch size is meant does not matter here, so nothing is said of it; nor whether every rank gets a part.
        return shard_loader(loader, rank=self.rank, world_size=self.world_size, seed=self.seed, empty_ranks=True)
