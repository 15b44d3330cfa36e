# SPDX-License-Identifier: Apache-2.0
"""Searches for the largest batch size that fits into the memory of every rank."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import default_collate

from ddpilot.data.devices import to_device
from ddpilot.errors import LoopError
from ddpilot.group.accelerator import peak_bytes, reset_peak
from ddpilot.training.checks.batch_norm import find_batch_norms
from ddpilot.training.coordination.out_of_memory import joint_try
from ddpilot.training.models.ddp import unwrap
from ddpilot.training.preserving import preserved

if TYPE_CHECKING:
    from ddpilot.training.loop import Loop

_NUM_SAMPLES = 16


@dataclass(frozen=True, kw_only=True)
class BatchSizeTrial:
    """The result of one batch size, which all ranks tried at the same time."""

    per_rank: int
    """Samples on each rank."""
    failed_ranks: tuple[int, ...]
    """Ranks that ran out of memory; empty if the size fits everywhere."""
    seconds: float
    """Duration on the slowest rank: one forward, backward and optimizer step, two of them in the first trial."""
    peak_bytes: int
    """Highest peak of tensor memory over the ranks' devices, in bytes; 0 on the CPU, where it is not measured."""


@dataclass(frozen=True, kw_only=True)
class BatchSizeSearch:
    """The result of `find_batch_size`; its string form has one line per size."""

    per_rank: int
    """Samples on each rank, after the headroom was subtracted."""
    global_batch_size: int
    """`per_rank` times the number of ranks."""
    largest: int
    """The largest tried size that fit on every rank."""
    trials: tuple[BatchSizeTrial, ...]
    """In the order in which they ran."""

    def __str__(self) -> str:
        lines = [
            f"{trial.per_rank:>8,} on a rank: {_outcome(trial)}"
            for trial in sorted(self.trials, key=lambda trial: trial.per_rank)
        ]
        found = f"global_batch_size={self.global_batch_size} ({self.per_rank:,} on each rank)"
        return "\n".join([*lines, found])


