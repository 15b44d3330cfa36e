# SPDX-License-Identifier: Apache-2.0
"""DDP327: a program all-reduces gradients itself, in an order that differs between ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ddpilot.findings.catalog import make_finding
from ddpilot.findings.finding import Finding
from ddpilot.guard.notes import ReductionOrderNote
from ddpilot.guard.rules.parameters.fingerprint_comparison import TOLERANCES, are_alike, unpack
from ddpilot.guard.rules.rule import BoundedDict, Rule, RuleContext, place_of
from ddpilot.record.journal import Entry

_MAX_KEYS = 64
_MAX_LINES = 3


class ReductionOrder(Rule):
    """Compares which parameter's gradient each rank passed to its first, second, ... all_reduce before a step."""

    kinds = ("reduction_order",)

    def __init__(self, context: RuleContext) -> None:
        super().__init__(context)
        self._first: BoundedDict[tuple[Any, ...], tuple[int, ReductionOrderNote]] = BoundedDict(_MAX_KEYS)

    def feed(self, rank: int, entry: Entry, /) -> Iterable[Finding]:
        """Return the finding if what `rank` noted contradicts the first rank that noted the same step."""
        note: ReductionOrderNote = entry.values
        first, earlier = self._first.setdefault(tuple(note["key"]), (rank, note))
        mixed_up = find_mixed_up(earlier, note)
        return [_make_finding(first, earlier, rank, note, mixed_up)] if mixed_up else []


def find_mixed_up(one: ReductionOrderNote, other: ReductionOrderNote) -> list[int]:
    """Return the positions in both orders at which gradients of different parameters were added.

    Empty unless it is certain: both ranks reduced the same parameters, and each parameter began with the same values on
    both ranks. Two parameters with equal values are treated as one.
    """
    if one["order"] == other["order"] or sorted(one["order"]) != sorted(other["order"]):
        return []
    sums, others = (dict(zip(each["names"], unpack(each["sums"]), strict=True)) for each in (one, other))
    tolerance = TOLERANCES["w"]
    if len(sums) != len(one["names"]) or not all(are_alike((sums[name], others[name]), tolerance) for name in sums):
        return []
    return [
        at
        for at, (here, there) in enumerate(zip(one["order"], other["order"], strict=True))
        if here and there and here != there and not are_alike((sums[here], sums[there]), tolerance)
    ]


def _make_finding(
    first: int, one: ReductionOrderNote, second: int, other: ReductionOrderNote, mixed_up: list[int]
) -> Finding:
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
    )
