# SPDX-License-Identifier: Apache-2.0
"""Recognize collectives that average gradients without DDP."""

from __future__ import annotations

import base64
from array import array
from collections.abc import Sequence
from typing import Any

import pytest

from ddpilot.guard.rules.parameters.fingerprint_comparison import Difference
from ddpilot.guard.rules.parameters.manual_averaging import Averaged, find_averaging
from ddpilot.guard.rules.parameters.steps import MatchedStep
from ddpilot.record.flight_ring.log import CallSite, Collective, RankLog, Tensor
from ddpilot.record.journal import Entry

LINE = CallSite(file="train.py", line=7)
SIZES = (64, 8, 100, 1, 50)
GRADIENTS = (0.5, 0.5, 0.1, -1.0, 0.5)


def make_averaged() -> Averaged:
    """Five parameters, of which the last differs and the fourth has no gradient."""
    names = [f"p{place}" for place in range(5)]
    fingerprint = {"g": base64.b64encode(array("f", GRADIENTS).tobytes()).decode()}
    parameters: Any = {"names": names, "sizes": list(SIZES)}
    steps = {rank: Entry(1, 1, "step", {"fingerprint": fingerprint}) for rank in (0, 1)}
    moment = MatchedStep(steps, {0: parameters})
    moment.difference = Difference(gradients={"p4": ""}, parameters={"p4": ""})
    return Averaged(moment)


def make_log(*given: tuple[str, int, int]) -> RankLog:
    """Collectives by op, number of elements, and when they began."""
    collectives = tuple(
        Collective(
            index=number + 1,
            op=op,
            operator=op,
            group=None,
            seq=number,
            inputs=(Tensor(dtype="float32", shape=(size,), device="cpu"),),
            start_ns=start_ns,
            line=LINE,
        )
        for number, (op, size, start_ns) in enumerate(given)
    )
    about: dict[str, Any] = {"rank": 0, "pid": 1, "host": "", "torch": "", "started_ns": 0}
    counts: dict[str, Any] = {"started_unix_ns": 0, "heartbeat_ns": None, "closed_ns": None, "num_torn": 0}
    return RankLog(num_begun=len(given), num_faults=0, first_fault="", collectives=collectives, **about, **counts)


@pytest.mark.parametrize(
    ("given", "is_averaging"),
    [
        ([("all_reduce", 64, 5), ("all_reduce", 8, 5), ("all_reduce", 100, 6), ("all_reduce", 1, 7)], True),
        ([("all_reduce", 172, 5)], True),  # as one tensor
        ([("all_reduce", 72, 5), ("all_reduce", 100, 5)], True),  # as two
        ([("all_reduce", 172, 5), ("all_reduce", 40, 5)], False),  # something else too
        ([("all_reduce", 172, 5), ("send", 64, 5)], False),
        ([("all_reduce", 164, 5), ("all_reduce", 8, 5)], False),  # no run of them
        ([("all_reduce", 64, 5), ("all_reduce", 8, 5)], False),  # not all
        ([("all_reduce", 172, 4), ("all_reduce", 172, 9)], False),  # in other steps
        ([("all_reduce", 172, 5), ("all_gather", 4000, 9)], True),  # an evaluation, after it
        ([], False),
    ],
)
def test_averaging_is_told_by_the_sizes_of_what_one_step_exchanges(
    given: Sequence[tuple[str, int, int]], is_averaging: bool
) -> None:
    """All equal gradients, one by one or several as one tensor, and otherwise only metrics."""
    assert find_averaging(make_log(*given), 5, 9, [make_averaged()]) == (LINE if is_averaging else None)
