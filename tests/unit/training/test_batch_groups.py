# SPDX-License-Identifier: Apache-2.0
"""Accumulation groups of batches whose sizes are known, and of batches whose sizes the ranks have to add up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from ddpilot import FakeGroup
from ddpilot.data.loaders import make_stream_loader
from ddpilot.data.local_batch import LocalBatch
from ddpilot.errors import DataError, LoopError
from ddpilot.group.protocol import ReduceOp
from ddpilot.training.batch_groups import iterate_groups


class Batches:
    """A loader of the given counts of this rank; the ranks of a FakeGroup are all alike."""

    def __init__(self, counts: list[int], *, known: bool, world_size: int = 2) -> None:
        self._counts = counts
        self._known = known
        self._world_size = world_size

    def iterate(self, epoch: int, first_batch: int = 0) -> Iterator[LocalBatch]:
        """Without end where sizes are not known; the same in every epoch."""
        assert epoch >= 0
        index = first_batch
        while index < len(self._counts) or not self._known:
            count = self._counts[index] if index < len(self._counts) else 0
            ids = np.arange(count, dtype=np.int64)
            yield LocalBatch(f"batch {index}", index, count, count * self._world_size if self._known else None, ids)
            index += 1


@pytest.mark.parametrize("known", [True, False])
def test_iterate_groups_knows_each_groups_size_from_its_first_batch(known: bool) -> None:
    """Groups of three, and a last one of one batch; sizes that are not known are added up over ranks."""
    loader = Batches([4, 4, 4, 1], known=known)
    batches = list(iterate_groups(loader, FakeGroup(world_size=2), epoch=5, accumulation=3))
    assert [batch.data for batch in batches] == ["batch 0", "batch 1", "batch 2", "batch 3"]
    assert [batch.global_count for batch in batches] == [8, 8, 8, 2]
    assert [batch.group_count for batch in batches] == [24, 24, 24, 2]
    assert [batch.group_size for batch in batches] == [3, 3, 3, 1]
    assert [batch.is_first for batch in batches] == [True, False, False, True]
    assert [batch.is_last for batch in batches] == [False, False, True, True]
    assert {batch.epoch for batch in batches} == {5}


@pytest.mark.parametrize("known", [True, False])
def test_iterate_groups_begins_in_the_middle_and_ends_with_the_data(known: bool) -> None:
    """From batch 2 on; a group that ends where the data does has no empty successor."""
    loader = Batches([2, 2, 2, 2], known=known)
    batches = list(iterate_groups(loader, FakeGroup(world_size=2), epoch=0, first_batch=2, accumulation=2))
    assert [(batch.index, batch.is_last) for batch in batches] == [(2, False), (3, True)]


@pytest.mark.parametrize("known", [True, False])
def test_iterate_groups_of_no_samples_is_empty(known: bool) -> None:
    """An empty dataset ends at once."""
    assert list(iterate_groups(Batches([], known=known), FakeGroup(), epoch=0)) == []


@pytest.mark.parametrize(
    ("loader", "text"),
    [
        (
            DataLoader(TensorDataset(torch.ones(3))),
            r"a DataLoader, which every rank would read as a whole. Pass loop.prepare_data_loader",
        ),
        ([1, 2], r"a list, which is not a loader. Pass loop.loader\(dataset, global_batch_size=...\)"),
    ],
)
def test_iterate_groups_refuses_what_nobody_divided(loader: Any, text: str) -> None:
    """With the call that divides it."""
    with pytest.raises(LoopError, match=text):
        next(iterate_groups(loader, FakeGroup(), epoch=0))


class Unequal(FakeGroup):
    """Rank 0 of two, of which the other one sees `others` (samples and what the first ones look like)."""

    def __init__(self, *others: float) -> None:
        super().__init__(world_size=2)
        self._others = others

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> torch.Tensor:
        assert op == "max"
        count, content = self._others
        mine = tensor.tolist()
        other = [count, -count, content or mine[2], -(content or mine[2])]
        return torch.tensor([max(pair) for pair in zip(mine, other, strict=True)], dtype=torch.float64)


@pytest.mark.parametrize("others", [(6.0, 0.0), (4.0, 1.0)])
def test_iterate_groups_tells_ranks_that_they_see_different_streams(others: tuple[float, float]) -> None:
    """Before the update that one of them would have made alone, or of which samples would have been lost."""

    class Numbers(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(4))

    loader = make_stream_loader(Numbers(), rank=0, world_size=2, global_batch_size=2)
    with pytest.raises(DataError, match="not read the same stream; for the next update rank 0 4 samples, the first 0;"):
        next(iterate_groups(loader, Unequal(*others), epoch=0, accumulation=2))
    seen = [batch.sample_ids.tolist() for batch in iterate_groups(loader, FakeGroup(world_size=2), epoch=0)]
    assert seen == [[0], [2]]
    unseeded = make_stream_loader(Numbers(), rank=0, world_size=2, global_batch_size=2, seed_samples=False)
    assert next(unseeded.iterate(0)).first_seen is None
