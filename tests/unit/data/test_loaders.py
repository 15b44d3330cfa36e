# SPDX-License-Identifier: Apache-2.0
"""Loaders without workers: ranks of any world size, or of an existing DataLoader, read what one process reads."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from ddpilot.data.loaders import MapLoader, make_loader, make_stream_loader, prepare_data_loader
from ddpilot.errors import DataError
from tests.unit.data.samples import Augmented, Counted, Resumable, SizedStream, Stream, read_world, rows


def world(dataset: Any, world_size: int, size: int = 4, **options: Any) -> list[MapLoader]:
    """The loaders of all ranks."""
    return [
        make_loader(dataset, rank=rank, world_size=world_size, global_batch_size=size, **options)
        for rank in range(world_size)
    ]


def stream_world(dataset: Any, world_size: int, size: int = 4, **options: Any) -> list[Any]:
    """The loaders of all ranks, for a stream."""
    return [
        make_stream_loader(dataset, rank=rank, world_size=world_size, global_batch_size=size, **options)
        for rank in range(world_size)
    ]


@pytest.mark.parametrize("num", [0, 1, 13, 16])
def test_loader_reads_the_same_batches_at_any_world_size(num: int) -> None:
    """Samples and their augmentation, in the same order; ranks without samples of a last batch yield an empty one."""
    options = {"shuffle": True} if num else {}
    expected = read_world(world(Augmented(num), 1, seed=3, **options), epoch=2)
    assert sorted(row[0] for batch in expected for row in batch) == list(range(num))
    for world_size in (2, 3, 4):
        loaders = world(Augmented(num), world_size, seed=3, **options)
        assert read_world(loaders, epoch=2) == expected
        assert {len(loader) for loader in loaders} == {len(expected)}


def test_loader_augments_by_seed_epoch_and_sample_alone() -> None:
    """Sample 5 is augmented equally in any order and batch, and differently in each epoch and with each seed."""

    def draws(epoch: int = 1, **options: Any) -> Any:
        loader = make_loader(Augmented(9), rank=0, world_size=1, **options)
        return next(row for batch in loader.iterate(epoch) for row in rows(batch.data) if row[0] == 5)

    same = [draws(global_batch_size=4), draws(global_batch_size=7, shuffle=True), draws(batch_size_per_rank=1)]
    assert same == [same[0]] * 3
    others = [same[0], draws(global_batch_size=4, epoch=0), draws(global_batch_size=4, seed=1)]
    assert len({value for row in others for value in row[1:]}) == 9


def test_loader_augments_each_draw_of_a_sample_differently() -> None:
    """Otherwise a sample that is drawn several times would be augmented equally each time."""
    options: Any = {"weights": [1.0, 0.0], "num_draws": 6}
    seen = [read_world(world(Augmented(2), world_size, **options)) for world_size in (1, 2, 3)]
    assert seen == [seen[0]] * 3
    drawn = [row for batch in seen[0] for row in batch]
    assert ({row[0] for row in drawn}, len({row[1] for row in drawn})) == ({0}, 6)


def test_loader_starts_at_a_batch_as_if_it_had_read_the_earlier_ones() -> None:
    """The rest of an epoch is the same from any batch and at any world size; earlier samples are not read."""
    expected = read_world(world(Augmented(23), 2, shuffle=True), epoch=3)
    assert read_world(world(Augmented(23), 3, shuffle=True), epoch=3, first_batch=4) == expected[4:]
    dataset = Counted(23)
    read_world(world(dataset, 3, shuffle=True), epoch=3, first_batch=4)
    assert dataset.num_read == 23 - 16
    assert read_world(world(dataset, 3, shuffle=True), first_batch=6) == []
    with pytest.raises(DataError, match=r"\[rank 1\] starting at batch 7: an epoch of 6 batches"):
        next(world(dataset, 2)[1].iterate(0, 7))


def test_loader_leaves_the_random_state_of_the_rank_alone() -> None:
    """The model's dropout and the dataset's draws do not affect each other."""

    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    loader = world(Augmented(9), 1)[0]
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    expected = [draw() for _ in range(3)]
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    assert [draw() for _ in loader.iterate(0)] == expected


def test_loader_collates_with_the_same_random_state_on_every_rank() -> None:
    """What a collate function draws for a batch, such as the weight of a mix-up, is drawn alike by all ranks."""
    loaders = world(range(8), 2, collate_fn=lambda samples: torch.full((len(samples),), random.random()))
    drawn = [{value for (value,) in batch} for batch in read_world(loaders)]
    assert [len(values) for values in drawn] == [1, 1]
    assert drawn[0] != drawn[1]


def test_loader_seeds_nothing_on_request_or_if_nothing_can_draw() -> None:
    """Tensors handed out as they are need no seeding; a dataset's own way to read many is used without it."""

    class Many(Augmented):
        def __getitems__(self, numbers: list[int]) -> list[int]:
            return [number * 10 for number in numbers]

    assert read_world(world(Many(5), 2, seed_samples=False)) == [[(0,), (10,), (20,), (30,)], [(40,)]]
    tensors = TensorDataset(torch.arange(5))
    nested: Dataset[Any] = ConcatDataset([Subset(tensors, [0]), tensors])
    assert not world(nested, 1)[0]._reader.seeded
    assert world(ConcatDataset([nested, Augmented(1)]), 1)[0]._reader.seeded
    assert read_world(world(nested, 2, shuffle=True)) == read_world(world(nested, 1, shuffle=True))


