# SPDX-License-Identifier: Apache-2.0
"""Detects buffers that differ between ranks (DDP506), and BatchNorm layers whose batches are too small (DDP501)."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from ddpilot.data.global_batches import Plan
from ddpilot.errors import LoopError, list_names
from ddpilot.findings.catalog import how_to_open
from ddpilot.findings.finding import Finding
from ddpilot.group.protocol import GroupLike
from ddpilot.training.models.ddp import unwrap
from ddpilot.training.models.registry import PreparedModel, PreparedObjects

_NUM_UPDATES = 2
"""In updates: during the first one, an optimizer may still warm up and a codebook be initialised."""
_TOLERANCE = 1e-4
"""Relative: different devices round differently."""


class BufferCheck:
    """Compares the buffers of prepared models across ranks twice: after two updates and after the first pass."""

    def __init__(self, prepared: PreparedObjects, group: GroupLike) -> None:
        self._prepared = prepared
        self._group = group
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._num_updates = 0
        self._is_due_at_end = False
        self.is_waiting = False
        """True until the first comparison; False if there are no buffers to compare."""

    def add(self, prepared: PreparedModel) -> None:
        """Compare the buffers of `prepared`, which was just added, later."""
        buffers = [one for _, one in _compared(prepared)]
        self._known |= {id(one): (weakref.ref(one), one._version) for one in buffers}
        if buffers:
            self.is_waiting = self._is_due_at_end = True

    def after_update(self) -> tuple[Finding, ...]:
        """Count an update; after the second one, compare buffers and return the findings. Collective then."""
        self._num_updates += 1
        if self._num_updates < _NUM_UPDATES:
            return ()
        self.is_waiting = False
        return self._compare()

    def end_pass(self) -> tuple[Finding, ...]:
        """Compare buffers after the first pass with updates and return the findings. Collective then."""
        if not self._is_due_at_end or not self._num_updates:
            return ()
        self._is_due_at_end = self.is_waiting = False
        return self._compare()

    def _compare(self) -> tuple[Finding, ...]:
        own = {name: _summarise(buffer) for name, buffer in self._buffers() if self._has_changed(buffer)}
        of_ranks = self._group.all_gather_object(own)
        known = dict.fromkeys(name for one in of_ranks for name in one)
        names = [name for name in known if not _are_equal([one[name] for one in of_ranks if name in one])]
        if not names:
            return ()
        self._is_due_at_end = False
        return (_make_finding(names, self._group.world_size),)

    def _buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        for prepared in self._prepared.models:
            if prepared.module.training:
                yield from _compared(prepared)

    def _has_changed(self, buffer: torch.Tensor) -> bool:
        ref, version = self._known.get(id(buffer), (None, -1))
        return ref is None or ref() is not buffer or buffer._version != version


def _compared(prepared: PreparedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield persistent buffers by name, without the statistics of norm layers, which differ per rank by design.

    Yields nothing for a model on one rank, and if DDP broadcasts its buffers.
    """
    ddp = prepared.ddp
    if ddp is None and not prepared.is_sharded:
        return
    if getattr(ddp, "broadcast_buffers", False) or getattr(ddp, "forward_sync_buffers", False):
        return
    for path, layer in prepared.module.named_modules():
        if isinstance(layer, _NormBase):
            continue
        for name, buffer in layer._buffers.items():
            if buffer is not None and buffer.numel() and name not in layer._non_persistent_buffers_set:
                yield f"{path}.{name}".lstrip("."), buffer


def _summarise(buffer: torch.Tensor) -> tuple[float, float, float]:
    """Return the norm, the sum and a weighted sum of `buffer`, which together distinguish two buffers."""
    values = buffer.detach()
    values = torch.view_as_real(values) if values.is_complex() else values
    values = values.reshape(-1).cpu().double()
    weights = torch.linspace(0.5, 1.5, len(values), dtype=torch.float64)
    return values.norm().item(), values.sum().item(), (values * weights).sum().item()


def _are_equal(summaries: list[tuple[float, float, float]]) -> bool:
    size = max(abs(norm) for norm, _, _ in summaries)
    # Comparisons with NaN are False: values that are not finite are reported by other checks.
    return not any(
        abs(value - first) > _TOLERANCE * max(size, 1e-12)
        for one in summaries
        for value, first in zip(one, summaries[0], strict=True)
    )


