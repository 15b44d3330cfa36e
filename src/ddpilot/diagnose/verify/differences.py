# SPDX-License-Identifier: Apache-2.0
"""Compare the numbers of two recorded runs, or of the ranks of one run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy

from ddpilot.diagnose.updates.record import RankRecord, Update
from ddpilot.diagnose.verify.target import Run

Kind = Literal["before", "gradient", "after"]
"""Parameters before the step, their gradients, parameters after it."""
_KINDS: tuple[Kind, ...] = ("before", "gradient", "after")
_TINY = 1e-30
_SMALL = 1e-3
"""Numbers that are smaller than the largest of all tensors by this factor are compared with that one."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One tensor that two runs, or two ranks, compute differently in one update."""

    kind: Kind
    update: int
    """Position of the update in the record, from 0."""
    name: str
    """Name of the parameter."""
    size: float
    """Largest difference, divided by the largest number of either side; infinite if only one side has the tensor."""
    scale: float = 1.0
    """The factor by which the second side is the first, as far as one factor explains the difference."""
    unexplained: float = 0.0
    """What remains of `size` if the second side is divided by `scale`."""
    key: str = ""

    @property
    def is_scaled(self) -> bool:
        """True if one factor explains the difference."""
        return abs(self.scale - 1) > 1e-4 and self.unexplained < 1e-3 * abs(self.scale - 1)


def compare_runs(first: Run, second: Run) -> list[list[Difference]]:
    """Return the differences between the ranks 0 of `first` and `second`, for each update that both have."""
    one, other = first.ranks[0], second.ranks[0]
    num = min(len(one.updates), len(other.updates))
    return [list(compare_update(one, other, number)) for number in range(num)]


def compare_ranks(run: Run, update: int) -> list[tuple[int, Difference]]:
    """Return what differs between rank 0 and another rank of `run` in one update, with that rank."""
    return [
        (record.rank, each)
        for record in run.ranks[1:]
        if len(record.updates) > update and len(run.ranks[0].updates) > update
        for each in compare_update(run.ranks[0], record, update)
    ]


def compare_update(one: RankRecord, other: RankRecord, update: int) -> Iterator[Difference]:
    """Yield the tensors that differ in an update, in the order of the computation: before, gradient, after."""
    left, right = one.arrays(update), other.arrays(update)
    names = {key: parameter.name for key, parameter in one.parameters.items()}
    for kind in _KINDS:
        keys = {each.rpartition("/")[0] for each in (*left, *right) if each.endswith(f"/{kind}")}
        least = _SMALL * max((_largest_in(left.get(f"{key}/{kind}")) for key in keys), default=0.0)
        for key in sorted(keys, key=_place):
            found = _compare(left.get(f"{key}/{kind}"), right.get(f"{key}/{kind}"), least)
            if found is not None:
                size, scale, rest = found
                name = names.get(key, key)
                yield Difference(kind=kind, update=update, name=name, key=key, size=size, scale=scale, unexplained=rest)


def _place(key: str) -> tuple[int, ...]:
    return tuple(map(int, key.split("/")))


def _largest_in(array: Any) -> float:
    return float(numpy.max(numpy.abs(array[:-2]), initial=0.0)) if array is not None else 0.0


def _compare(left: Any, right: Any, least: float) -> tuple[float, float, float] | None:
    """Return size, scale and what remains of a difference; None if both are equal.

    `least`: the difference is divided by this number at least; where all should be zero, numbers are rounding.
    """
    if left is None and right is None:
        return None
    if left is None or right is None or left.shape != right.shape:
        return float("inf"), 1.0, float("inf")
    if numpy.array_equal(left, right, equal_nan=True):
        return None
    left, right = left[:-2], right[:-2]
    unit = max(
        float(numpy.max(numpy.abs(left), initial=0.0)), float(numpy.max(numpy.abs(right), initial=0.0)), least, _TINY
    )
    size = float(numpy.max(numpy.abs(left - right), initial=0.0)) / unit
    if not numpy.isfinite(size):
        return float("inf"), 1.0, float("inf")
    scale = float(left @ right) / max(float(left @ left), _TINY)
    rest = float(numpy.max(numpy.abs(left * scale - right), initial=0.0)) / unit
    return size, scale, rest


def largest(differences: Sequence[Difference], *kinds: Kind) -> float:
    """Return the size of the largest difference of one of `kinds`; 0.0 without any."""
    return max((each.size for each in differences if each.kind in kinds), default=0.0)


# Batches


@dataclass(frozen=True, kw_only=True)
class SampleCount:
    """Samples of one update by rank."""

    by_rank: tuple[int, ...]
    num_repeated: int
    """How many samples a rank has that a rank before it has, too."""

    @property
    def total(self) -> int:
        """Samples on all ranks."""
        return sum(self.by_rank)


def samples_of(update: Update) -> list[Any]:
    """Return what identifies each sample of the batches of an update: its index, or else a checksum of its content."""
    found: list[Any] = []
    for batch in update.batches:
        found += [(batch.loader, each) for each in batch.indices or batch.checksums]
    return found


def count_samples(run: Run, update: int) -> SampleCount:
    """Count the samples of one update of `run`."""
    by_rank = [samples_of(record.updates[update]) for record in run.ranks if len(record.updates) > update]
    seen = Counter(sample for samples in by_rank for sample in set(samples))
    return SampleCount(by_rank=tuple(map(len, by_rank)), num_repeated=sum(count - 1 for count in seen.values()))


def all_samples(run: Run, update: int) -> Counter[Any]:
    """Return the samples of all ranks in one update, with how often each occurs."""
    return Counter(
        s for record in run.ranks if len(record.updates) > update for s in samples_of(record.updates[update])
    )


def are_same_batches(run: Run, update: int) -> bool:
    """True if the loaders of all ranks gave the same samples, in any order."""
    each = [Counter(samples_of(record.updates[update])) for record in run.ranks if len(record.updates) > update]
    return len(each) > 1 and bool(each[0]) and all(one == other for one, other in pairwise(each))


def are_same_inputs(run: Run, update: int) -> bool:
    """True if the models of all ranks got the same; they do not where the program divides a loader's batch itself."""
    each = [record.updates[update].inputs for record in run.ranks if len(record.updates) > update]
    return all(one == other for one, other in pairwise(each))


def same_states(run: Run, update: int) -> tuple[str, ...]:
    """Return the names of the random number generators whose state is the same on all ranks after `update`."""
    first, *others = (record.updates[update].generators for record in run.ranks if len(record.updates) > update)
    return tuple(name for name in first if all(each.get(name) == first[name] for each in others))


def content_by_sample(run: Run, num_updates: int) -> dict[Any, int]:
    """Return the checksum of each sample whose index is known, as the first rank that had it saw it."""
    found: dict[Any, int] = {}
    for record in run.ranks:
        for update in record.updates[:num_updates]:
            for batch in update.batches:
                for index, checksum in zip(batch.indices, batch.checksums, strict=False):
                    found.setdefault((batch.loader, index), checksum)
    return found
