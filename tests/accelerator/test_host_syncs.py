# SPDX-License-Identifier: Apache-2.0
"""How often the host waits for the device in 16 steps, beyond what the user's own program does."""

from __future__ import annotations

from typing import Any

import pytest

from tests.accelerator import why_not
from tests.accelerator.on_device import call
from tests.soak import often

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")

NOT_OBSERVED = {"watch": False, "guard": False}
NUM_ROUNDS = 4


def count(loop: str, options: dict[str, Any]) -> list[int]:
    """By 16 steps, the most waits of any rank; the first 16 steps begin with DDP's second backward and all checks."""
    by_rank = call("tests.accelerator.host_syncs:count_with", loop, NUM_ROUNDS, options, limit_s=200)
    return [max(sum(kinds.values()) for kinds in of_round) for of_round in zip(*by_rank, strict=True)]


@pytest.mark.timeout(250)
@often("watch and guard-plain_ddp")
@pytest.mark.parametrize("loop", ["plain_ddp"])
@pytest.mark.parametrize(
    ("options", "most_at_first", "most_later"),
    [
        pytest.param(NOT_OBSERVED, 2, 0, id="neither"),  # torch's reducer agrees on its buckets
        pytest.param({"watch": True, "guard": False}, 2, 0, id="watch"),
        pytest.param({"watch": True, "guard": True}, 2, 0, id="watch and guard"),
    ],
)
def test_the_host_waits_for_the_device_no_more_than_is_said(
    loop: str, options: dict[str, Any], most_at_first: int, most_later: int
) -> None:
    """None in a step of watch; at most one in 16 steps of guard, where the full checks are due as well."""
    first, *later = count(loop, options)
    assert first <= most_at_first
    assert max(later) <= most_later
