# SPDX-License-Identifier: Apache-2.0
"""Find ranks that diverge: parameters that differ at the same moment of training, and why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from ddpilot.findings.finding import Finding
from ddpilot.guard.rules.newest import Newest
from ddpilot.guard.rules.parameters.causes import LOCAL, NEVER_WRAPPED
from ddpilot.guard.rules.parameters.comparison import WAIT_NS, Comparison
from ddpilot.guard.rules.parameters.own_parts import OwnParts
from ddpilot.guard.rules.parameters.reduced_order import ReducedOrder
from ddpilot.guard.rules.parameters.telling import tell_order
from ddpilot.guard.rules.rule import RuleContext
from ddpilot.record.journal import Entry

_MAX_UNITS = 256


class Divergence:
    """Compares, per DDP model and optimizer, the fingerprints that ranks took between the same two collectives."""

    codes = (
        *dict.fromkeys(cause.code for cause in LOCAL.values()),
        *("DDP320", NEVER_WRAPPED.code, "DDP325", "DDP326", "DDP327", "DDP331", "DDP332"),
    )
    kinds = ("ddp", "unit", "step", "print", "last", "load", *OwnParts.kinds, *ReducedOrder.kinds)

    def __init__(self, context: RuleContext) -> None:
        self._context = context
        self._parts = OwnParts(context.world_size)
        self._reduced_order = ReducedOrder()
        self._comparisons: dict[tuple[Any, ...], Comparison] = {}
        self._of_unit: dict[tuple[int, int], Comparison] = {}
        self._orders: Newest[tuple[str, str], tuple[int, list[Any]]] = Newest(_MAX_UNITS)
        self._loads: Newest[tuple[Any, ...], dict[int, Entry]] = Newest(_MAX_UNITS)
        self._told_order: Newest[tuple[str, str], None] = Newest(_MAX_UNITS)

    def feed(self, rank: int, entry: Entry) -> Iterable[Finding]:
        """See `Rule.feed`."""
        if entry.kind == "ddp":
            return self._compare_order(rank, entry.values)
        if entry.kind in ReducedOrder.kinds:
            return self._reduced_order.feed(rank, entry)
        if entry.kind == "unit":
            self._add_unit(rank, entry.values)
        elif entry.kind == "step" and (comparison := self._of_unit.get((rank, entry.values["u"]))):
            comparison.step(rank, entry)
            return self._open(comparison).judge(None)
        elif entry.kind == "print" and (comparison := self._of_unit.get((rank, entry.values["u"]))):
            comparison.arrived(rank, entry)
            return self._open(comparison).judge(None)
        elif entry.kind == "last" and (comparison := self._of_unit.get((rank, entry.values["u"]))):
            return comparison.last(rank, entry)
        elif entry.kind in OwnParts.kinds:
            self._parts.feed(rank, entry)
            if entry.kind == "loader_pass":
                for comparison in self._comparisons.values():
                    comparison.passes.begin(rank, entry.values["loader"], entry.values["pass"])
        elif entry.kind == "load":
            key = ("ddp", entry.values["group"], entry.values["ordinal"])
            self._loads.setdefault(key, {})[rank] = entry
            for comparison in self._comparisons.values():
                if comparison.key[:3] == key:
                    comparison.loaded(rank, entry)
        return ()

    def _compare_order(self, rank: int, values: dict[str, Any]) -> Iterable[Finding]:
        key = (values["group"], values["ordinal"])
        first, names = self._orders.setdefault(key, (rank, values["names"]))
        if names == values["names"] or sorted(names) != sorted(values["names"]) or key in self._told_order:
            return []
        self._told_order[key] = None  # all other differences are consequences
        for comparison in self._comparisons.values():
            if comparison.key[1:3] == key:
                comparison.end()
        return [tell_order(first, names, rank, values)]

    def look(self, now_ns: int) -> Iterable[Finding]:
        """See `Rule.look`."""
        return self._judge(now_ns)

    def pause(self, now_ns: int, *, is_ok: bool) -> Iterable[Finding]:  # noqa: ARG002 - as every rule
        """See `Rule.pause`. Unlike at the end of the job, later steps may still prove or disprove a divergence."""
        return self._judge(now_ns + WAIT_NS)

    def finish(self, now_ns: int) -> Iterator[Finding]:
        """See `Rule.finish`."""
        yield from self._judge(now_ns + 10**12)
        for comparison in self._comparisons.values():
            yield from self._open(comparison).finish()

    def _judge(self, now_ns: int) -> Iterator[Finding]:
        for comparison in self._comparisons.values():
            yield from self._open(comparison).judge(now_ns)

    def _open(self, comparison: Comparison) -> Comparison:
        """Return `comparison`, ended if no DDP model has its parameters and each rank trains on a fold of its own."""
        if comparison.is_free and self._parts.overlap:
            comparison.end()
        return comparison

    def _add_unit(self, rank: int, values: dict[str, Any]) -> None:
        key = tuple(values["key"])
        if key[1:3] in self._told_order:
            return
        if key not in self._comparisons:
            is_short_lived = key[0] == "free" and not values.get("dropped") and self._has_another(key, values["names"])
            if len(self._comparisons) >= _MAX_UNITS:
                oldest = self._comparisons.pop(next(iter(self._comparisons)))
                self._of_unit = {unit: each for unit, each in self._of_unit.items() if each is not oldest}
            self._comparisons[key] = Comparison(key, self._context, self._comparisons.values)
            for loader, entry in self._loads.get(key[:3], {}).items():
                self._comparisons[key].loaded(loader, entry)
            if is_short_lived:
                self._comparisons[key].end()
        comparison = self._comparisons[key]
        comparison.describe(rank, values)
        self._of_unit[rank, values["u"]] = comparison

    def _has_another(self, key: tuple[Any, ...], names: list[str]) -> bool:
        """True if these parameters belong to a temporary copy of a model.
        Their optimizer is created repeatedly, or a DDP model has the same shapes. Ends earlier comparisons of the copy.
        """
        again = [each for of_key, each in self._comparisons.items() if of_key[:-1] == key[:-1]]
        for each in again:
            each.end()
        shapes = [name.partition("[")[2] for name in names]
        return bool(again) or any(
            shapes == [str(shape).removeprefix("[") for _, shape, _ in described]
            for _, described in self._orders.values()
        )
