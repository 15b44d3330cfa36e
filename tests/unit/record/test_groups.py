# SPDX-License-Identifier: Apache-2.0
"""Rank numbers of a group, short in the ring."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpilot.record.groups import pack_ranks, unpack_ranks


@given(st.lists(st.integers(0, 5000), unique=True))
def test_ranks_come_back_in_their_order(ranks: list[int]) -> None:
    """Whatever ranks a group has, in whatever order."""
    assert unpack_ranks(pack_ranks(ranks)) == tuple(ranks)


@pytest.mark.parametrize(
    ("ranks", "text"), [(range(4096), "0-4095"), ((0, 2, 3, 4, 8), "0,2-4,8"), ((3, 2, 1), "3,2,1"), ((), "")]
)
def test_ranks_are_written_as_runs(ranks: tuple[int, ...], text: str) -> None:
    """The usual group takes a few characters, however large it is."""
    assert pack_ranks(ranks) == text
