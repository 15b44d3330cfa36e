# SPDX-License-Identifier: Apache-2.0
"""What ranks returned, as a sequence."""

from __future__ import annotations

import os
from typing import Any

import pytest

from ddpilot.errors import LaunchError
from ddpilot.launching.shipping.memory_file import map_private
from ddpilot.launching.shipping.parcel import pack_parcel
from ddpilot.launching.shipping.rank_results import RankResults


class _Broken:
    """Pickles, and raises where it is read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("no number",)


def results_of(*values: Any) -> RankResults:
    """Results as the launcher makes them, with every descriptor closed afterwards."""
    parcels = [pack_parcel("test", value, [])[0] for value in values]
    try:
        return RankResults([map_private(fd) for fd in parcels], [])
    finally:
        for fd in parcels:
            os.close(fd)


def test_rank_results_is_a_sequence_by_rank() -> None:
    """Index, negative index, slice, length, iteration, membership and text are a list's."""
    results = results_of("a", "b", "c")
    assert (results[0], results[-1], results[1:], len(results)) == ("a", "c", ["b", "c"], 3)
    assert list(results) == ["a", "b", "c"]
    assert "b" in results
    assert repr(results) == "RankResults(['a', 'b', 'c'])"
    with pytest.raises(IndexError):
        results[3]


def test_rank_results_gives_the_same_object_each_time() -> None:
    """A value is unpickled once, so that changes of it stay."""
    results = results_of({"a": 1})
    results[0]["a"] = 2
    assert results[0] == {"a": 2}


def test_rank_results_holds_no_descriptor_even_before_it_is_read() -> None:
    """A notebook may keep the unread results of hundreds of launches."""
    before = sorted(os.listdir("/proc/self/fd"))
    results = results_of(*range(20))
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert list(results) == list(range(20))


def test_rank_results_names_the_rank_whose_value_cannot_be_read() -> None:
    """The others can still be read, and the original exception is chained."""
    results = results_of(1, _Broken())
    assert results[0] == 1
    with pytest.raises(LaunchError, match="reading what rank 1 returned: ValueError: invalid literal") as caught:
        results[1]
    assert isinstance(caught.value.__cause__, ValueError)
    assert caught.value.rank == 1
