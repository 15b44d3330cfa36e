# SPDX-License-Identifier: Apache-2.0
"""`ShardedDataset`: the base of datasets that consist of shards, and what is read off any of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ddpilot.errors import DataError


class ShardedDataset:
    """A dataset of shards, such as files. Each rank and worker reads its own shards.

    A subclass defines `num_shards` and `open`. A class of your own that has both is a dataset of shards as well. If the
    samples differ from epoch to epoch, define `set_epoch(epoch)`, which is called before an epoch is read.
    """

    num_shards: int
    """Number of shards."""

    def open(self, shard: int, skip: int = 0) -> Iterable[Any]:
        """Return an iterable over the records of `shard` (0 to `num_shards` - 1), without the first `skip` records.

        It has to yield the same records each time. Skipping records should cost less than reading them.
        """
        raise NotImplementedError

    def decode(self, record: Any) -> Any:
        """Return the sample of a record of `open`. Called only by the rank and worker that keeps the sample."""
        return record

    def num_samples(self, shard: int) -> int | None:  # noqa: ARG002
        """Return the number of records of `shard`; None if it is unknown before it has been read."""
        return None

    def describe(self, shard: int) -> str:
        """Return the name of `shard` for error messages."""
        return f"shard {shard}"


def is_dataset_of_shards(dataset: Any) -> bool:
    """True if `dataset` has `num_shards` and `open(shard, skip=...)`."""
    return hasattr(dataset, "num_shards") and callable(getattr(dataset, "open", None))


def count_shards(dataset: Any, rank: int) -> tuple[int, tuple[int | None, ...]]:
    """Return the number of shards, and of samples of each, None if unknown. Raises DataError for invalid values."""
    num, did = dataset.num_shards, "making a loader of shards"
    if isinstance(num, bool) or not hasattr(num, "__index__") or num < 1:
        found = f"`num_shards` of {type(dataset).__name__} is {num!r}"
        raise DataError(did, found=found, fix="Let it be 1 or more; check where the shards come from.", rank=rank)
    measure = getattr(dataset, "num_samples", None)
    if not callable(measure):
        return int(num), (None,) * int(num)
    lengths = tuple(measure(shard) for shard in range(num))
    for shard, length in enumerate(lengths):
        if length is not None and (isinstance(length, bool) or not hasattr(length, "__index__") or length < 0):
            found = f"`num_samples({shard})` of {type(dataset).__name__} is {length!r}"
            raise DataError(did, found=found, fix="Return a whole number from 0 on, or None.", rank=rank)
    return int(num), tuple(None if length is None else int(length) for length in lengths)


def describe_shard(dataset: Any, shard: int) -> str:
    """Return the name of a shard for messages: its number, and what the dataset calls it."""
    describe = getattr(dataset, "describe", None)
    name = str(describe(shard)) if callable(describe) else ""
    return f"shard {shard} ({name})" if name not in ("", f"shard {shard}") else f"shard {shard}"
