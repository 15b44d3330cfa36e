# SPDX-License-Identifier: Apache-2.0
"""What a rank's mean loss has to be multiplied by, so that DDP's mean over ranks is the mean over all samples."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ddpilot.data.batches import LocalBatch
from ddpilot.data.plan import Plan


@dataclass(frozen=True, eq=False)
class CurrentBatch:
    """The batch that the loop is at, and the accumulation group it belongs to: batches that make one update."""

    epoch: int
    index: int
    """Number of the global batch in its epoch, from 0."""
    count: int
    """Samples of this rank."""
    global_count: int
    """Samples of all ranks together."""
    sample_ids: NDArray[np.int64]
    """Numbers of this rank's samples in the dataset, shape (`count`,)."""
    group_count: int
    """Samples of all ranks in all batches of the accumulation group."""
    group_size: int
    """Batches in the accumulation group; fewer in the last one of an epoch."""
    is_first: bool
    """Is this the first batch of its accumulation group?"""
    is_last: bool
    """Is this the last batch of its accumulation group, after which the weights are updated?"""


def place_batch(batch: LocalBatch, plan: Plan, epoch: int, accumulation: int) -> CurrentBatch:
    """Where `batch` stands among the accumulation groups of `accumulation` batches each, counted from the epoch's 0."""
    start = batch.index - batch.index % accumulation
    stop = min(start + accumulation, plan.num_batches)
    return CurrentBatch(
        epoch=epoch,
        index=batch.index,
        count=batch.count,
        global_count=plan.batch_size(batch.index),
        sample_ids=batch.sample_ids,
        group_count=sum(plan.batch_size(index) for index in range(start, stop)),
        group_size=stop - start,
        is_first=batch.index == start,
        is_last=batch.index == stop - 1,
    )


def backward_weighted(
    loss: torch.Tensor, weight: float, parameters: Iterable[torch.nn.Parameter], *, retain_graph: bool = False
) -> None:
    """Add the gradient of `weight` times `loss` (a scalar); with a `weight` of 0 add exact zeros, whatever `loss` is.

    DDP waits for every rank, so a rank without samples runs through its graph too; but the mean of no samples is NaN,
    and so is zero times NaN. `parameters`: all that the graph may reach, only needed for that.
    """
    if weight:
        (loss * weight).backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
        return
    # Leaf hooks run before a gradient is accumulated and before DDP sees it.
    hooks = [p.register_hook(torch.zeros_like) for p in parameters if p.requires_grad and p.is_leaf]
    try:
        (loss * 0).backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
    finally:
        for hook in hooks:
            hook.remove()


class CountTotals:
    """Totals of counts that are known only batch by batch (tokens), over one accumulation group of one model.

    The first batch's total times the number of batches stands in for the group's; once the last is known, the
    accumulated gradients are multiplied by `correction`.
    """

    def __init__(self, first_total: float, group_size: int) -> None:
        self.reference = max(first_total, 1.0) * group_size
        self._total = 0.0

    def add(self, global_count: float) -> None:
        """One more batch, with the count of all ranks together."""
        self._total += global_count

    @property
    def correction(self) -> float:
        """What the gradients have to be multiplied by after the group's last batch; 0 where nothing was counted."""
        return self.reference / self._total if self._total else 0.0
