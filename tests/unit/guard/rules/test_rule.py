# SPDX-License-Identifier: Apache-2.0
"""Bounded state of rules, and helpers that read notes."""

from __future__ import annotations

import pytest

from ddpilot.guard.rules.rule import BoundedDict, num_ranks_of


def test_newest_drops_the_oldest_key_also_for_a_default() -> None:
    """The limit holds however a key comes in, and a key that is set again does not count twice."""
    kept: BoundedDict[str, list[int]] = BoundedDict(2)
    kept["first"] = [1]
    kept.setdefault("second", []).append(2)
    kept["second"] = [3]
    assert list(kept) == ["first", "second"]
    kept.setdefault("third", []).append(4)
    assert kept == {"second": [3], "third": [4]}


@pytest.mark.parametrize(("group", "num"), [("world", 8), ("0,2,5", 3), ("300 ranks 1badcafe", 300)])
def test_number_of_ranks_is_read_from_the_name_of_a_group(group: str, num: int) -> None:
    """Also if the name of a large group does not list its ranks."""
    assert num_ranks_of(group, world_size=8) == num
