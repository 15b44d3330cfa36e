# SPDX-License-Identifier: Apache-2.0
"""Pack the ranks of a group, and identify groups."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpilot.record.flight_ring.log import GroupEntry, pack_ranks, unpack_ranks


@given(st.lists(st.integers(0, 5000), unique=True))
def test_ranks_come_back_in_their_order(ranks: list[int]) -> None:
    """For any ranks of a group, in any order."""
    assert unpack_ranks(pack_ranks(ranks)) == tuple(ranks)


@pytest.mark.parametrize(
    ("ranks", "text"), [(range(4096), "0-4095"), ((0, 2, 3, 4, 8), "0,2-4,8"), ((3, 2, 1), "3,2,1"), ((), "")]
)
def test_ranks_are_written_as_runs(ranks: tuple[int, ...], text: str) -> None:
    """The usual group takes a few characters, however large it is."""
    assert pack_ranks(ranks) == text


@pytest.mark.parametrize(
    ("backend", "cpu", "cuda", "anywhere"),
    [
        ("cpu:gloo,cuda:gloo", True, True, True),
        ("cpu:gloo,cuda:nccl", True, False, False),
        ("cuda:nccl", False, False, False),
        ("gloo", True, True, True),
        ("", False, False, False),
    ],
)
def test_only_gloo_may_be_polled_at_any_time(backend: str, cpu: bool, cuda: bool, anywhere: bool) -> None:
    """By the device of the collective; if it is unknown, all backends of the group must be gloo."""
    group = GroupEntry(1, {"backend": backend})
    assert [group.may_be_polled(device) for device in ("cpu", "cuda", "")] == [cpu, cuda, anywhere]


def test_futures_of_nccl_say_nothing_of_failure() -> None:
    """They are complete from the start; those of gloo when the collective is over."""
    group = GroupEntry(1, {"backend": "cpu:gloo,cuda:nccl"})
    assert [group.reports_failure(device) for device in ("cpu", "cuda", "")] == [True, False, False]