def _make_finding(names: list[str], world_size: int) -> Finding:
    return Finding(
        code="DDP506",
        name="buffers-differ",
        severity="warning",
        summary=f"buffers of the model differ between ranks: {list_names(names)}",
        ranks=tuple(range(world_size)),
        evidence=("the forward pass updates them from each rank's own samples",),
        why="A forward pass that reads them (a codebook, a queue, a running mean) gives different results on each "
        "rank, and only rank 0's buffers are saved.",
        fix="Compute the update from all ranks' samples (loop.gather_batch), or use rank 0's buffers on all ranks: "
        "prepare(..., forward_sync_buffers=True). Buffers with persistent=False are not compared.",
        source=how_to_open("DDP506"),
    )


MIN_SAMPLES = 16
"""Below this number of samples per rank, BatchNorm's statistics are noisy; from 32 on, more make no difference."""


def find_batch_norms(models: Iterable[nn.Module]) -> list[str]:
    """Return the names of BatchNorm layers that are in training mode and compute their statistics per rank.

    SyncBatchNorm layers are left out.
    """
    return [
        name or type(layer).__name__
        for model in models
        for name, layer in unwrap(model).named_modules()
        if isinstance(layer, _BatchNorm) and not isinstance(layer, nn.SyncBatchNorm) and layer.training
    ]


def check_batch_norms(models: Iterable[nn.Module], loader: object) -> tuple[Finding, ...]:
    """Check the batches of `loader`, and of each loader that it combines, as `check_plan` does.

    Batches of several loaders are checked one by one: the program gets them separately, and nothing says that it runs
    them in one forward pass.
    """
    loaders = getattr(loader, "loaders", (loader,))
    found: list[Finding] = []
    for number, one in enumerate(loaders):
        of = f" of loader {number}" if len(loaders) > 1 else ""
        found += check_plan(models, getattr(one, "plan", None), of)
    return tuple(found)


def check_plan(models: Iterable[nn.Module], plan: object, of: str = "") -> tuple[Finding, ...]:
    """Return a finding (DDP501) if some rank's part of a full batch has fewer than 16 samples.

    The result is the same on every rank; not collective. Raises LoopError if a part of the first or last batch has
    fewer than two samples, since BatchNorm would fail there. `plan`: the loader's; nothing is checked unless it is a
    `Plan`. `of`: names the loader in messages.
    """
    names = find_batch_norms(models)
    if not isinstance(plan, Plan) or plan.world_size == 1 or not plan.num_batches or not names:
        return ()
    _check_single_samples(names, plan, of)
    sizes = _parts(plan, 0)
    small = tuple(rank for rank, size in enumerate(sizes) if size < MIN_SAMPLES)
    if not small:
        return ()
    return (
        Finding(
            code="DDP501",
            name="small-batch-norm",
            severity="warning",
            summary=f"BatchNorm takes its statistics from {min(sizes)} samples",
            ranks=small,
            evidence=(
                f"layers: {list_names(names)}",
                f"a global batch{of} of {plan.batch_size(0)} samples is divided into {', '.join(map(str, sizes))}",
            ),
            why="Each rank normalises with its own samples only, so results depend on the number of ranks, and "
            f"statistics of fewer than {MIN_SAMPLES} samples are noisy.",
            fix="Use GroupNorm, a larger global batch, or on GPUs prepare(..., sync_batch_norm=True), in a "
            'Trainer fit(..., ddp={"sync_batch_norm": True}).',
            source=how_to_open("DDP501"),
        ),
    )


def _parts(plan: Plan, batch: int) -> list[int]:
    return plan.division.sizes(plan.batch_size(batch))


def _check_single_samples(names: list[str], plan: Plan, of: str) -> None:
    for batch in sorted({0, plan.num_batches - 1}):
        sizes = _parts(plan, batch)
        if min(sizes) > 1:
            continue
        raise LoopError(
            "beginning an epoch",
            found=f"batch {batch}{of} has {plan.batch_size(batch)} samples for {plan.world_size} ranks "
            f"({', '.join(map(str, sizes))}), and BatchNorm ({names[0]}) needs two on each",
            fix="Use drop_last=True, a different global_batch_size, fewer ranks, or GroupNorm.",
        )
