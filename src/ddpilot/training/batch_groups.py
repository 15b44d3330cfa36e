# SPDX-License-Identifier: Apache-2.0
"""Groups the batches of an epoch for gradient accumulation, with known counts, and checks that streams are alike."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, pairwise
from typing import Any, NoReturn, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from ddpilot.data.global_batches import Division, Plan
from ddpilot.data.local_batch import NOTHING, LocalBatch, SampleDigest, observe
from ddpilot.data.options import naming_rank
from ddpilot.data.shards.loader import ShardLoader
from ddpilot.data.stream_loader import StreamLoader
from ddpilot.errors import DataError, LoopError
from ddpilot.group.device import wire_device
from ddpilot.group.protocol import GroupLike


class Loader(Protocol):
    """A loader of `ddpilot.data`: one rank's part of every global batch of an epoch."""

    def iterate(self, epoch: int, first_batch: int = 0) -> Iterator[LocalBatch]:
        """Yield the parts from batch `first_batch` on; never ends if their `global_count` is None."""


def length_of(loader: Any) -> int | None:
    """Return the number of batches of `loader`; None if it is unknown, as that of a stream."""
    try:
        return len(loader)
    except TypeError:
        return None


class LimitedLoader:
    """A loader that yields the first `max_batches` global batches of each epoch of `inner`; otherwise the same.

    `is_fixed`: those of epoch 0 in every epoch.
    """

    def __init__(self, inner: Loader, max_batches: int, *, is_fixed: bool = False) -> None:
        self.inner = inner
        self.max_batches = max_batches
        self.is_fixed = is_fixed

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # while it is unpickled
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __len__(self) -> int:
        length = length_of(self.inner)
        return self.max_batches if length is None else min(length, self.max_batches)

    def iterate(self, epoch: int, first_batch: int = 0) -> Iterator[LocalBatch]:
        """Yield the parts of batches `first_batch` to `max_batches` - 1."""
        epoch = 0 if self.is_fixed else epoch
        return islice(self.inner.iterate(epoch, first_batch), max(0, self.max_batches - first_batch))


@dataclass(eq=False, slots=True)
class BatchPart:
    """The samples of one of several loaders in a batch of `Loop.batches(a, b)`."""

    count: int
    """Number of samples of this rank."""
    global_count: int
    """Number of samples of all ranks."""
    sample_ids: NDArray[np.int64]
    """Indices of this rank's samples in the loader's dataset, shape (`count`,)."""
    group_count: int = 0
    """Number of samples of all ranks in all batches of the accumulation group."""


@dataclass(eq=False, slots=True)  # frozen=True would cost more than everything else done here per batch
class CurrentBatch:
    """The loop's current batch and its accumulation group, which is the batches of one update."""

    data: Any
    """This rank's samples, collated; zero rows if it has none."""
    epoch: int
    index: int
    """Index of the global batch in its epoch, from 0."""
    count: int
    """Number of samples of this rank."""
    global_count: int
    """Number of samples of all ranks."""
    sample_ids: NDArray[np.int64]
    """Indices of this rank's samples in the dataset, shape (`count`,)."""
    group_count: int
    """Number of samples of all ranks in all batches of the accumulation group."""
    group_size: int
    """Number of batches in the accumulation group; smaller for the last group of an epoch."""
    is_first: bool
    """True for the first batch of its accumulation group."""
    is_last: bool
    """True for the last batch of its accumulation group, after which the weights are updated."""
    stream_state: Any = None
    """State after this batch of an iterable dataset with `state_dict`, the same on every rank; else None."""
    has_empty_rank: bool = False
    """True if some rank has no sample of this batch, or of one of its parts. The same on every rank."""
    parts: tuple[BatchPart, ...] = ()
    """Of several loaders in step: the samples of each, in the order of the loaders; () for one loader."""
    source: int = 0
    """Of several loaders with `weights`: index of the loader that this batch is from."""

    @property
    def lacks_samples(self) -> bool:
        """True if this rank has no sample of the batch, or of one of its parts."""
        return not self.count or any(not part.count for part in self.parts)


