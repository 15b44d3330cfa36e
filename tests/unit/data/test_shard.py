# SPDX-License-Identifier: Apache-2.0
"""Existing torch DataLoaders: what they would do in one process, done by several ranks."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from ddpilot.data.loaders import shard_loader
from ddpilot.errors import DataError
from tests.unit.data.samples import Stream, read_world

NUMBERS: Dataset[Any] = TensorDataset(torch.arange(13))


class EveryOther(Sampler[int]):
    """Half of the samples, drawn from the random state named by `source`."""

    def __init__(self, source: str = "torch") -> None:
        self.source = source
        self.own = np.random.default_rng(0)
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        if self.source == "torch":
            order = torch.randperm(13).tolist()
        elif self.source == "epoch":
            order = np.random.default_rng(self.epoch).permutation(13).tolist()
        else:
            order = self.own.permutation(13).tolist()
        return iter(order[::2])

    def __len__(self) -> int:
        return 7


class OwnBatches:
    """Batches of one rank, as samplers that know of ranks have them; rank 1 has none."""

    def __init__(self, rank: int, num_replicas: int) -> None:
        self.rank = rank
        self.num_replicas = num_replicas

    def __iter__(self) -> Iterator[list[int]]:
        yield from [] if self.rank else [[1, 2, 3], [4]]


def world(loader: DataLoader[Any], world_size: int = 2, **options: Any) -> list[Any]:
    """The loaders of all ranks."""
    return [shard_loader(loader, rank=rank, world_size=world_size, **options) for rank in range(world_size)]


def numbers(loader: DataLoader[Any], world_size: int = 2, epoch: int = 0, **options: Any) -> list[list[int]]:
    """The global batches of an epoch."""
    return [[int(row[0]) for row in batch] for batch in read_world(world(loader, world_size, **options), epoch)]


def flat(batches: list[list[int]]) -> list[int]:
    """The samples of all batches, in order."""
    return [number for batch in batches for number in batch]


def test_shard_loader_keeps_the_batches_of_a_loader_that_does_not_shuffle() -> None:
    """They are those that torch makes in one process."""
    for drop_last in (True, False):
        loader = DataLoader(NUMBERS, batch_size=4, drop_last=drop_last)
        assert numbers(loader) == numbers(loader, 3) == [batch.tolist() for (batch,) in loader]


SAMPLERS: dict[str, Any] = {
    "shuffle": RandomSampler(NUMBERS),  # type: ignore[arg-type]
    "part": RandomSampler(NUMBERS, num_samples=9),  # type: ignore[arg-type]
    "repeated": RandomSampler(NUMBERS, replacement=True, num_samples=20),  # type: ignore[arg-type]
    "weighted": WeightedRandomSampler([0.0] * 3 + [1.0] * 10, 11),
    "subset": SubsetRandomSampler([3, 5, 7, 9, 11, 0]),
    "global_state": EveryOther("torch"),
    "set_epoch": EveryOther("epoch"),
}


@pytest.mark.parametrize("kind", SAMPLERS)
def test_shard_loader_draws_an_order_that_no_world_size_changes(kind: str) -> None:
    """As many samples as the sampler has, from those it may draw, the same at any world size, others in each epoch."""
    sampler = SAMPLERS[kind]
    loader = DataLoader(NUMBERS, batch_size=4, sampler=sampler)
    random.seed(1), torch.manual_seed(1)
    epochs = [numbers(loader, 1, epoch, seed=3) for epoch in range(3)]
    random.seed(2), torch.manual_seed(2)
    assert [numbers(loader, 3, epoch, seed=3) for epoch in range(3)] == epochs
    assert epochs[0] != epochs[1] != epochs[2]
    drawn = [number for batch in epochs[1] for number in batch]
    assert len(drawn) == len(sampler)
    assert kind in ("repeated", "weighted") or len({*drawn}) == len(drawn)
    allowed = {"weighted": range(3, 13), "subset": [3, 5, 7, 9, 11, 0]}.get(kind, range(13))
    assert {*drawn} <= {*allowed}


def test_shard_loader_takes_the_seed_of_the_generator() -> None:
    """A loader that was made reproducible stays so, whatever the seed of the loop."""

    def order(seed: int, of_generator: int | None) -> list[list[int]]:
        generator = None if of_generator is None else torch.Generator().manual_seed(of_generator)
        return numbers(DataLoader(NUMBERS, 4, shuffle=True, generator=generator), seed=seed)

    assert order(0, 7) == order(1, 7) == order(7, None)
    assert order(0, 7) != order(0, 8)


def test_shard_loader_takes_a_batch_sampler_as_global_batches() -> None:
    """Whatever their sizes; torch's own is read for its size and order."""
    given: Any = [[1, 2, 3], [4], [5, 6]]
    loader = DataLoader(NUMBERS, batch_sampler=given)
    assert numbers(loader) == given
    other: Any = [[1, 2], [3, 4], [5, 6]]
    plans = [made.plan for made in (*world(loader), *world(DataLoader(NUMBERS, batch_sampler=other)))]
    assert [plan.fingerprint() == plans[0].fingerprint() for plan in plans] == [True, True, False, False]
    torchs = BatchSampler(EveryOther(), 3, drop_last=True)
    loader = DataLoader(NUMBERS, batch_sampler=torchs)
    assert numbers(loader, 1) == numbers(loader, 3)
    assert [len(batch) for batch in numbers(loader)] == [3, 3]


