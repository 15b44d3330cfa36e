# SPDX-License-Identifier: Apache-2.0
"""DDP327 without DDP: ranks all-reduce the gradients of one optimizer in different orders."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ddpilot.findings.catalog import make_finding
from ddpilot.findings.finding import Finding
from ddpilot.guard.rules.newest import Newest
from ddpilot.guard.rules.parameters.fingerprints import TOLERANCES, are_alike, unpack
from ddpilot.guard.rules.rule import place_of
from ddpilot.record.journal import Entry

_MAX_KEYS = 64
_MAX_LINES = 3


class ReducedOrder:
    """Compares which parameter's gradient each rank passed to its first, second, ... all_reduce before a step."""

    kinds = ("reduced",)

    def __init__(self) -> None:
        self._first: Newest[tuple[Any, ...], tuple[int, Mapping[str, Any]]] = Newest(_MAX_KEYS)

    def feed(self, rank: int, entry: Entry) -> Iterable[Finding]:
        """Return the finding if what `rank` noted contradicts the first rank that noted the same step."""
        first, values = self._first.setdefault(tuple(entry.values["key"]), (rank, entry.values))
        mixed_up = find_mixed_up(values, entry.values)
        return [_tell(first, values, rank, entry.values, mixed_up)] if mixed_up else []


def find_mixed_up(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[int]:
    """Return the positions in both orders at which gradients of different parameters met.

    Empty unless it is certain: both ranks reduced the same parameters, and each parameter began with the same values on
    both ranks. Two parameters with equal values are treated as one.
    """
    if one["order"] == other["order"] or sorted(one["order"]) != sorted(other["order"]):
        return []
    sums, others = (dict(zip(each["names"], unpack(each["f"]), strict=True)) for each in (one, other))
    tolerance = TOLERANCES["w"]
    if len(sums) != len(one["names"]) or not all(are_alike((sums[name], others[name]), tolerance) for name in sums):
        return []
    return [
        at
        for at, (here, there) in enumerate(zip(one["order"], other["order"], strict=True))
        if here and there and here != there and not are_alike((sums[here], sums[there]), tolerance)
    ]


def _tell(first: int, one: Mapping[str, Any], second: int, other: Mapping[str, Any], mixed_up: list[int]) -> Finding:
    at = mixed_up[0]
    return make_finding(
        "DDP327",
        summary=f"rank {second} all-reduces gradients in a different order than rank {first}: the gradient of "
        f"{other['order'][at]} is added to that of {one['order'][at]}",
        ranks=(first, second),
        line=place_of(other["line"]),
        evidence=(
            *(
                f"all_reduce {place + 1} before the first step: rank {first} {one['order'][place]}, "
                f"rank {second} {other['order'][place]}"
                for place in mixed_up[:_MAX_LINES]
            ),
            f"optimizer steps at {place_of(other['site'])}",
        ),
        why="all_reduce matches tensors by the order of the calls, not by a name: gradients of different parameters "
        "are averaged, and the weights of the ranks grow apart",
        fix="Reduce them in the same order on every rank: from a list, `model.parameters()` or sorted names, never "
        "from a set",
    )
