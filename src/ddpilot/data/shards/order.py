# SPDX-License-Identifier: Apache-2.0
"""`ShardPlan` and `ShardOrder`: which samples of which shards are in each global batch, the same at any world size."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from ddpilot.data.global_batches import Division, digest, draw_permutation

_MAX_TURNS = 8


class Take(NamedTuple):
    """Consecutive samples of a lane, which are part of one global batch."""

    lane: int
    position: int
    """Number of the first sample in its lane, from 0."""
    num: int
    """Number of samples."""


class LaneStart(NamedTuple):
    """Where to open a lane: `skip` samples into its shard number `place`; that sample is number `position`."""

    place: int
    skip: int
    position: int


@dataclass(frozen=True, kw_only=True)
class ShardPlan:
    """How the samples of shards are divided into global batches, and these among the ranks.

    The shards of an epoch, in an order drawn from (seed, epoch), are dealt to *lanes*, and each lane is the samples of
    its shards one after the other. Batches take turns over `num_turns` sets of lanes, and take one sample of each lane
    of the set after the other. Lanes that have ended are left out, and a batch for which a set has too few samples is
    filled up from the next set, so that only the last batch of an epoch can be smaller. World size and workers have no
    effect on this.
    """

    num_shards: int
    global_batch_size: int
    world_size: int
    division: Division
    seed: int = 0
    shuffle: bool = False
    shuffle_buffer: int = 1
    """With `shuffle`: consecutive samples of a shard that are permuted together."""
    num_lanes: int = 64
    """Maximum number of shards that all ranks together have open at a time."""
    drop_last: bool = False
    lengths: tuple[int | None, ...]
    """Number of samples of each shard, None if unknown."""

    @cached_property
    def num_samples(self) -> int | None:
        """Samples in an epoch; None if a shard's length is unknown."""
        known = [length for length in self.lengths if length is not None]
        return sum(known) if len(known) == self.num_shards else None

    @cached_property
    def num_turns(self) -> int:
        """Number of sets of lanes: a power of two up to 8, so that usual numbers of workers divide it."""
        most = min(self.num_lanes, self.num_shards)
        turns = 1
        while turns < _MAX_TURNS and (2 * turns) ** 2 <= most:
            turns *= 2
        return turns

    @cached_property
    def lanes_per_turn(self) -> int:
        """Lanes that a batch takes samples from, at least one from each."""
        return max(1, min(min(self.num_lanes, self.num_shards) // self.num_turns, self.global_batch_size))

    @property
    def block_size(self) -> int:
        """Number of consecutive samples that are permuted together; 1 if a shard is read in its own order."""
        return self.shuffle_buffer if self.shuffle else 1

    @cached_property
    def fingerprint(self) -> str:
        """A hash of what must be equal on all ranks."""
        return digest(self.world_size, *self.division.edges, self.batches_fingerprint)

    @cached_property
    def batches_fingerprint(self) -> str:
        """A hash of what determines the global batches, the same at any world size."""
        lanes = (self.num_shards, self.num_turns, self.lanes_per_turn)
        order = (self.seed, self.shuffle, self.block_size, self.drop_last)
        return digest(self.global_batch_size, *lanes, *order, *self.lengths)

    def deal_shards(self, epoch: int) -> list[list[int]]:
        """Return the shards of each lane in the order of `epoch`."""
        order = range(self.num_shards)
        drawn: Sequence[int] = draw_permutation(len(order), self.seed, epoch).tolist() if self.shuffle else order
        num_lanes = self.num_turns * self.lanes_per_turn
        return [list(drawn[lane::num_lanes]) for lane in range(num_lanes)]

    def piece(self, takes: Sequence[Take], rank: int) -> tuple[int, list[Take]]:
        """Return the part of a batch that `rank` reads: the number of samples before it, and its takes.

        Whole lanes if each rank gets at least one; otherwise ranks share lanes, and each reads past the samples of the
        others.
        """
        if not self.division.has_empty(len(takes)):
            first, last = self.division.piece(len(takes), rank)
            return sum(take.num for take in takes[:first]), list(takes[first:last])
        start, stop = self.division.piece(sum(take.num for take in takes), rank)
        own, before = [], 0
        for lane, position, count in takes:
            skip, end = max(0, start - before), min(count, stop - before)
            if skip < end:
                own.append(Take(lane, position + skip, end - skip))
            before += count
        return start, own


class ShardOrder:
    """A position in an epoch of shards: `take()` advances it by one global batch.

    What it returns depends on a shard's length only once the end of that shard is reached. So the batches do not depend
    on how many lengths are known beforehand: a batch that was taken with a lane that turns out to have fewer samples
    has to be taken again, from the same position, after `learn`.
    """

    def __init__(self, plan: ShardPlan, epoch: int, state: Mapping[str, Any] | None = None) -> None:
        self.plan = plan
        self.lanes = plan.deal_shards(epoch)
        self.lengths: list[int | None] = list(plan.lengths)
        self.batch = 0
        self._positions = [0] * len(self.lanes)
        self._rotations = [0] * plan.num_turns
        if state is not None:
            self.batch = state["batch"]
            self._positions, self._rotations = list(state["positions"]), list(state["rotations"])
            self.lengths = [None if length < 0 else length for length in state["lengths"]]
        self._totals: list[float] = []
        self._saved_lengths: list[int] = []
        self._count_lanes()

    def copy(self) -> ShardOrder:
        """Return a second position, which advances on its own."""
        other = object.__new__(ShardOrder)
        other.__dict__ = dict(self.__dict__)
        other._positions, other._rotations = list(self._positions), list(self._rotations)
        return other

    @property
    def is_known(self) -> bool:
        """True if the length of each shard is known."""
        return math.inf not in self._totals

    def learn(self, lengths: Mapping[int, int]) -> None:
        """Add the number of samples of shards that were read to their end."""
        if lengths:
            self.lengths = [lengths.get(shard, length) for shard, length in enumerate(self.lengths)]
            self._count_lanes()

    def take(self) -> tuple[Take, ...]:
        """Return the next global batch, in the order of its lanes; () at the end of the epoch."""
        needed = self.plan.global_batch_size
        counts: dict[int, int] = {}
        for turn in range(self.plan.num_turns):
            needed -= self._take_from((self.batch + turn) % self.plan.num_turns, needed, counts)
            if not needed:
                break
        if not counts or (needed and self.plan.drop_last):
            return ()
        taken = tuple(Take(lane, self._positions[lane], counts[lane]) for lane in sorted(counts))
        for lane, count in counts.items():
            self._positions[lane] += count
        self.batch += 1
        return taken

    def find_lane_start(self, lane: int) -> LaneStart:
        """Return where to open `lane` to read on from here, by the lengths of the shards before."""
        skip = self._positions[lane]
        shards = self.lanes[lane]
        for place, shard in enumerate(shards):
            length = self.lengths[shard]
            if length is None or skip < length:
                return LaneStart(place, skip, self._positions[lane])
            skip -= length
        return LaneStart(len(shards), 0, self._positions[lane])

    def state(self) -> dict[str, Any]:
        """Return what another `ShardOrder` of this epoch needs to be at this position."""
        return {
            "batch": self.batch,
            "positions": list(self._positions),
            "rotations": list(self._rotations),
            "lengths": self._saved_lengths,
        }

    def _take_from(self, turn: int, needed: int, counts: dict[int, int]) -> int:
        """Add up to `needed` samples of the lanes of `turn`, evenly, to `counts`, and return how many."""
        rest = needed
        lanes = range(turn, len(self.lanes), self.plan.num_turns)
        while rest:
            # One sample of each lane after the other, without those that have ended.
            first = self._rotations[turn]
            left = {}
            for number in (*range(first, len(lanes)), *range(first)):
                lane = lanes[number]
                if num := self._totals[lane] - self._positions[lane] - counts.get(lane, 0):
                    left[lane] = number, num
            if not left:
                break
            cycles = int(min(rest // len(left), *(num for _, num in left.values())))
            for lane in list(left)[: None if cycles else rest]:
                counts[lane] = counts.get(lane, 0) + max(cycles, 1)
                rest -= max(cycles, 1)
                self._rotations[turn] = (left[lane][0] + 1) % len(lanes)
        return needed - rest

    def _count_lanes(self) -> None:
        self._totals = []
        for shards in self.lanes:
            lengths = [self.lengths[shard] for shard in shards]
            self._totals.append(math.inf if None in lengths else sum(length or 0 for length in lengths))
        self._saved_lengths = [-1 if length is None else length for length in self.lengths]