def test_shard_loader_replaces_a_distributed_sampler() -> None:
    """Its order without its padding; its loader's batch size was one of each rank."""
    said: list[str] = []
    sampler: Any = DistributedSampler(NUMBERS, num_replicas=2, rank=1, seed=4, shuffle=True)
    batches = numbers(DataLoader(NUMBERS, batch_size=3, sampler=sampler), say=said.append)
    assert [len(batch) for batch in batches] == [6, 6, 1]
    assert batches == numbers(DataLoader(NUMBERS, batch_size=6, shuffle=True), seed=4)
    assert said == [
        "The loader's batch size of 3 is taken as each rank's: a global batch has 6 samples, 3 for each of 2 ranks."
    ]


def test_shard_loader_uses_batches_of_a_rank_as_given() -> None:
    """The ranks run out unequally, and go on with empty batches until all of them have."""
    loaders = []
    for rank in range(2):
        own: Any = OwnBatches(rank, 2)
        loaders.append(shard_loader(DataLoader(NUMBERS, batch_sampler=own), rank=rank, world_size=2))
    assert all(loader.is_joint for loader in loaders)
    assert loaders[0].plan.fingerprint() == loaders[1].plan.fingerprint()  # nothing that has to be the same differs
    assert read_world(loaders) == [[(1,), (2,), (3,)], [(4,)]]


def test_shard_loader_says_both_readings_of_the_batch_size() -> None:
    """Once, on rank 0, with the figure of each rank; nothing of one that is refused."""
    said: list[str] = []
    loader = DataLoader(NUMBERS, batch_size=5)
    assert [len(batch) for batch in numbers(loader, say=said.append)] == [5, 5, 3]
    assert [len(batch) for batch in numbers(loader, say=said.append, batch_size_per_rank=True)] == [10, 3]
    given: Any = [[1], [2]]
    numbers(DataLoader(NUMBERS, batch_sampler=given), say=said.append)
    with pytest.raises(DataError, match="some rank would never have a sample"):
        numbers(DataLoader(NUMBERS), say=said.append)
    assert " | ".join(said) == (
        "The loader's batch size of 5 is taken as that of all ranks together: a global batch has 5 samples, "
        "2 to 3 for each of 2 ranks."
        " | The loader's batch size of 5 is taken as each rank's: a global batch has 10 samples, 5 for each of 2 ranks."
        " | The loader's batches are those of its list, each taken as one of all 2 ranks together."
    )


def test_shard_loader_streams_an_iterable_dataset() -> None:
    """With its batch size, `drop_last` and collate function."""
    loader = DataLoader(
        Stream(11), batch_size=4, drop_last=True, collate_fn=lambda samples: torch.tensor(samples)[:, 0]
    )
    iterators = [one.iterate(0) for one in world(loader)]
    batches = [torch.cat([one.data for one in pieces]).tolist() for pieces in zip(*iterators, strict=True)]
    assert batches == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert world(DataLoader(Stream(11, own=True), batch_size=4), divides_itself=True)[0].is_joint


def test_shard_loader_keeps_the_options_of_the_workers() -> None:
    """Each option that the loader has, as it is; no worker is started for that."""
    context = torch.multiprocessing.get_context("fork")
    options: dict[str, Any] = {"num_workers": 2, "prefetch_factor": 5, "persistent_workers": True, "timeout": 9.0}
    options |= {"worker_init_fn": print, "multiprocessing_context": context}
    made = shard_loader(DataLoader(NUMBERS, 4, collate_fn=len, **options), rank=0, world_size=2)
    assert {name: getattr(made._workers.loader, name) for name in options} == options
    assert isinstance(made.dataset, TensorDataset)
    assert made._reader.collate is len  # type: ignore[union-attr]


