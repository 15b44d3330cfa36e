# SPDX-License-Identifier: Apache-2.0
"""Searches for the largest batch size that fits on every rank, and scales the learning rate to a batch size."""

from __future__ import annotations

import copy
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import default_collate

from ddpilot.data.nested import to_device
from ddpilot.environments.detect import detect_topology
from ddpilot.errors import LoopError
from ddpilot.group.device import capture_rng, peak_bytes, reset_peak, restore_rng
from ddpilot.training.checks.buffers import find_batch_norms
from ddpilot.training.coordination.out_of_memory import joint_try
from ddpilot.training.models.ddp import unwrap
from ddpilot.training.models.optimizers import local_optimizer
from ddpilot.training.models.sharding import is_sharded

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

    All ranks try a size at the same time, since they may share a device or a machine's memory; a size fails if any rank
    runs out of memory. The first size is 1, or 2 for a model with BatchNorm, which cannot run on a single sample.
    Gradients are not all-reduced. Afterwards model, optimizer, gradients and random states are restored bit for bit,
    and no loader has been used.

    - `model`, `optimizer`: on the device, preferably before `prepare`: the search does not use DDP's gradient buckets,
      so their memory would count in addition.
    - `dataset`: map-style. Its first 16 samples are read once and repeated. If sizes differ, put the longest samples
      there (`torch.utils.data.Subset`).
    - `step(model, batch)`: returns the loss of a batch on the device; it runs in the loop's precision.
    - `collate_fn`: makes a batch from a list of samples; None: torch's default.
    - `max_per_rank`: maximum number of samples per rank; None: the dataset's samples per rank. Required on the CPU,
      where the kernel kills a process that uses too much memory instead of refusing an allocation.
    - `headroom`: fraction of the largest size to leave free for other memory of a run, in [0, 1).

    Raises LoopError for sharded parameters, for limits that are not possible, and, on all ranks, if not even the first
    size fits.
    """
    check_search(max_per_rank, headroom, loop.rank)
    if is_sharded(model):
        what = "the parameters of the model are sharded, and each rank tries sizes by itself"
        raise _search_error(loop.rank, what, "Search before prepare(), or choose the size yourself.")
    if max_per_rank is None and loop.device.type == "cpu":
        what = "no `max_per_rank` on the CPU, where the system kills a process that uses too much memory"
        fix = "Pass the largest number of samples on each rank to try, such as `max_per_rank=256`."
        raise _search_error(loop.rank, what, fix)
    limit = max_per_rank or max(1, len(dataset) // loop.world_size)
    first = 2 if find_batch_norms([model]) else 1
    if limit < first:
        what = f"`max_per_rank` is {limit}" if max_per_rank else f"the dataset has {limit} sample for each rank"
        fix = "BatchNorm needs two samples on each: allow more, or use GroupNorm."
        raise _search_error(loop.rank, f"{what}, and the model has BatchNorm", fix)
    trials = _Trials(loop, unwrap(model), local_optimizer(optimizer), step, dataset, collate_fn or default_collate)
    with preserved(trials.model, trials.optimizer, loop.device):
        largest = largest_that(trials.fits, limit, first)
    if not largest:
        raise _nothing_fits(loop, trials.results[0])
    per_rank = max(first, int(largest * (1 - headroom)))
    found = BatchSizeSearch(
        per_rank=per_rank,
        global_batch_size=per_rank * loop.world_size,
        largest=largest,
        trials=tuple(trials.results),
    )
    loop.print(
        f"the largest batch that fits has {largest:,} samples on each rank; less {headroom:.0%}: "
        f"global_batch_size={found.global_batch_size}"
    )
    return found


def check_search(max_per_rank: int | None, headroom: float, rank: int | None = None) -> None:
    """Raise LoopError if `max_per_rank` is below 1 or `headroom` is not in [0, 1). Not collective."""
    if max_per_rank is not None and max_per_rank < 1:
        raise _search_error(
            rank, f"`max_per_rank` is {max_per_rank!r}", "Pass a number of samples, 1 or more, or None."
        )
    if not 0 <= headroom < 1:
        raise _search_error(rank, f"`headroom` is {headroom}", "Pass a fraction of the batch, such as 0.1.")


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


@dataclass(eq=False)
class _Trials:
    """Runs the trial steps on this rank and combines the outcomes of all ranks."""

    loop: Loop
    model: nn.Module
    optimizer: Optimizer
    step: Callable[[nn.Module, Any], torch.Tensor]
    dataset: Any
    collate_fn: Callable[[list[Any]], Any]
    samples: list[Any] = field(default_factory=list)
    """The first samples of the dataset, of which batches of any size are made."""
    results: list[BatchSizeTrial] = field(default_factory=list)

    def fits(self, size: int) -> bool:
        """True if a step with `size` samples fits on every rank. Collective; raises errors of `step` on all ranks."""
        reset_peak(self.loop.device)
        begin = time.monotonic()
        outcome = joint_try(lambda: self._take(size), self.loop.group)
        seconds = time.monotonic() - begin
        peak = peak_bytes(self.loop.device)
        of_ranks = self.loop.group.all_gather_object((seconds, peak))
        self.results.append(
            BatchSizeTrial(
                per_rank=size,
                failed_ranks=outcome.ran_out,
                seconds=max(seconds for seconds, _ in of_ranks),
                peak_bytes=max(peak for _, peak in of_ranks),
            )
        )
        return not outcome.ran_out

    def _take(self, size: int) -> None:
        for _ in range(1 if self.results else 2):  # the optimizer has its state from the second step on
            try:
                batch = to_device(self._make_batch(size), self.loop.device)
                with self.loop.autocast():
                    loss = self.step(self.model, batch)
                loss.backward()  # type: ignore[no-untyped-call]
                self.optimizer.step()
                if self.loop.device.type != "cpu":
                    torch.accelerator.synchronize(self.loop.device)
            finally:
                self.model.zero_grad(set_to_none=True)

    def _make_batch(self, size: int) -> Any:
        if not self.samples:  # read inside the search, which restores the random state that a dataset may change
            self.samples = [self.dataset[number] for number in range(min(_NUM_SAMPLES, len(self.dataset)))]
        return self.collate_fn([self.samples[place % len(self.samples)] for place in range(size)])


def _outcome(trial: BatchSizeTrial) -> str:
    if trial.failed_ranks:
        return f"too much for rank {', '.join(map(str, trial.failed_ranks))}"
    peak = f", {trial.peak_bytes / 2**30:.2f} GiB at the most" if trial.peak_bytes else ""
    return f"fits, {trial.seconds:.3g} s for a step{peak}"


def _nothing_fits(loop: Loop, first: BatchSizeTrial) -> LoopError:
    size = "two samples" if first.per_rank > 1 else "one sample"
    ranks = ", ".join(map(str, first.failed_ranks))
    return _search_error(
        loop.rank,
        f"a batch of {size} does not fit into the memory of rank {ranks} ({loop.device} here)",
        "Use precision='bf16', gradient checkpointing, shard='optimizer' or a smaller model; check whether other "
        "processes use the device.",
    )


def _search_error(rank: int | None, found: str, fix: str) -> LoopError:
    return LoopError("searching for a batch size", found=found, fix=fix, rank=rank)


@contextmanager
def preserved(model: nn.Module, optimizer: Optimizer, device: torch.device) -> Iterator[None]:
    """Restore `model`, `optimizer` and this process's random states after the block, bit for bit.

    The copies are in CPU memory: on the device, a second model would leave less room than training has. The tensors
    remain the same objects. Gradients are None in the block.
    """
    rng = capture_rng(device)
    tensors = [*model.parameters(), *model.buffers()]
    kept = [_to_host(tensor) for tensor in tensors]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    modes = [(layer, layer.training) for layer in model.modules()]
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    states = [(key, entries, _keep(entries)) for key, entries in optimizer.state.items()]
    try:
        for parameter, _ in gradients:
            parameter.grad = None
        yield
    finally:
        with torch.no_grad():
            for tensor, host in zip(tensors, kept, strict=True):
                tensor.copy_(host)
            optimizer.state.clear()
            optimizer.state.update({key: _put_back(entries, host) for key, entries, host in states})
        for group, values in zip(optimizer.param_groups, groups, strict=True):
            group.update(values)
        for layer, was_training in modes:
            layer.training = was_training
        for parameter, gradient in gradients:
            parameter.grad = gradient
        restore_rng(rng, device)


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def _keep(entries: Any) -> Any:
    """Return an optimizer's state of one parameter: its objects, each with a copy of its contents."""
    if not isinstance(entries, dict):
        return copy.deepcopy(entries)
    return {
        name: (value, _to_host(value) if isinstance(value, torch.Tensor) else copy.deepcopy(value))
        for name, value in entries.items()
    }