def iterate_groups(
    loader: Loader,
    group: GroupLike,
    *,
    epoch: int,
    first_batch: int = 0,
    accumulation: int | Callable[[], int] = 1,
    stream_state: Any = None,
) -> Generator[CurrentBatch, None, None]:
    """Yield the batches of an epoch, in accumulation groups of `accumulation` batches. Collective.

    A function in its place returns the number of batches of the next group, the same on every rank.
    All batches of a group are read before the first is yielded. If the sample counts of the other ranks are unknown,
    they are all-reduced, in one small collective per group; the epoch ends on all ranks when none has a sample left.
    `stream_state`: the state after batch `first_batch` - 1, with which a stream resumes there without reading the
    batches before. Raises DataError on all ranks if they would read different epochs or see different streams.
    """
    with naming_rank(group.rank):
        check_loader(loader)
        _check_agreement(loader, group)
    max_batches, order = None, epoch
    if isinstance(loader, LimitedLoader):
        order = 0 if loader.is_fixed else epoch
        max_batches, loader = max(0, loader.max_batches - first_batch), loader.inner
    if isinstance(loader, StreamLoader):
        batches = observe(loader.iterate(order, first_batch, stream_state))
    elif isinstance(loader, ShardLoader):
        merge = partial(_merge_lengths, group) if group.world_size > 1 else None
        batches = observe(loader.iterate(order, first_batch, stream_state, merge))
    else:
        batches = observe(loader.iterate(order, first_batch))
    # Every rank reads the whole stream: the division is exact only if all ranks see the same one.
    is_whole = isinstance(loader, StreamLoader) and not loader.is_joint
    is_read_by_all = group.world_size > 1 and getattr(loader, "is_read_by_all", is_whole)
    try:
        with naming_rank(group.rank):
            limited = batches if max_batches is None else islice(batches, max_batches)
            yield from _group(limited, group, epoch, accumulation, is_read_by_all, _uneven_division(loader))
    finally:
        if isinstance(batches, Generator):  # stops its workers now, not when it is garbage-collected
            batches.close()


def _merge_lengths(group: GroupLike, lengths: Mapping[int, int]) -> dict[int, int]:
    """Return the lengths of the shards that any rank has read to their end. Collective."""
    num = torch.tensor([len(lengths)], dtype=torch.float64)
    if not group.all_reduce(num.to(wire_device(group))).item():
        return {}
    return {shard: length for of_rank in group.all_gather_object(dict(lengths)) for shard, length in of_rank.items()}


def is_at_end(loader: Loader, batch: CurrentBatch) -> bool:
    """True if `batch` is known to be the last of its epoch. The same on all ranks.

    Always False for streams, for joint loaders, and for batches that a user's sampler makes, unless they are limited.
    """
    if isinstance(loader, LimitedLoader) and batch.index + 1 >= loader.max_batches:
        return True
    plan = getattr(loader, "plan", None)
    if hasattr(loader, "loaders"):
        return plan is not None and plan.num_batches is not None and batch.index + 1 >= plan.num_batches
    return isinstance(plan, Plan) and not getattr(loader, "is_joint", True) and batch.index + 1 >= plan.num_batches


def _check_agreement(loader: Loader, group: GroupLike) -> None:
    """Raise DataError on all ranks unless all of them are about to read the same epoch. Collective."""
    plan = getattr(loader, "plan", None)
    if group.world_size == 1 or plan is None:
        return
    of_ranks = group.all_gather_object(plan.fingerprint)
    if len(set(of_ranks)) > 1:
        odd = [rank for rank, text in enumerate(of_ranks) if text != of_ranks[0]]
        raise DataError(
            "beginning an epoch",
            found=f"ranks {', '.join(map(str, odd))} would read different batches than rank 0",
            fix="Pass every rank a dataset of the same length, and the same sizes, `batch_split`, weights and seed.",
            rank=odd[0],
        )


def check_loader(loader: Any) -> None:
    """Raise LoopError unless `loader` is a loader of `ddpilot.data`: a plain DataLoader is not. Not collective."""
    if hasattr(loader, "iterate"):
        return
    is_torchs = isinstance(loader, DataLoader)
    raise LoopError(
        "reading batches",
        found=f"a {type(loader).__name__}, which "
        + ("every rank would read as a whole" if is_torchs else "is not a loader"),
        fix=f"Pass {'loop.prepare_data_loader(loader) or ' * is_torchs}loop.loader(dataset, global_batch_size=...).",
    )


def _uneven_division(loader: Any) -> Division | None:
    """Return the division if some rank may be empty in a batch of at least world_size samples, else None."""
    division = getattr(getattr(loader, "plan", None), "division", None)
    is_even = division is None or len({stop - start for start, stop in pairwise(division.edges)}) == 1
    return None if is_even else division


