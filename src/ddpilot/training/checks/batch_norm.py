# SPDX-License-Identifier: Apache-2.0
"""Warns about BatchNorm layers whose per-rank batch is too small for stable statistics (DDP501)."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ddpilot.data.plan import Plan
from ddpilot.errors import LoopError
from ddpilot.findings.finding import Finding
from ddpilot.training.models.ddp import unwrap

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


def check_batch_norms(models: Iterable[nn.Module], plan: object, rank: int) -> tuple[Finding, ...]:
    """Return a finding (DDP501) if some rank's part of a full batch has fewer than 16 samples.

    The result is the same on every rank; not collective. Raises LoopError if a part of the first or last batch has
    fewer than two samples, since BatchNorm would fail there. `plan`: the loader's; nothing is checked unless it is a
    `Plan`.
    """
    names = find_batch_norms(models)
    if not isinstance(plan, Plan) or plan.world_size == 1 or not plan.num_batches or not names:
        return ()
    _refuse_single(names, plan, rank)
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
                f"layers: {', '.join(names[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''}",
                f"a global batch of {plan.batch_size(0)} samples is divided into {', '.join(map(str, sizes))}",
            ),
            why="Each rank normalises with its own samples only, so results depend on the number of ranks, and "
            f"statistics of fewer than {MIN_SAMPLES} samples are noisy.",
            fix="Use GroupNorm, a larger global batch, or on GPUs prepare(..., sync_batch_norm=True), of a Trainer "
            'fit(..., ddp={"sync_batch_norm": True}).',
        ),
    )


def _parts(plan: Plan, batch: int) -> list[int]:
    return [stop - start for start, stop in (plan.piece(batch, rank) for rank in range(plan.world_size))]


def _refuse_single(names: list[str], plan: Plan, rank: int) -> None:
    for batch in sorted({0, plan.num_batches - 1}):
        sizes = _parts(plan, batch)
        if min(sizes) > 1:
            continue
        raise LoopError(
            "beginning an epoch",
            found=f"batch {batch} has {plan.batch_size(batch)} samples for {plan.world_size} ranks "
            f"({', '.join(map(str, sizes))}), and BatchNorm ({names[0]}) needs two on each",
            fix="Use drop_last=True, another global_batch_size, fewer ranks, or GroupNorm.",
            rank=rank,
        )
