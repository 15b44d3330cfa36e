# SPDX-License-Identifier: Apache-2.0
"""Collectives of an accelerator are recorded: those that the backward engine's threads start, and many at once."""

from __future__ import annotations

import pytest

from tests.accelerator import why_not
from tests.accelerator.on_device import call
from tests.soak import often

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")


@pytest.mark.timeout(200)
@often("2")
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_all_collectives_of_a_ddp_step_are_recorded(num_ranks: int) -> None:
    """Each rank counts the same, buckets have their numbers and the user's line, and nothing went wrong."""
    ranks = call("tests.accelerator.recording:on_ranks", "ddp_steps", num_ranks, limit_s=190, num_devices=num_ranks)
    assert all(found == ranks[0] for found in ranks)
    assert ranks[0]["num_faults"] == 0
    entries = ranks[0]["entries"]
    assert [seq for seq, *_ in entries] == list(range(ranks[0]["num_begun"]))
    in_backward = [
        (what, index) for _, op, what, index, text in entries if text == "loss.backward()" and op == "all_reduce"
    ]
    assert {what for what, _ in in_backward} == {"bucket", "gradients"}  # of the second backward, while it is new
    assert in_backward[-4:] == [("bucket", 0), ("bucket", 1)] * 2
    assert entries[-1][1:4] == ["all_reduce", "", None]


@pytest.mark.timeout(200)
def test_what_is_in_flight_is_followed_although_it_is_large() -> None:
    """The oldest and the newest are seen pending, and all are over when the newest is."""
    meanwhile, afterwards = call("tests.accelerator.recording:on_ranks", "many_in_flight", 2, limit_s=190)[0]
    assert meanwhile == ["begun"] * 3 + ["unknown"] * 4 + ["begun"]
    assert afterwards == ["done"] * 8 + ["begun"]
