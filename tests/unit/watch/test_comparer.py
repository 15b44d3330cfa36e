# SPDX-License-Identifier: Apache-2.0
"""Logs that grow: every record is compared once, whoever is ahead, and memory stays where it was."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import psutil
import pytest

from ddpilot.record.log import Collective, GroupOfRanks, RankLog, Tensor
from ddpilot.watch.comparer import SETTLE_NS, Comparer, Disagreement
from tests.unit.watch.logs import S, Writer, group_of

WORLD = group_of(0, 1)
NOW_NS = 200 * S
PER_LOOK = 500
NUM_HOURS, HOURS_EACH = (8, 1.0) if os.environ.get("DDPILOT_SOAK") else (1, 0.7)


def feed(comparer: Comparer, *writers: Writer, now_ns: int = NOW_NS) -> list[Disagreement]:
    """What is found in what each of them has written since the last time."""
    found = []
    for writer in writers:
        log = writer.log()
        newer = tuple(entry for entry in log.collectives if entry.index > comparer.after(log.rank))
        found += comparer.feed(replace(log, collectives=newer), now_ns)
    return found


@pytest.mark.parametrize(
    ("odd", "aspect"),
    [
        ({"op": "barrier"}, "op"),
        ({"inputs": (Tensor(dtype="float32", shape=(9,), device="cpu"),)}, "size"),
        ({"inputs": (Tensor(dtype="float16", shape=(4,), device="cpu"),)}, "dtype"),
        ({"reduce_op": "MAX"}, "reduce-op"),
        ({"root": 1}, "root"),
    ],
)
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_difference_is_found_as_soon_as_the_second_log_has_it(
    odd: dict[str, Any], aspect: str, order: tuple[int, int]
) -> None:
    """Whoever is fed first; what they did before and after says nothing."""
    writers = [Writer(rank, WORLD) for rank in (0, 1)]
    comparer = Comparer((0, 1))
    for writer in writers:
        writer.call("all_reduce", 1)
    assert feed(comparer, *writers) == []
    for writer in writers:
        more = {"op": "all_reduce", "root": 0, **(odd if writer.rank == 1 else {})}
        writer.call(more.pop("op"), 2, **more).call("barrier", 3)
    (found,) = feed(comparer, *(writers[rank] for rank in order))
    assert (found.seq, found.clash.aspect, sorted(found.by_rank)) == (1, aspect, [0, 1])
    assert feed(comparer, *writers) == []


def test_a_reduce_op_that_comes_late_is_waited_for() -> None:
    """It is read up to 50 ms after the record; after half a second it never comes."""
    early = [Writer(rank, WORLD).call("all_reduce", 1, reduce_op=None, start_ns=NOW_NS) for rank in (0, 1)]
    comparer = Comparer((0, 1))
    assert feed(comparer, *early) == []
    assert comparer.after(0) == 0
    late = [
        Writer(rank, WORLD).call("all_reduce", 1, reduce_op=("SUM", "AVG")[rank], start_ns=NOW_NS) for rank in (0, 1)
    ]
    assert [each.clash.aspect for each in feed(comparer, *late)] == ["reduce-op"]
    never = Comparer((0, 1))
    assert feed(never, *early, now_ns=NOW_NS + SETTLE_NS) == []
    assert never.after(0) == 1


def test_reduce_ops_that_differ_are_told_once_for_each_place() -> None:
    """A loop repeats them two thousand times a second."""
    writers = [Writer(rank, WORLD) for rank in (0, 1)]
    for writer in writers:
        for line in (5, 5, 6, 5):
            writer.call("all_reduce", line, reduce_op=("SUM", "MAX")[writer.rank])
    assert [each.seq for each in feed(Comparer((0, 1)), *writers)] == [0, 2]


def test_a_group_made_anew_is_compared_again() -> None:
    """What was apart in its predecessor is over."""
    writers = [Writer(rank, WORLD) for rank in (0, 1)]
    for attempt in (1, 2):
        group = group_of(0, 1, incarnation=attempt)
        for writer in writers:
            writer.call("all_reduce" if writer.rank else "barrier", 1, group=group)
    comparer = Comparer((0, 1))
    assert [(each.group.incarnation, each.seq) for each in feed(comparer, *writers)] == [(2, 0)]


def test_a_rank_that_is_started_anew_begins_anew() -> None:
    """Its indices count from 1 again."""
    writer = Writer(0, WORLD).call("barrier", 1).call("barrier", 1)
    comparer = Comparer((0, 1))
    comparer.feed(writer.log(), NOW_NS)
    assert comparer.after(0) == 2
    comparer.feed(Writer(0, WORLD).call("barrier", 1).log(started_ns=7), NOW_NS)
    assert comparer.after(0) == 1


def test_what_a_rank_is_ahead_is_bounded() -> None:
    """The oldest is let go."""
    comparer = Comparer((0, 1), max_open=10)
    writer = Writer(0, WORLD)
    for _ in range(50):
        writer.call("barrier", 1)
    comparer.feed(writer.log(), NOW_NS)
    assert comparer.num_open == 10


def test_collectives_of_ranks_that_are_not_seen_are_not_waited_for() -> None:
    """Those of another node."""
    comparer = Comparer((0, 1))
    writers = [Writer(rank, group_of(0, 1, 2, 3)) for rank in (0, 1)]
    feed(comparer, *(writer.call("barrier", 1) for writer in writers))
    assert comparer.num_open == 0


def entries_of(group: GroupOfRanks) -> list[Collective]:
    """Records to be used again and again with new numbers: to make them anew would take most of the time."""
    writer = Writer(group.rank, group)
    for _ in range(PER_LOOK):
        writer.call("all_reduce", 1)
    return list(writer.log().collectives)


class Stream:
    """Two ranks that do the same 2,000 times a second, looked at four times a second, and what compares them."""

    def __init__(self) -> None:
        self.comparer = Comparer((0, 1))
        self.num_looks = 0
        self.early_bytes = 0
        self._logs: list[tuple[RankLog, list[Collective]]] = []
        for rank in (0, 1):
            entries = entries_of(group_of(0, 1))
            self._logs.append((replace(Writer(rank, WORLD).log(), rank=rank, collectives=tuple(entries)), entries))

    def run(self, hours: float) -> None:
        """So many hours in simulated time."""
        put = object.__setattr__
        for _ in range(int(hours * 3600 * 4)):
            for log, entries in self._logs:
                base = self.num_looks * PER_LOOK
                for number, entry in enumerate(entries):
                    put(entry, "index", base + number + 1)
                    put(entry, "seq", base + number)
                assert self.comparer.feed(log, NOW_NS) == []
            self.num_looks += 1


@pytest.fixture(scope="module")
def stream() -> Stream:
    """One that goes on from test to test; what it has taken after a few minutes is what it may take."""
    begun = Stream()
    begun.run(0.1)
    begun.early_bytes = psutil.Process().memory_info().rss
    return begun


@pytest.mark.soak
@pytest.mark.parametrize("hour", range(NUM_HOURS))
def test_memory_stays_flat_through_hours_of_collectives(stream: Stream, hour: int) -> None:
    """8 hours at 2,000 collectives per second, one after the other; a tenth of it in every run."""
    stream.run(HOURS_EACH)
    assert stream.comparer.num_open == 0
    assert stream.comparer.after(0) == stream.num_looks * PER_LOOK
    assert psutil.Process().memory_info().rss - stream.early_bytes < 4 << 20