def test_loader_seeds_what_a_subclass_of_a_plain_dataset_draws() -> None:
    """The `__getitem__` of a subclass of Subset or ConcatDataset may augment stored samples."""

    class Noisy(Subset[Any]):
        def __getitem__(self, number: Any) -> Any:
            return self.dataset[number], random.random()

        def __getitems__(self, numbers: list[int]) -> list[Any]:
            return [self[number] for number in numbers]

    class Joined(ConcatDataset[Any]):
        def __getitem__(self, number: int) -> Any:
            return self.datasets[0][number], random.random()

    numbers = list(range(9))
    for dataset in (Noisy(numbers, numbers), Joined([numbers])):  # type: ignore[arg-type, list-item]
        assert read_world(world(dataset, 2)) == read_world(world(dataset, 1))


def test_loader_seeds_only_the_collating_of_stored_samples() -> None:
    """A list draws nothing itself; its `collate_fn` draws from the batch's seed."""

    def collate(samples: list[Any]) -> Any:
        return torch.tensor(samples) + random.random()

    expected = read_world(world(Counted(9), 1, collate_fn=lambda rows: collate([number for (number,) in rows])))
    assert read_world(world(list(range(9)), 1, collate_fn=collate)) == expected


@pytest.mark.parametrize("first_drawn", [0, 6])
def test_loader_seeds_each_sample_of_a_dataset_that_keeps_what_it_draws(first_drawn: int) -> None:
    """Samples made at the first access are those of one process with any number of ranks and workers, read once."""

    class Lazy(Counted):
        def __init__(self, num: int) -> None:
            super().__init__(num)
            self.kept: dict[int, float] = {}

        def __getitem__(self, number: int) -> Any:
            self.num_read += 1
            if number not in self.kept:
                self.kept[number] = random.random() if number >= first_drawn else 0.0
            return number, self.kept[number]

    expected = [row for batch in read_world(world(Augmented(12), 1)) for row in batch]
    for world_size, num_workers in ((1, 0), (2, 0), (1, 1)):
        datasets = [Lazy(12) for _ in range(world_size)]
        loaders = [
            make_loader(each, rank=rank, world_size=world_size, global_batch_size=4, num_workers=num_workers)
            for rank, each in enumerate(datasets)
        ]
        read = [row for batch in read_world(loaders) for row in batch]
        assert read == [(number, drawn if number >= first_drawn else 0.0) for number, drawn, *_ in expected]
        assert num_workers or [each.num_read for each in datasets] == [12 // world_size] * world_size


def test_loader_sets_the_epoch_of_a_dataset() -> None:
    """Also in the process that reads it, which may be a worker."""

    class Curriculum(Counted):
        epoch = -1

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __getitem__(self, number: int) -> Any:
            return number, self.epoch

    loaders = world(Curriculum(4), 2)
    for epoch in (3, 1):
        assert read_world(loaders, epoch) == [[(number, epoch) for number in range(4)]]


def test_loader_names_the_sample_that_cannot_be_read() -> None:
    """With its rank, batch and epoch, and the original exception as the cause."""

    class Broken(Augmented):
        def __getitem__(self, number: int) -> Any:
            if number == 6:
                raise OSError("no such picture")
            return super().__getitem__(number)

    loader = world(Broken(8), 2)[1]
    text = r"\[rank 1\] reading sample 6 \(batch 1 of epoch 2\): OSError: no such picture. Inspect `dataset\[6\]`."
    with pytest.raises(DataError, match=text) as caught:
        list(loader.iterate(2))
    assert isinstance(caught.value.__cause__, OSError)
    loader = make_loader([torch.zeros(1), torch.zeros(2)], rank=0, world_size=1, global_batch_size=2)
    with pytest.raises(DataError, match=r"collating samples \[0, 1\] \(batch 0 of epoch 0\): RuntimeError"):
        list(loader.iterate(0))


@pytest.mark.parametrize("num", [0, 1, 11, 12])
def test_stream_loader_reads_the_same_batches_at_any_world_size(num: int) -> None:
    """Every rank reads the whole stream and its end, so the number of samples needs no collective."""
    dataset = SizedStream(num)
    expected = read_world(stream_world(Stream(num), 1, seed=5), epoch=2)
    assert [int(row[0]) for batch in expected for row in batch] == list(range(num))
    for world_size in (1, 2, 3):
        loaders = stream_world(dataset, world_size, seed=5)
        assert read_world(loaders, epoch=2) == expected
        assert read_world(loaders, epoch=2, first_batch=2) == expected[2:]
        assert len(loaders[0]) == len(expected)
        assert not loaders[0].is_joint
        whole = read_world(stream_world(dataset, world_size, drop_last=True))
        assert [len(batch) for batch in whole] == [4] * (num // 4)


def test_stream_loader_starts_from_a_state_without_reading_earlier_samples() -> None:
    """The state after a batch is the same on every rank, and goes to any world size."""
    dataset = Resumable(22)
    loaders = stream_world(dataset, 1)
    expected, states = [], []
    for batch in loaders[0].iterate(0):
        expected.append(rows(batch.data))
        states.append(batch.stream_state)
    assert states[2] == {"position": 12}
    for rank in range(2):
        fresh = Resumable(22)
        loader = make_stream_loader(fresh, rank=rank, world_size=2, global_batch_size=4)
        rest = list(loader.iterate(0, 3, states[2]))
        assert fresh.num_read == 10
        assert [batch.index for batch in rest] == [3, 4, 5]
        assert all(rows(batch.data)[0] in expected[batch.index] for batch in rest)
        assert next(loader.iterate(1)).sample_ids.tolist() == [0, 1] if rank == 0 else [2, 3]


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_stream_loader_yields_empty_batches_at_the_end_when_the_dataset_divides_itself(world_size: int) -> None:
    """Each sample is read once, by its rank; a rank that has no more samples yields empty batches."""
    loaders = stream_world(Stream(4, own=True), world_size, size=5, divides_itself=True)
    assert all(loader.is_joint for loader in loaders)
    batches = read_world(loaders)
    assert sorted(int(row[0]) for batch in batches for row in batch) == [0, 1, 2, 3]
    assert read_world(loaders) == batches
    last = loaders[-1].iterate(0)
    counts = [next(last).count for _ in range(9)]
    assert sum(counts) == len(range(world_size - 1, 4, world_size))
    after = next(last)
    assert (after.index, after.count, after.global_count) == (9, 0, None)
    assert after.data is None if world_size == 5 else rows(after.data) == []
    last.close()


def test_stream_loader_names_the_position_of_an_error() -> None:
    """With the position in the stream, on every rank that was to read on."""

    class Broken(Stream):
        def __iter__(self) -> Any:
            yield from (0, 1, 2)
            raise OSError("connection reset")

    with pytest.raises(DataError, match=r"\[rank 1\] reading sample 3 of the stream \(batch 0 of epoch 0\): OSError"):
        next(stream_world(Broken(9), 2)[1].iterate(0))


def test_make_loader_refuses_what_it_cannot_do() -> None:
    """Each error states the value and the fix."""
    with pytest.raises(DataError, match="`global_batch_size=None` and `batch_size_per_rank=None`. Give one of them"):
        make_loader([1], rank=0, world_size=1)
    with pytest.raises(DataError, match="`batch_size_per_rank=2` with unequal `batch_split`. Give `global_batch_size`"):
        make_loader([1], rank=0, world_size=2, batch_size_per_rank=2, batch_split=[1, 2])
    with pytest.raises(
        DataError, match="SizedStream is an iterable dataset. For an iterable dataset, use `make_stream_loader`"
    ):
        make_loader(SizedStream(3), rank=0, world_size=1, global_batch_size=2)
    with pytest.raises(DataError, match="generator does not have both `__len__` and `__getitem__`"):
        make_loader((number for number in range(3)), rank=0, world_size=1, global_batch_size=2)
    with pytest.raises(DataError, match="`drop_last` with `divides_itself`"):
        stream_world(Stream(3), 1, drop_last=True, divides_itself=True)
    with pytest.raises(DataError, match="a global batch of 1 sample among 2 ranks"):
        stream_world(Stream(3), 2, size=1)
    with pytest.raises(DataError, match="rank 2 of 2 ranks"):
        make_loader([1], rank=2, world_size=2, global_batch_size=2)
    with pytest.raises(TypeError, match="the number of batches of Stream is unknown until it has been read"):
        len(stream_world(Stream(3), 1)[0])


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
    """A batch sampler that divides among ranks itself; rank 1 has no batch."""

    def __init__(self, rank: int, num_replicas: int) -> None:
        self.rank = rank
        self.num_replicas = num_replicas

    def __iter__(self) -> Iterator[list[int]]:
        yield from [] if self.rank else [[1, 2, 3], [4]]


def shard_world(loader: DataLoader[Any], world_size: int = 2, **options: Any) -> list[Any]:
    """The loaders of all ranks."""
    return [prepare_data_loader(loader, rank=rank, world_size=world_size, **options) for rank in range(world_size)]


def numbers(loader: DataLoader[Any], world_size: int = 2, epoch: int = 0, **options: Any) -> list[list[int]]:
    """The global batches of an epoch."""
    return [[int(row[0]) for row in batch] for batch in read_world(shard_world(loader, world_size, **options), epoch)]


def flat(batches: list[list[int]]) -> list[int]:
    """The samples of all batches, in order."""
    return [number for batch in batches for number in batch]


def test_prepare_data_loader_keeps_the_batches_of_a_loader_that_does_not_shuffle() -> None:
    """They equal the batches that torch makes in one process."""
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
def test_prepare_data_loader_draws_an_order_that_no_world_size_changes(kind: str) -> None:
    """The sampler's number of samples, from the allowed ones, equal at any world size and different in each epoch."""
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


def test_prepare_data_loader_takes_the_seed_of_the_generator() -> None:
    """A seeded loader stays reproducible at any seed of the loop."""

    def order(seed: int, of_generator: int | None) -> list[list[int]]:
        generator = None if of_generator is None else torch.Generator().manual_seed(of_generator)
        return numbers(DataLoader(NUMBERS, 4, shuffle=True, generator=generator), seed=seed)

    assert order(0, 7) == order(1, 7) == order(7, None)
    assert order(0, 7) != order(0, 8)


def test_prepare_data_loader_takes_a_batch_sampler_as_global_batches() -> None:
    """Batches may have any size; of torch's BatchSampler, size and order are read."""
    given: Any = [[1, 2, 3], [4], [5, 6]]
    loader = DataLoader(NUMBERS, batch_sampler=given)
    assert numbers(loader) == given
    other: Any = [[1, 2], [3, 4], [5, 6]]
    plans = [made.plan for made in (*shard_world(loader), *shard_world(DataLoader(NUMBERS, batch_sampler=other)))]
    assert [plan.fingerprint == plans[0].fingerprint for plan in plans] == [True, True, False, False]
    torchs = BatchSampler(EveryOther(), 3, drop_last=True)
    loader = DataLoader(NUMBERS, batch_sampler=torchs)
    assert numbers(loader, 1) == numbers(loader, 3)
    assert [len(batch) for batch in numbers(loader)] == [3, 3]


def test_prepare_data_loader_replaces_a_distributed_sampler() -> None:
    """The order is kept without padding; the loader's batch size is that of each rank."""
    reports: list[str] = []
    sampler: Any = DistributedSampler(NUMBERS, num_replicas=2, rank=1, seed=4, shuffle=True)
    batches = numbers(DataLoader(NUMBERS, batch_size=3, sampler=sampler), say=reports.append)
    assert [len(batch) for batch in batches] == [6, 6, 1]
    assert batches == numbers(DataLoader(NUMBERS, batch_size=6, shuffle=True), seed=4)
    assert reports == [
        "The loader's batch size of 3 is taken as each rank's: a global batch has 6 samples, 3 for each of 2 ranks."
    ]


def test_prepare_data_loader_uses_batches_of_a_rank_as_given() -> None:
    """Ranks with fewer batches continue with empty ones until all ranks have finished."""
    loaders = []
    for rank in range(2):
        own: Any = OwnBatches(rank, 2)
        loaders.append(prepare_data_loader(DataLoader(NUMBERS, batch_sampler=own), rank=rank, world_size=2))
    assert all(loader.is_joint for loader in loaders)
    assert loaders[0].plan.fingerprint == loaders[1].plan.fingerprint  # nothing that has to be the same differs
    assert read_world(loaders) == [[(1,), (2,), (3,)], [(4,)]]


def test_prepare_data_loader_reports_global_and_per_rank_batch_size() -> None:
    """Reported once, on rank 0, per rank and globally; not for a loader that is refused."""
    reports: list[str] = []
    loader = DataLoader(NUMBERS, batch_size=5)
    assert [len(batch) for batch in numbers(loader, say=reports.append)] == [5, 5, 3]
    assert [len(batch) for batch in numbers(loader, say=reports.append, batch_size_per_rank=True)] == [10, 3]
    given: Any = [[1], [2]]
    numbers(DataLoader(NUMBERS, batch_sampler=given), say=reports.append)
    with pytest.raises(DataError, match="at least one rank would never have a sample"):
        numbers(DataLoader(NUMBERS), say=reports.append)
    assert " | ".join(reports) == (
        "The loader's batch size of 5 is taken as that of all ranks together: a global batch has 5 samples, "
        "2 to 3 for each of 2 ranks."
        " | The loader's batch size of 5 is taken as each rank's: a global batch has 10 samples, 5 for each of 2 ranks."
        " | The loader's batches are those of its list, each taken as one of all 2 ranks together."
    )


def test_prepare_data_loader_streams_an_iterable_dataset() -> None:
    """With its batch size, `drop_last` and collate function."""
    loader = DataLoader(
        Stream(11), batch_size=4, drop_last=True, collate_fn=lambda samples: torch.tensor(samples)[:, 0]
    )
    iterators = [one.iterate(0) for one in shard_world(loader)]
    batches = [torch.cat([one.data for one in pieces]).tolist() for pieces in zip(*iterators, strict=True)]
    assert batches == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert shard_world(DataLoader(Stream(11, own=True), batch_size=4), divides_itself=True)[0].is_joint


def test_prepare_data_loader_keeps_the_options_of_the_workers() -> None:
    """Every worker option is passed on unchanged, without starting a worker."""
    context = torch.multiprocessing.get_context("fork")
    options: dict[str, Any] = {"num_workers": 2, "prefetch_factor": 5, "persistent_workers": True, "timeout": 9.0}
    options |= {"worker_init_fn": print, "multiprocessing_context": context}
    made = prepare_data_loader(DataLoader(NUMBERS, 4, collate_fn=len, **options), rank=0, world_size=2)
    assert {name: getattr(made._workers.loader, name) for name in options} == options
    assert isinstance(made.dataset, TensorDataset)
    assert made._reader.collate is len  # type: ignore[union-attr]


class OwnIterator(DataLoader[Any]):
    """Overrides `__iter__`."""

    def __iter__(self) -> Any:
        return iter(())


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no_batch_size": (DataLoader(NUMBERS, batch_size=None), {}, "its `batch_size` is None, so its dataset returns"),
    "stream_without": (DataLoader(Stream(3), batch_size=None), {}, "its `batch_size` is None"),
    "other_each_time": (
        DataLoader(NUMBERS, 4, sampler=EveryOther("own")),
        {},
        "EveryOther: it yields different samples each time it is iterated in the same epoch. Give it a `set_epoch`",
    ),
    "names": (DataLoader(NUMBERS, 4, sampler=["a", "b"]), {}, "it yields 'a', which is not a sample index"),
    "not_there": (DataLoader(NUMBERS, 2, sampler=[1, 13]), {}, "from a sampler: sample 13 of 13"),
    "too_many": (
        DataLoader(NUMBERS, 4, sampler=RandomSampler(NUMBERS, num_samples=14)),  # type: ignore[arg-type]
        {},
        "its RandomSampler draws 14 of 13 samples without replacement",
    ),
    "too_small": (DataLoader(NUMBERS, 1), {}, "a global batch of 1 sample among 2 ranks"),
    "own_iterator": (OwnIterator(NUMBERS, 4), {}, "OwnIterator overrides `__iter__`"),
    "no_loader": ([1, 2], {}, "preparing a DataLoader: a list. Give a torch DataLoader"),
    "batch_split": (
        DataLoader(NUMBERS, batch_sampler=[[1]]),
        {"batch_split": [1, 2]},
        "with batches of its own sampler",
    ),
}


def test_prepare_data_loader_refuses_what_it_cannot_keep_exact() -> None:
    """Each error names the cause and the fix."""
    for loader, options, words in REFUSED.values():
        with pytest.raises(DataError) as caught:
            list(prepare_data_loader(loader, rank=0, world_size=2, **options).iterate(0))
        assert words in str(caught.value)
        assert caught.value.fix


def test_prepare_data_loader_reports_nothing_with_one_rank() -> None:
    """With one rank, global and per-rank batch size are equal."""
    reports: list[str] = []
    prepare_data_loader(DataLoader(NUMBERS, batch_size=4), rank=0, world_size=1, say=reports.append)
    assert reports == []


@pytest.mark.parametrize("world_size", [1, 3])
def test_prepare_data_loader_takes_the_samples_of_the_samplers_own_source(world_size: int) -> None:
    """A sampler over fewer samples than the dataset selects a part of it, also with replacement."""
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
        with pytest.raises(DataError, match=r"Sampler has 14 samples, and its dataset 13\. Create the sampler from"):
            prepare_data_loader(DataLoader(NUMBERS, 3, sampler=sampler), rank=0, world_size=world_size)
