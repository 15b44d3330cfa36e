# SPDX-License-Identifier: Apache-2.0
"""Orders in which ranks all-reduce gradients, as a probe notes them."""

from __future__ import annotations

import base64
from array import array
from typing import Any

import pytest

from ddpilot.guard.rules.parameters.divergence import Divergence
from tests.unit.watch.rules.feeding import SITE, judge

KEY = ["29500/1", "world", 1]
NAMES = {"a": 1.0, "b": -2.0, "c": 0.0, "d": 0.0}


def noted(order: str, values: dict[str, float] = NAMES, key: list[Any] = KEY) -> dict[str, Any]:
    """What a rank notes that reduced the gradients of the parameters `order`; a dot is a tensor that is no gradient."""
    names = list(dict.fromkeys(order.replace(".", "")))
    sums = base64.b64encode(array("f", [values[name] for name in names]).tobytes()).decode()
    order_names = ["" if name == "." else name for name in order]
    return {"key": key, "names": names, "order": order_names, "f": sums, "line": SITE, "site": SITE}


def test_reduced_order_names_the_gradients_that_were_added_to_each_other() -> None:
    """Of all ranks, each compared with the first; once for what is the same."""
    (finding,) = judge(Divergence, [(0, "reduced", noted("abc")), (1, "reduced", noted("bac"))])
    assert (finding.code, finding.severity, finding.ranks) == ("DDP327", "error", (0, 1))
    assert finding.summary.endswith("than rank 0: the gradient of b is added to that of a")
    assert finding.evidence[:2] == (
        "all_reduce 1 before the first step: rank 0 a, rank 1 b",
        "all_reduce 2 before the first step: rank 0 b, rank 1 a",
    )
    assert finding.place is not None
    assert finding.place.line == SITE["line"]


@pytest.mark.parametrize(
    ("here", "there"),
    [
        (noted("abc"), noted("abc")),
        (noted("abcd"), noted("abdc")),  # the same values: which is which cannot be told
        (noted("ab"), noted("ba", {"a": -2.0, "b": 1.0})),  # the names are swapped, not the parameters
        (noted("ab."), noted("ba")),  # not the same calls
        (noted("a.b"), noted(".ab")),  # a gradient met something else: sizes, not names, say what that was
        (noted("ab"), noted("ac")),
        (noted("ab"), noted("ba", key=["29500/2", "world", 1])),  # of the next group
    ],
)
def test_reduced_order_says_nothing_where_it_is_not_certain(here: dict[str, Any], there: dict[str, Any]) -> None:
    """Whatever rank is heard of first."""
    for notes in ((here, there), (there, here)):
        assert judge(Divergence, [(rank, "reduced", note) for rank, note in enumerate(notes)]) == []