class OwnIterator(DataLoader[Any]):
    """May do anything."""

    def __iter__(self) -> Any:
        return iter(())


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no_batch_size": (DataLoader(NUMBERS, batch_size=None), {}, "its `batch_size` is None, so that its dataset hands"),
    "stream_without": (DataLoader(Stream(3), batch_size=None), {}, "its `batch_size` is None"),
    "other_each_time": (
        DataLoader(NUMBERS, 4, sampler=EveryOther("own")),
        {},
        "EveryOther: it gives other samples each time it is asked about the same epoch. Give it `set_epoch`",
    ),
    "names": (DataLoader(NUMBERS, 4, sampler=["a", "b"]), {}, "it gives 'a', which is no sample number"),
    "not_there": (DataLoader(NUMBERS, 2, sampler=[1, 13]), {}, "from a sampler: sample 13 of 13"),
    "too_many": (
        DataLoader(NUMBERS, 4, sampler=RandomSampler(NUMBERS, num_samples=14)),  # type: ignore[arg-type]
        {},
        "its RandomSampler draws 14 of 13 samples without replacement",
    ),
    "too_small": (DataLoader(NUMBERS, 1), {}, "a global batch of 1 sample among 2 ranks"),
    "own_iterator": (OwnIterator(NUMBERS, 4), {}, "OwnIterator has an `__iter__` of its own"),
    "no_loader": ([1, 2], {}, "sharding a DataLoader: a list. Give a torch DataLoader"),
    "shares": (DataLoader(NUMBERS, batch_sampler=[[1]]), {"shares": [1, 2]}, "with batches of its own sampler"),
}


def test_shard_loader_refuses_what_it_cannot_keep_exact() -> None:
    """By name, with what to do."""
    for loader, options, words in REFUSED.values():
        with pytest.raises(DataError) as caught:
            list(shard_loader(loader, rank=0, world_size=2, **options).iterate(0))
        assert words in str(caught.value)
        assert caught.value.fix


def test_shard_loader_says_nothing_where_both_readings_are_the_same() -> None:
    """One rank alone has the whole batch, whoever it is of."""
    said: list[str] = []
    shard_loader(DataLoader(NUMBERS, batch_size=4), rank=0, world_size=1, say=said.append)
    assert said == []


@pytest.mark.parametrize("world_size", [1, 3])
def test_shard_loader_takes_the_samples_of_the_samplers_own_source(world_size: int) -> None:
    """A sampler of fewer samples than the dataset has is a usual way to take a part of it, also with replacement."""
    limited = DataLoader(NUMBERS, batch_size=3, sampler=SequentialSampler(range(5)))
    assert numbers(limited, world_size) == [[0, 1, 2], [3, 4]]
    shuffled = DataLoader(NUMBERS, batch_size=3, sampler=RandomSampler(range(5)))
    epochs = [flat(numbers(shuffled, world_size, epoch)) for epoch in range(4)]
    assert [sorted(order) for order in epochs] == [[0, 1, 2, 3, 4]] * 4
    assert len({tuple(order) for order in epochs}) > 1
    some = flat(numbers(DataLoader(NUMBERS, 3, sampler=RandomSampler(range(5), num_samples=3)), world_size))
    assert len(set(some)) == 3
    drawn = DataLoader(NUMBERS, 3, sampler=RandomSampler(range(5), replacement=True, num_samples=40))
    assert set(flat(numbers(drawn, world_size))) == {0, 1, 2, 3, 4}
    distributed: list[Any] = [
        DistributedSampler(range(num), num_replicas=2, rank=0, shuffle=shuffle)  # type: ignore[arg-type]
        for num, shuffle in ((5, False), (5, True), (14, True))
    ]
    assert flat(numbers(DataLoader(NUMBERS, 3, sampler=distributed[0]), world_size)) == [0, 1, 2, 3, 4]
    assert sorted(flat(numbers(DataLoader(NUMBERS, 3, sampler=distributed[1]), world_size))) == [0, 1, 2, 3, 4]
    for sampler in (SequentialSampler(range(14)), RandomSampler(range(14), replacement=True), distributed[2]):
        with pytest.raises(DataError, match=r"Sampler is of 14 samples, and its dataset has 13\. Make the sampler of"):
            shard_loader(DataLoader(NUMBERS, 3, sampler=sampler), rank=0, world_size=world_size)
