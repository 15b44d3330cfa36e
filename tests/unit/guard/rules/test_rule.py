# SPDX-License-Identifier: Apache-2.0
"""What rules keep has an end."""

from __future__ import annotations

from ddpilot.guard.rules.rule import BoundedDict


def test_newest_drops_the_oldest_key_also_for_a_default() -> None:
    """The limit holds however a key comes in, and a key that is set again does not count twice."""
    kept: BoundedDict[str, list[int]] = BoundedDict(2)
    kept["first"] = [1]
    kept.setdefault("second", []).append(2)
    kept["second"] = [3]
    assert list(kept) == ["first", "second"]
    kept.setdefault("third", []).append(4)
    assert kept == {"second": [3], "third": [4]}
