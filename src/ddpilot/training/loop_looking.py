# SPDX-License-Identifier: Apache-2.0
"""`Loop`'s collective reads: reduce, gather, evaluate and predict."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.data import DataLoader

from ddpilot.data.options import naming_rank
from ddpilot.data.shard import shard_loader
from ddpilot.training.batches import Loader
from ddpilot.training.coordination.collectives import gather_batch, gather_rows, reduce_value
from ddpilot.training.evaluation.evaluate import evaluate
from ddpilot.training.evaluation.predict import predict
from ddpilot.training.setup import LoopState


class LookingLoop(LoopState):
    """Reduced values, gathered rows, metrics and model outputs over all ranks."""

    def reduce(
        self, value: Any, op: Literal["mean", "sum", "min", "max"] = "mean", *, count: float | None = None
    ) -> torch.Tensor:
        """Reduce `value`, a number or a tensor of the same shape on all ranks, over all ranks. Collective.

        "mean" weights each rank by `count`, which defaults to its number of samples in the current batch: the mean of
        the ranks' local losses is then the mean over all samples. Outside of `batches` the default is 1, except for the
        loss tensor that `backward` was last called with, whose batch still determines it.
        """
        self._meet()
        weight = self._updates.count_behind(value) if count is None else count
        return reduce_value(value, op, weight, self.group)

    def gather(self, data: Any) -> Any:
        """Return the rows of all ranks in rank order, on every rank, on the CPU. Collective.

        `data`: tensors with any number of rows on each rank, tuples and dicts of them, or lists.
        """
        self._meet()
        return gather_rows(data, self.group)

    def gather_batch(self, rows: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Return the rows of all ranks, on every rank, and the index of this rank's first row. Collective.

        For losses that compare the samples of a batch with each other: the gradients of all ranks' losses flow back to
        the rank that each row comes from. `rows`: (n, ...) on the device, of any dtype, with any n on each rank,
        including 0; returns (sum of n, ...) in rank order. The backward pass is collective as well. Raises LoopError on
        all ranks if the shapes of a row or the dtypes differ.
        """
        self._meet()
        return gather_batch(rows, self.group)

    def evaluate(
        self,
        model: nn.Module,
        loader: Loader | DataLoader[Any],
        metrics: Mapping[str, Any],
        *,
        forward: Callable[[nn.Module, Any], tuple[Any, ...]] | None = None,
    ) -> dict[str, Any]:
        """Return the value of each metric over all samples of `loader`, the same on every rank. Collective.

        Each sample counts once. `loader`: a loader made by `loader` or `shard`, or a plain DataLoader, which is sharded
        here. `metrics`: maps a name to a torchmetrics object (which is not changed) or to a function of (output,
        target) that returns a value per sample, the batch's mean, or (mean, count of items in the mean); or a
        torchmetrics MetricCollection. The value is NaN without samples. The model runs unwrapped, in eval mode, with
        rank 0's buffers, and not at all on a rank without samples. `forward(model, batch)` returns the arguments of the
        metrics; default: `(model(*batch[:-1]), batch[-1])`, or `(model(**batch), batch)` for a mapping. Torch's random
        state is restored. Raises NonFiniteError on all ranks for an earlier update that has not been reported yet.
        """
        self._meet()
        self._updates.check_pending()
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
        """Return the model's outputs for all samples of `loader`, in dataset order, on rank 0. Collective.

        `loader`: a loader made by `loader` or `shard`, or a plain DataLoader, which is sharded here. Outputs: tensors
        with a row per sample, tuples and dicts of them, or a list with an object per sample; on the CPU. None on the
        other ranks, unless `on_all_ranks`, and if there are no samples. `to`: a directory that rank 0 writes batch by
        batch, so that memory holds only one batch; read it with `read_predictions`; its path is returned on every rank.
        `forward(model, batch)`: default `model(*batch[:-1])` for a tuple, `model(batch[0])` for one item,
        `model(**batch)` for a mapping, `model(batch)` for anything else. Raises NonFiniteError on all ranks for an
        earlier update that has not been reported yet.
        """
        self._meet()
        self._updates.check_pending()
        self._keeper.say_resumed()
        with naming_rank(self.rank), self.autocast():
            return predict(model, self._divided(loader), self.group, to=to, on_all_ranks=on_all_ranks, forward=forward)

    def _divided(self, loader: Loader | DataLoader[Any]) -> Loader:
        if not isinstance(loader, DataLoader):
            return loader
        # The batch size does not affect results here, so its meaning is not reported; ranks may also get no samples.
        return shard_loader(loader, rank=self.rank, world_size=self.world_size, seed=self.seed, empty_ranks=True)
