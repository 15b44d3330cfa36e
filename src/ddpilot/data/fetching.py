# SPDX-License-Identifier: Apache-2.0
"""What runs where the samples are read, in a worker or in the rank: samples, seeded one by one, to a collated piece."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.utils.data import Dataset

from ddpilot.data.batches import without_rows
from ddpilot.data.seeding import mix_seed, random_kept, seed_random


class Order(NamedTuple):
    """One piece to be read."""

    epoch: int
    batch: int
    sample_ids: list[int]
    """At least one number; where the piece is empty, that of a sample that shows what a batch looks like."""

    draws: list[int] | None
    """Which draw of the epoch each sample is, where one can come several times; else None."""

    is_empty: bool


@dataclass(frozen=True)
class PieceReader(Dataset[Any]):
    """A dataset of whole pieces: `reader.__getitems__([order])` is the collated piece.

    With `seeded`, random state is a function of (seed, epoch, sample number) while a sample is read, and of (seed,
    epoch, batch) while the piece is collated, whatever rank and worker that is in; afterwards it is as it was before.
    """

    dataset: Any
    collate: Callable[[list[Any]], Any]
    seed: int
    seeded: bool

    def __getitem__(self, order: Order) -> Any:
        with random_kept() if self.seeded else nullcontext():
            samples = self._read(order)
            if self.seeded:
                seed_random(mix_seed(self.seed, order.epoch, order.batch, 1))
            if order.is_empty:
                return without_rows(self.collate(samples), self.collate([*samples, *samples]))
            return self.collate(samples)

    def __getitems__(self, orders: Sequence[Order]) -> Any:
        (order,) = orders
        return self[order]

    def _read(self, order: Order) -> list[Any]:
        if not self.seeded:
            many = getattr(self.dataset, "__getitems__", None)
            return list(many(order.sample_ids)) if many else [self.dataset[number] for number in order.sample_ids]
        samples = []
        for place, number in enumerate(order.sample_ids):
            draw = 0 if order.draws is None else order.draws[place] + 1
            seed_random(mix_seed(self.seed, order.epoch, number, draw, 0))
            samples.append(self.dataset[number])
        return samples