def _put_back(entries: Any, kept: Any) -> Any:
    if not isinstance(entries, dict):
        return kept
    entries.clear()
    for name, (value, inside) in kept.items():
        entries[name] = value.copy_(inside) if isinstance(value, torch.Tensor) else inside
    return entries


Rule = Literal["linear", "sqrt"]

_SOURCES: dict[str, str] = {
    "linear": "the linear rule of Goyal et al. 2017, for SGD; warm up over the first epochs",
    "sqrt": "the square-root rule of Krizhevsky 2014, for Adam see Malladi et al. 2022",
}


def scale_lr(
    lr: float,
    global_batch_size: int,
    base_batch_size: int,
    rule: Rule = "linear",
    *,
    say: Callable[[str], object] | None = None,
) -> float:
    """Return the learning rate for `global_batch_size`, given `lr` for `base_batch_size`; reported on rank 0.

    Both sizes count the samples of all ranks in one update, including accumulated batches. More ranks with the same
    global batch do not need a different learning rate, so ddpilot never scales it automatically.

    - `rule`: "linear": multiply by the ratio of the sizes, for SGD with a warm-up; it held up to 8,192 images (Goyal et
      al. 2017, arXiv:1706.02677). "sqrt": multiply by the square root of the ratio, which keeps the variance of an
      update (Krizhevsky 2014, arXiv:1404.5997). For Adam and RMSProp this follows from theory (Malladi et al. 2022,
      arXiv:2205.10287, which also multiplies 1 - beta by the ratio and divides epsilon by its square root).
    - `say`: called with the message, on rank 0 only; None: print.

    Not collective. Raises LoopError for sizes below 1, a learning rate that is not positive and finite, and an unknown
    `rule`.
    """
    if rule not in _SOURCES:
        raise _lr_error(f"`rule` is {rule!r}", "Use 'linear' or 'sqrt'.")
    if min(global_batch_size, base_batch_size) < 1:
        found = f"batch sizes of {global_batch_size} and {base_batch_size}"
        raise _lr_error(found, "Give the samples of all ranks in one update, 1 or more.")
    if not (lr > 0 and math.isfinite(lr)):
        raise _lr_error(f"`lr` is {lr}", "Give a positive learning rate.")
    ratio = global_batch_size / base_batch_size
    scaled = lr * (ratio if rule == "linear" else math.sqrt(ratio))
    if detect_topology(os.environ).rank == 0:
        (say or print)(
            f"learning rate {lr:g} for batches of {base_batch_size:,} becomes {scaled:.6g} for {global_batch_size:,} "
            f"({_SOURCES[rule]})"
        )
    return scaled


def _lr_error(found: str, fix: str) -> LoopError:
    return LoopError("scaling the learning rate", found=found, fix=fix)
