# SPDX-License-Identifier: Apache-2.0
"""Merge predictions of all ranks into the order of the dataset and the batches of one device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch


class Batch(NamedTuple):
    """One batch predicted by a rank: the indices of its samples, and what `predict_step` returned."""

    samples: list[int]
    output: Any


Loaders = list[list[Batch]]
"""The batches of one rank, by data loader."""


def collect_predictions(trainer: Any, results: Any) -> Loaders | None:
    """Return this rank's part of the results of `trainer.predict`; None without results or sample indices."""
    if not results:
        return None
    loop = trainer.predict_loop
    found = []
    by_loader = [results] if loop.num_dataloaders == 1 else results
    for loader, outputs in zip(loop._combined_loader.flattened, by_loader, strict=True):
        places = getattr(getattr(loader, "batch_sampler", None), "seen_batch_indices", None)
        if not places:
            return None
        found.append([Batch(list(samples), output) for samples, output in zip(places, outputs, strict=False)])
    return found


def join_predictions(ranks: Sequence[Loaders | None]) -> Any:
    """Return what `trainer.predict` returns on one device, from the parts of all ranks; None if a part is missing."""
    parts = [part for part in ranks if part is not None]
    if len(parts) < len(ranks):
        return None
    joined = [join_batches([batch for part in parts for batch in part[loader]]) for loader in range(len(parts[0]))]
    return joined[0] if len(joined) == 1 else joined


def join_batches(batches: Sequence[Batch]) -> list[Any]:
    """Return the outputs in dataset order, each sample once, in batches of the largest size.

    An output has rows if each part of it has one entry per sample: a tensor in its first dimension, a list by its
    items. If an output has no rows, the batches are returned unchanged, sorted by their first sample.
    """
    in_order = sorted(batches, key=lambda batch: min(batch.samples, default=-1))
    if not all(_has_rows(batch.output, len(batch.samples)) for batch in in_order):
        return [batch.output for batch in in_order]
    rows = {sample: _row(batch.output, index) for batch in in_order for index, sample in enumerate(batch.samples)}
    size = max((len(batch.samples) for batch in in_order), default=1)
    samples = sorted(rows)
    return [_stack([rows[each] for each in samples[start : start + size]]) for start in range(0, len(samples), size)]


class _Item(NamedTuple):
    """One sample's item of a list."""

    value: Any


def _has_rows(output: Any, num_samples: int) -> bool:
    if isinstance(output, torch.Tensor):
        return output.ndim > 0 and len(output) == num_samples
    if isinstance(output, dict):
        return bool(output) and all(_has_rows(part, num_samples) for part in output.values())
    if isinstance(output, tuple):
        return bool(output) and all(_has_rows(part, num_samples) for part in output)
    return isinstance(output, list) and len(output) == num_samples


def _row(output: Any, index: int) -> Any:
    if isinstance(output, dict):
        return {key: _row(part, index) for key, part in output.items()}
    if isinstance(output, tuple):
        return _like(output, [_row(part, index) for part in output])
    return _Item(output[index]) if isinstance(output, list) else output[index]


def _stack(rows: list[Any]) -> Any:
    first = rows[0]
    if isinstance(first, _Item):
        return [row.value for row in rows]
    if isinstance(first, dict):
        return {key: _stack([row[key] for row in rows]) for key in first}
    if isinstance(first, tuple):
        return _like(first, [_stack(list(parts)) for parts in zip(*rows, strict=True)])
    return torch.stack(rows)


def _like(example: Any, parts: list[Any]) -> Any:
    return type(example)(*parts) if hasattr(example, "_fields") else tuple(parts)