def find_batch_size(
    loop: Loop,
    model: nn.Module,
    optimizer: Optimizer,
    dataset: Any,
    step: Callable[[nn.Module, Any], torch.Tensor],
    *,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    max_per_rank: int | None = None,
    headroom: float = 0.1,
) -> BatchSizeSearch:
    """Find the largest batch size that fits on every rank, by running real steps: double, then bisect. Collective.

    The first size is 1, or 2 for a model with BatchNorm, which cannot run on a single sample.

    All ranks try a size at the same time, since they may share a device or a machine's memory; a size fails if any rank
    runs out of memory. Afterwards model, optimizer, gradients and random states are restored bit for bit, and no loader
    has been used. Gradients are not all-reduced.

    `model`, `optimizer`: on the device, before or after `prepare`; preferably before, since DDP allocates gradient
    buckets. `step(model, batch)` returns the loss of a batch on the device; it runs in the loop's precision.
    `dataset`: map-style; its first 16 samples are read once and repeated, so put the longest ones there if their sizes
    differ (`torch.utils.data.Subset`). `collate_fn`: takes a list of samples; None: torch's default. `max_per_rank`:
    upper limit of samples per rank; None: the dataset's samples per rank. Required on the CPU, where the kernel kills
    a process that uses too much memory instead of refusing an allocation. `headroom`: fraction of the largest size to
    leave free for other memory of a run, in [0, 1).

    Raises LoopError, on all ranks, if not even the first size fits.
    """
    check_search(max_per_rank, headroom, loop.rank)
    if max_per_rank is None and loop.device.type == "cpu":
        what = "no `max_per_rank` on the CPU, where the system ends a process that uses too much memory"
        fix = "Give the largest number of samples on each rank to try, such as `max_per_rank=256`."
        raise _refuse(loop.rank, what, fix)
    limit = max_per_rank or max(1, len(dataset) // loop.world_size)
    first = 2 if find_batch_norms([model]) else 1
    if limit < first:
        what = f"`max_per_rank` is {limit}" if max_per_rank else f"the dataset has {limit} sample for each rank"
        fix = "BatchNorm needs two samples on each: allow more, or use GroupNorm."
        raise _refuse(loop.rank, f"{what}, and the model has BatchNorm", fix)
    trying = _Trying(loop, unwrap(model), _local(optimizer), step, _Repeated(dataset, collate_fn or default_collate))
    with preserved(trying.model, trying.optimizer, loop.device):
        largest = largest_that(trying.fits, limit, first)
    if not largest:
        raise _refuse_model(loop, trying.trials[0])
    per_rank = max(first, int(largest * (1 - headroom)))
    found = BatchSizeSearch(
        per_rank=per_rank,
        global_batch_size=per_rank * loop.world_size,
        largest=largest,
        trials=tuple(trying.trials),
    )
    loop.print(
        f"the largest batch that fits has {largest:,} samples on each rank; less {headroom:.0%}: "
        f"global_batch_size={found.global_batch_size}"
    )
    return found


def check_search(max_per_rank: int | None, headroom: float, rank: int | None = None) -> None:
    """Raise LoopError if `max_per_rank` is below 1 or `headroom` is not in [0, 1). Not collective."""
    if max_per_rank is not None and max_per_rank < 1:
        raise _refuse(rank, f"`max_per_rank` is {max_per_rank!r}", "Give a number of samples, 1 or more, or None.")
    if not 0 <= headroom < 1:
        raise _refuse(rank, f"`headroom` is {headroom}", "Give a share of the batch, such as 0.1.")


def largest_that(fits: Callable[[int], bool], limit: int, first: int = 1) -> int:
    """Return the largest size in [`first`, `limit`] that `fits`, to within 1/16; 0 if `first` does not fit."""
    low, size = 0, first
    while fits(size):
        low = size
        if size == limit:
            return low
        size = min(2 * size, limit)
    if not low:
        return 0
    high = size
    while high - low > max(1, low // 16):
        size = (low + high) // 2
        low, high = (size, high) if fits(size) else (low, size)
    return low


class _Repeated:
    """Makes batches of any size by repeating the first samples of a dataset."""

    def __init__(self, dataset: Any, collate_fn: Callable[[list[Any]], Any]) -> None:
        self._dataset = dataset
        self._samples: list[Any] = []
        self._collate = collate_fn

    def batch(self, size: int) -> Any:
        """Return a collated batch of `size` samples."""
        if not self._samples:  # read inside the search, which restores the random state that a dataset may change
            self._samples = [self._dataset[number] for number in range(min(_NUM_SAMPLES, len(self._dataset)))]
        return self._collate([self._samples[place % len(self._samples)] for place in range(size)])


class _Trying:
    """Runs the trial steps on this rank and combines the outcomes of all ranks."""

    def __init__(
        self,
        loop: Loop,
        model: nn.Module,
        optimizer: Optimizer,
        step: Callable[[nn.Module, Any], torch.Tensor],
        samples: _Repeated,
    ) -> None:
        self._loop = loop
        self.model = model
        self.optimizer = optimizer
        self._step = step
        self._samples = samples
        self.trials: list[BatchSizeTrial] = []

    def fits(self, size: int) -> bool:
        """True if a step with `size` samples fits on every rank. Collective; raises errors of `step` on all ranks."""
        reset_peak(self._loop.device)
        begin = time.monotonic()
        outcome = joint_try(lambda: self._take(size), self._loop.group)
        seconds = time.monotonic() - begin
        peak = peak_bytes(self._loop.device)
        said = self._loop.group.all_gather_object((seconds, peak))
        self.trials.append(
            BatchSizeTrial(
                per_rank=size,
                failed_ranks=outcome.ran_out,
                seconds=max(seconds for seconds, _ in said),
                peak_bytes=max(peak for _, peak in said),
            )
        )
        return not outcome.ran_out

    def _take(self, size: int) -> None:
        is_first = not self.trials
        for _ in range(2 if is_first else 1):  # the optimizer has its state from the second step on
            self._take_step(size)

    def _take_step(self, size: int) -> None:
        try:
            batch = to_device(self._samples.batch(size), self._loop.device)
            with self._loop.autocast():
                loss = self._step(self.model, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            if self._loop.device.type != "cpu":
                torch.accelerator.synchronize(self._loop.device)
        finally:
            self.model.zero_grad(set_to_none=True)


def _local(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer that this rank can step alone: the local shard of a ZeroRedundancyOptimizer."""
    sharded = sys.modules.get("torch.distributed.optim")  # if it was not imported, no optimizer is sharded
    is_sharded = sharded is not None and isinstance(optimizer, sharded.ZeroRedundancyOptimizer)
    return optimizer.optim if is_sharded else optimizer  # type: ignore[attr-defined]


def _outcome(trial: BatchSizeTrial) -> str:
    if trial.failed_ranks:
        return f"too much for rank {', '.join(map(str, trial.failed_ranks))}"
    peak = f", {trial.peak_bytes / 2**30:.2f} GiB at the most" if trial.peak_bytes else ""
    return f"fits, {trial.seconds:.3g} s for a step{peak}"


def _refuse_model(loop: Loop, first: BatchSizeTrial) -> LoopError:
    size = "two samples" if first.per_rank > 1 else "one sample"
    ranks = ", ".join(map(str, first.failed_ranks))
    return _refuse(
        loop.rank,
        f"a batch of {size} does not fit into the memory of rank {ranks} ({loop.device} here)",
        "Use precision='bf16', gradient checkpointing, shard='optimizer' or a smaller model; look whether other "
        "processes use the device.",
    )


def _refuse(rank: int | None, found: str, fix: str) -> LoopError:
    return LoopError("looking for a batch size", found=found, fix=fix, rank=rank)