def is_uneven(loader: Any, count: int) -> bool:
    """True if some rank has no sample of a batch of `count` samples of `loader`. The same on every rank."""
    division = getattr(loader.plan, "division", None)
    return division is not None and min(division.sizes(count)) == 0


def _group(
    batches: Iterator[LocalBatch],
    group: GroupLike,
    epoch: int,
    accumulation: int | Callable[[], int],
    is_read_by_all: bool,
    uneven: Division | None,
) -> Iterator[CurrentBatch]:
    num_ranks = group.world_size
    while True:
        num = accumulation() if callable(accumulation) else accumulation
        members = list(islice(batches, num))
        if is_read_by_all:
            check_stream(members, group, epoch)
        if not members:
            return
        counts, have_empty = _global_counts(members, group)
        total, size = sum(counts), len(counts)
        _total_parts(members[:size])
        for place, (batch, count) in enumerate(zip(members, counts, strict=False)):
            yield CurrentBatch(
                batch.data,
                epoch,
                batch.index,
                batch.count,
                count,
                batch.sample_ids,
                total,
                size,
                place == 0,
                place == size - 1,
                batch.stream_state,
                count < num_ranks
                or have_empty[place]
                or (uneven is not None and uneven.has_empty(count))
                or getattr(batch, "has_empty_part", False),
                getattr(batch, "parts", ()),
                getattr(batch, "source", 0),
            )
        if size < len(members):
            return


def _total_parts(members: Sequence[LocalBatch]) -> None:
    """Set `group_count` of the parts of an accumulation group's batches."""
    for parts in zip(*(getattr(batch, "parts", ()) for batch in members), strict=True):
        total = sum(part.global_count for part in parts)
        for part in parts:
            part.group_count = total


def _global_counts(members: list[LocalBatch], group: GroupLike) -> tuple[list[int], list[bool]]:
    """Return the samples of all ranks per batch, up to the first batch without any, which is the end of the data.

    Also returns, per batch, True if some rank has no sample; always False if no exchange was needed.
    """
    num = len(members)
    known = [batch.global_count for batch in members]
    if None not in known:
        return known, [False] * num  # type: ignore[return-value]
    own = [*(float(batch.count) for batch in members), *(float(not batch.count) for batch in members)]
    counts = torch.tensor(own, dtype=torch.float64)
    if group.world_size > 1:
        counts = group.all_reduce(counts.to(wire_device(group))).cpu()
    summed = [round(count) for count in counts.tolist()]
    end = summed.index(0) if 0 in summed[:num] else num
    return summed[:end], [bool(empty) for empty in summed[num:]]


_FIX = (
    "Let the dataset yield every sample on every rank, which selects its part itself; or let it divide them by "
    "torch.utils.data.get_worker_info(), which then counts the workers of all ranks, and pass `divides_itself=True`."
)


def check_stream(members: Sequence[LocalBatch], group: GroupLike, epoch: int) -> None:
    """Raise DataError on all ranks unless they read the same number of samples for this update, and the same ones.

    `members`: the update's batches. Compares their sizes and the first sample of each. Collective.
    """
    seen = [batch.first_seen for batch in members if batch.first_seen is not None]
    count = float(sum(batch.global_count or 0 for batch in members))
    content = float(zlib.crc32(b"".join(one.number.to_bytes(4, "big") for one in seen)))
    limits = torch.tensor([count, -count, content, -content], dtype=torch.float64)
    most, least, largest, smallest = group.all_reduce(limits.to(wire_device(group)), op="max").tolist()
    if (most, largest) != (-least, -smallest):
        _raise_different(int(count), seen[0] if seen else NOTHING, group, f"epoch {epoch}")


def _raise_different(count: int, seen: SampleDigest, group: GroupLike, when: str) -> NoReturn:
    read: list[tuple[int, str]] = group.all_gather_object((count, seen.text))
    each = "; ".join(f"rank {rank} {number} samples, the first {text}" for rank, (number, text) in enumerate(read[:4]))
    more = f"; and {len(read) - 4} more ranks" if len(read) > 4 else ""
    is_same_count = len({number for number, _ in read}) == 1
    about = " (`seed_samples=False` compares only sizes, for samples that differ by augmentation.)"
    raise DataError(
        f"reading a stream in {when}",
        found=f"the ranks do not read the same stream; for the next update {each}{more}",
        fix=_FIX + (about if is_same_count else ""),
        rank=group.rank,
    )
