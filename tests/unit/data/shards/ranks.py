# SPDX-License-Identifier: Apache-2.0
"""A dataset of shards for these tests, and all ranks of a job that read it, as threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from ddpilot.data.loaders import make_shard_loader
from ddpilot.data.local_batch import LocalBatch

SHARD = 100_000
"""Sample n of shard s is the number s * SHARD + n."""


class Numbers:
    """Shards of numbers; notes which shards were opened, and from where on."""

    def __init__(self, lengths: Sequence[int], *, are_known: bool = False) -> None:
        self.lengths = lengths
        self.num_shards = len(lengths)
        self.are_known = are_known
        self.opened: list[tuple[int, int]] = []
        self.num_read = 0

    def open(self, shard: int, skip: int = 0) -> Iterator[int]:
        self.opened.append((shard, skip))
        for number in range(skip, self.lengths[shard]):
            self.num_read += 1
            yield shard * SHARD + number

    def num_samples(self, shard: int) -> int | None:
        return self.lengths[shard] if self.are_known else None


def all_samples(lengths: Sequence[int]) -> list[int]:
    """Every sample of such shards once."""
    return [shard * SHARD + number for shard, length in enumerate(lengths) for number in range(length)]


class Ranks:
    """The ranks of a job, which exchange lengths; `read` returns the batches of each."""

    def __init__(self, datasets: Sequence[Any], **options: Any) -> None:
        world_size = len(datasets)
        self.loaders = [
            make_shard_loader(one, rank=rank, world_size=world_size, empty_ranks=True, **options)
            for rank, one in enumerate(datasets)
        ]
        self._barrier = threading.Barrier(world_size)
        self._sent: list[dict[int, int]] = [{}] * world_size

    def read(self, epoch: int = 0, first_batch: int = 0, state: Any = None, num: int | None = None) -> list[Any]:
        """Return the global batches from `first_batch` on, of each the `LocalBatch`es of all ranks."""
        pieces: list[list[LocalBatch]] = [[] for _ in self.loaders]
        errors: list[BaseException] = []

        def run(rank: int) -> None:
            try:
                merge = None if len(self.loaders) == 1 else lambda lengths: self._merge(rank, lengths)
                batches = self.loaders[rank].iterate(epoch, first_batch, state, merge)
                pieces[rank] += islice(batches, num)
                batches.close()  # type: ignore[attr-defined]
            except BaseException as error:  # noqa: BLE001 - raised below
                errors.append(error)
                self._barrier.abort()

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(self.loaders))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return list(zip(*pieces, strict=True))

    def _merge(self, rank: int, lengths: dict[int, int]) -> Mapping[int, int]:
        self._sent[rank] = dict(lengths)
        self._barrier.wait()
        merged = {shard: length for one in self._sent for shard, length in one.items()}
        self._barrier.wait()
        return merged


def put_together(batches: list[Any]) -> list[list[int]]:
    """Return the samples of each global batch, after a check of what its ranks say about it."""
    found = []
    for parts in batches:
        samples = [int(sample) for part in parts if part.count for sample in part.data]
        assert {part.global_count for part in parts} == {len(samples)}
        assert len({str(part.stream_state) for part in parts}) == 1
        assert all(len(part.data) == part.count for part in parts)
        ids = [number for part in parts for number in part.sample_ids.tolist()]
        assert ids == list(range(ids[0], ids[0] + len(samples)))
        found.append(samples)
    return found
