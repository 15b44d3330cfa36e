# SPDX-License-Identifier: Apache-2.0
"""Where logs of ranks differ, and where they only look as if they did."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ddpilot.record.comparing import Difference, find_difference
from ddpilot.record.log import Collective, GroupOfRanks, RankLog, Tensor

WORLD = GroupOfRanks(name="0", incarnation=1, ranks=(0, 1, 2), size=3)


def call(op: str, seq: int, *, shape: tuple[int, ...] = (4,), dtype: str = "float32", **more: Any) -> Collective:
    """One collective of the group of three."""
    tensors = (Tensor(dtype=dtype, shape=shape, device="cpu"),)
    known = {"group": WORLD, "inputs": tensors, "start_ns": seq + 1}
    return Collective(index=seq + 1, op=op, operator=f"c10d::{op}", seq=seq, **{**known, **more})


def log(rank: int, *collectives: Collective) -> RankLog:
    """The ring of a rank that holds these."""
    about: dict[str, Any] = {"pid": 1, "host": "", "torch": "", "source": "kernels", "started_ns": 0}
    counts: dict[str, Any] = {"started_unix_ns": 0, "heartbeat_ns": 0, "closed_ns": None, "num_begun": 0, "num_torn": 0}
    return RankLog(rank=rank, **about, **counts, num_faults=0, first_fault="", collectives=collectives)


def compare(*logs: RankLog) -> Difference:
    """What is found, which has to be something."""
    difference = find_difference(logs)
    assert difference is not None
    return difference


@pytest.mark.parametrize(
    ("odd", "aspect", "said"),
    [
        (call("barrier", 1, inputs=()), "op", ("all_reduce", "barrier")),
        (call("all_reduce", 1, dtype="float64"), "dtype", ("float32", "float64")),
        (call("all_reduce", 1, shape=(5,)), "size", ("4 elements", "5 elements")),
        (call("all_reduce", 1, reduce_op="MAX"), "reduce-op", ("SUM", "MAX")),
    ],
)
def test_the_first_difference_is_found_with_its_ranks(odd: Collective, aspect: str, said: tuple[str, str]) -> None:
    """The one in common before it is named too; what came after it follows from it."""
    usual = call("all_reduce", 1, reduce_op="SUM")
    start, end = call("broadcast", 0, root=0), call("gather", 2, root=0)
    found = compare(log(0, start, usual), log(1, start, odd, call("scatter", 2)), log(2, start, usual, end))
    assert (found.seq, found.clash.aspect, found.before) == (1, aspect, start)
    assert found.clash.said == ((said[0], (0, 2)), (said[1], (1,)))
    assert found.by_rank[1] is odd


def test_roots_have_to_be_the_same() -> None:
    """Each side waits for another one to send."""
    clash = compare(log(0, call("broadcast", 0, root=0)), log(1, call("broadcast", 0, root=1))).clash
    assert (clash.aspect, clash.said) == ("root", (("root 0", (0,)), ("root 1", (1,))))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (call("all_reduce", 0, shape=(2, 3)), call("all_reduce", 0, shape=(6,))),
        (call("all_gather", 0, shape=(2,)), call("all_gather", 0, shape=(3,))),
        (call("all_to_all_single", 0, shape=(2,)), call("all_to_all_single", 0, shape=(3,))),
        (call("all_reduce", 0, reduce_op="SUM"), call("all_reduce", 0, reduce_op=None)),
        (call("all_reduce", 0), call("all_reduce", 1)),
        (replace(call("send", 0), seq=None), replace(call("recv", 0), seq=None)),
    ],
    ids=["same size", "all_gather", "all_to_all", "not read yet", "one is behind", "point-to-point"],
)
def test_what_may_differ_is_no_difference(first: Collective, second: Collective) -> None:
    """Shapes of one size, sizes where each rank has its own, what is not known, and progress."""
    assert find_difference([log(0, first), log(1, second)]) is None


def test_only_what_all_rings_still_hold_is_compared() -> None:
    """A ring forgets its oldest records."""
    assert find_difference([log(0, call("barrier", 4), call("all_reduce", 5)), log(1, call("all_reduce", 5))]) is None


def test_groups_that_were_made_anew_are_compared_by_themselves() -> None:
    """Their numbers begin again; a rank that was restarted has no others, and one may not be there yet."""
    again = GroupOfRanks(name="0", incarnation=1, attempt=1, ranks=(0, 1, 2), size=3)
    old, new = call("barrier", 0), call("all_reduce", 0, group=again)
    assert find_difference([log(0, old, new), log(1, new), log(2, old)]) is None
    assert compare(log(0, old, new), log(1, call("reduce", 0, group=again))).group == again


def test_other_groups_are_told_apart() -> None:
    """By name and members; the difference that began first is the one that is told."""
    pair = GroupOfRanks(name="1", incarnation=1, ranks=(0, 1), size=2)
    later = call("all_reduce", 0, group=pair, start_ns=9), call("barrier", 0, group=pair, start_ns=9)
    assert find_difference([log(0, later[0]), log(2, call("barrier", 0))]) is None
    first = call("all_reduce", 0), call("barrier", 0)
    assert compare(log(0, later[0], first[0]), log(1, later[1], first[1])).group == WORLD
