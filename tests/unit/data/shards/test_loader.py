# SPDX-License-Identifier: Apache-2.0
"""The batches of shards: the same at any world size, with any workers, and from any position on."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
import torch

from ddpilot.data.loaders import make_shard_loader
from ddpilot.errors import DataError
from tests.unit.data.samples import Augmented
from tests.unit.data.shards.ranks import SHARD, Numbers, Ranks, all_samples, put_together


def draw_options(rng: random.Random) -> dict[str, Any]:
    """Options of a loader."""
    return {
        "global_batch_size": rng.choice([1, 2, 3, 4, 7, 8, 16, 33]),
        "shuffle": rng.random() < 0.5,
        "shuffle_buffer": rng.choice([1, 2, 5, 128]),
        "num_lanes": rng.choice([1, 3, 4, 16, 64]),
        "drop_last": rng.random() < 0.3,
        "seed": rng.randint(0, 9),
        "seed_samples": False,
    }


def draw_lengths(rng: random.Random) -> list[int]:
    """Numbers of samples of shards, some of them empty."""
    return [rng.choice([0, 1, 3, rng.randint(0, 40)]) for _ in range(rng.choice([1, 2, 3, 5, 7, 16, 20, 70]))]


@pytest.mark.parametrize("trial", range(40))
def test_batches_are_the_same_at_any_world_size_and_from_any_position(trial: int) -> None:
    """Each sample once, only the last batch smaller, with lengths known or not, and resumed at another world size."""
    rng = random.Random(trial)
    lengths, options, epoch = draw_lengths(rng), draw_options(rng), rng.randint(0, 3)
    expected = put_together(Ranks([Numbers(lengths, are_known=True)], **options).read(epoch))
    samples = [sample for batch in expected for sample in batch]
    size = options["global_batch_size"]
    if options["drop_last"]:
        assert len(set(samples)) == len(samples) == sum(lengths) // size * size
    else:
        assert sorted(samples) == all_samples(lengths)
    assert all(len(batch) == size for batch in expected[:-1])

    are_known = rng.random() < 0.3
    world_size = rng.randint(1, 4)
    read = Ranks([Numbers(lengths, are_known=are_known) for _ in range(world_size)], **options).read(epoch)
    assert put_together(read) == expected
    if len(expected) > 1:
        first = rng.randint(1, len(expected))
        state = json.loads(json.dumps(read[first - 1][0].stream_state))
        others = Ranks([Numbers(lengths, are_known=are_known) for _ in range(rng.randint(1, 4))], **options)
        assert put_together(others.read(epoch, first, state)) == expected[first:]
        assert put_together(others.read(epoch, first)) == expected[first:]


@pytest.mark.parametrize("num_workers", [1, 2])
def test_batches_are_the_same_with_workers(num_workers: int) -> None:
    """Two epochs with persistent workers, from the middle of an epoch too; lengths are unknown."""
    lengths = [5, 0, 9, 1, 7, 3, 3, 8, 2]
    options: dict[str, Any] = {"global_batch_size": 4, "shuffle": True, "shuffle_buffer": 3, "seed": 1}
    expected = [put_together(Ranks([Numbers(lengths)], **options).read(epoch)) for epoch in (0, 1)]
    assert expected[0] != expected[1]
    ranks = Ranks([Numbers(lengths)], num_workers=num_workers, persistent_workers=True, **options)
    first = ranks.read(0)
    assert put_together(first) == expected[0]
    assert put_together(ranks.read(1)) == expected[1]
    assert put_together(ranks.read(0, 3, first[2][0].stream_state)) == expected[0][3:]


def test_resume_opens_shards_at_the_sample() -> None:
    """What lies before is neither opened nor read."""
    data = Numbers([1000] * 4)
    options = {"global_batch_size": 8, "num_lanes": 4}
    state = Ranks([data], **options).read(num=120)[-1][0].stream_state
    again = Numbers([1000] * 4)
    batches = put_together(Ranks([again], **options).read(0, 120, state, num=1))
    assert again.opened == [(0, 240), (2, 240)]
    assert again.num_read == 8
    assert batches == [[*range(240, 244), *range(2 * SHARD + 240, 2 * SHARD + 244)]]


def test_each_rank_opens_its_own_shards() -> None:
    """With as many shards as readers or more, no shard is opened by two ranks, and none is opened twice."""
    datasets = [Numbers([30] * 64) for _ in range(4)]
    Ranks(datasets, global_batch_size=32, shuffle=True).read(num=50)
    opened = [[shard for shard, _ in data.opened] for data in datasets]
    assert all(opened)
    assert len({shard for one in opened for shard in one}) == sum(map(len, opened))


def test_lanes_stay_open_when_others_end() -> None:
    """With unknown lengths, on one rank with and without workers: batches are made again of what is in memory."""
    for are_known in (True, False):
        data = Numbers(range(10, 74), are_known=are_known)
        read = put_together(Ranks([data], global_batch_size=16).read())
        assert sorted(sample for batch in read for sample in batch) == all_samples(data.lengths)
        assert sorted(data.opened) == [(shard, 0) for shard in range(64)]


def test_shard_that_is_shorter_when_opened_again_is_an_error() -> None:
    """Its samples cannot be read at another position."""

    class Shrinking(Numbers):
        def open(self, shard: int, skip: int = 0) -> Iterator[int]:
            return iter(range(skip, 8 if skip else 9))

    state = Ranks([Shrinking([9])], global_batch_size=4, shuffle=True, shuffle_buffer=3).read(num=1)[0][0].stream_state
    state["positions"], state["batch"] = [9], 2
    with pytest.raises(DataError, match="from sample 9 on: it has 8 samples"):
        Ranks([Shrinking([9])], global_batch_size=4, shuffle=True, shuffle_buffer=7).read(0, 2, state)


def test_ranks_share_a_shard_when_there_are_fewer() -> None:
    """One shard and three ranks: each decodes its own samples only."""

    class Decoded(Numbers):
        num_decoded = 0

        def decode(self, record: int) -> int:
            self.num_decoded += 1
            return record

    datasets = [Decoded([12]) for _ in range(3)]
    assert put_together(Ranks(datasets, global_batch_size=6).read()) == [[*range(6)], [*range(6, 12)]]
    assert [data.num_decoded for data in datasets] == [4, 4, 4]


def test_an_endless_shard_is_read_next_to_others() -> None:
    """Its length is never known, and its batches stay full when the other shards have ended."""

    class Endless(Numbers):
        def open(self, shard: int, skip: int = 0) -> Iterator[int]:
            return iter(count(skip)) if shard == 0 else super().open(shard, skip)

    batches = put_together(Ranks([Endless([0, 3]) for _ in range(2)], global_batch_size=4).read(num=5))
    assert [len(batch) for batch in batches] == [4] * 5
    assert sorted(sample for batch in batches for sample in batch if sample < SHARD) == [*range(17)]


def test_samples_are_augmented_alike_at_any_world_size() -> None:
    """What `open` and `decode` draw depends on seed, epoch, shard and number of the sample."""

    class Random(Numbers):
        def open(self, shard: int, skip: int = 0) -> Iterator[Any]:
            for number in super().open(shard, skip):
                yield Augmented(SHARD * 9)[number]

        def decode(self, record: Any) -> Any:
            return (*record, float(torch.rand((), dtype=torch.float64)))

    options = {"global_batch_size": 4, "shuffle": True, "shuffle_buffer": 4}
    alone = Ranks([Random([7, 5, 6])], **options).read()
    two = make_shard_loader(Random([7, 5, 6], are_known=True), rank=1, world_size=2, **options)
    for (whole,), part in zip(alone, two.iterate(0), strict=True):
        for column, own in zip(whole.data, part.data, strict=True):
            assert torch.equal(column[whole.count - part.count :], own)
    resumed = Ranks([Random([7, 5, 6])], **options).read(0, 2, alone[1][0].stream_state)
    assert [float(part.data[4].sum()) for (part,) in resumed] == [float(one.data[4].sum()) for (one,) in alone[2:]]


def test_len_is_known_with_the_lengths() -> None:
    """Otherwise it raises TypeError."""
    assert len(make_shard_loader(Numbers([3, 4], are_known=True), rank=0, world_size=1, global_batch_size=2)) == 4
    with pytest.raises(TypeError, match="number of batches of Numbers is unknown"):
        len(make_shard_loader(Numbers([3, 4]), rank=0, world_size=1, global_batch_size=2))


class Broken(Numbers):
    """Raises at sample 3 of shard 1."""

    def open(self, shard: int, skip: int = 0) -> Iterator[int]:
        for number in super().open(shard, skip):
            if number == SHARD + 3:
                raise OSError("no such block")
            yield number

    def describe(self, shard: int) -> str:
        return f"part-{shard}"


@pytest.mark.parametrize("num_workers", [0, 2])
def test_error_names_shard_and_sample(num_workers: int) -> None:
    """With the name that the dataset gives it, also from a worker."""
    ranks = Ranks([Broken([9, 9])], global_batch_size=2, num_workers=num_workers)
    with pytest.raises(DataError, match=r"reading sample 3 of shard 1 \(part-1\) \(batch 3 of epoch 0\)") as caught:
        ranks.read()
    assert type(caught.value.__cause__) is OSError


@pytest.mark.parametrize(
    ("said", "has", "found"), [(5, 4, "4 samples, and `num_samples"), (4, 5, "5 or more samples, and `num_samples")]
)
def test_a_wrong_length_is_refused(said: int, has: int, found: str) -> None:
    """A shard with more or fewer samples than `num_samples` returns."""

    class Wrong(Numbers):
        def num_samples(self, shard: int) -> int:
            return said

    with pytest.raises(DataError, match=found):
        Ranks([Wrong([has])], global_batch_size=2).read()


@pytest.mark.parametrize("num", [0, -1, "4", None])
def test_no_shards_are_refused(num: Any) -> None:
    """`num_shards` is checked when the loader is made."""
    data = Numbers([1])
    data.num_shards = num
    with pytest.raises(DataError, match=f"`num_shards` of Numbers is {num!r}"):
        make_shard_loader(data, rank=0, world_size=1, global_batch_size=1)


def test_invalid_options_are_refused() -> None:
    """Those of other datasets, and sizes below 1; ranks that do not exchange unknown lengths."""
    place = {"rank": 0, "world_size": 2, "global_batch_size": 4}
    with pytest.raises(DataError, match="`divides_itself=True`. Leave it out"):
        make_shard_loader(Numbers([1]), divides_itself=True, **place)
    with pytest.raises(DataError, match="`num_lanes=0`"):
        make_shard_loader(Numbers([1]), num_lanes=0, **place)
    with pytest.raises(DataError, match="2 ranks do not exchange them"):
        next(make_shard_loader(Numbers([1]), **place).iterate(0))
