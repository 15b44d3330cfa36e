# SPDX-License-Identifier: Apache-2.0
"""Find ranks that diverge: parameters that differ at the same step, and why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ddpilot.findings.catalog import make_finding
from ddpilot.findings.finding import Finding
from ddpilot.guard.notes import DdpNote, LoaderPassNote, ParameterSetNote
from ddpilot.guard.rules.parameters.first_difference import Comparison
from ddpilot.guard.rules.parameters.steps import WAIT_NS
from ddpilot.guard.rules.rule import BoundedDict, ByRank, Pass, Rule, RuleContext, pass_of, place_of
from ddpilot.record.journal import Entry

MIN_TOGETHER = 1.1
"""Different parts overlap if their sizes add up to at least this multiple of the dataset's size.
Shards add up to the dataset's size plus a little padding.
"""


class OwnParts:
    """Examines which part of their dataset loaders take that are read outside of evaluation."""

    kinds = ("loader_pass", "batch")

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._passes: ByRank[Pass, LoaderPassNote] = ByRank(64)
        self._read: ByRank[Pass, bool] = ByRank(64)
        self.overlap = False
        """True if the parts of the newest pass that all ranks have begun differ and are too large to be shards."""

    def feed(self, rank: int, entry: Entry) -> None:
        """Add what `rank` noted."""
        key = pass_of(entry.values)
        if entry.kind == "loader_pass":
            self._passes.put(key, rank, entry.values)
        elif rank not in self._read[key] and len(self._read.put(key, rank, True)) == self._world_size:
            self.overlap = _overlap(self._passes[key])


def _overlap(passes: Mapping[int, LoaderPassNote]) -> bool:
    """True if different parts have more samples in total than their dataset, which shards never have."""
    if any(note["share"] is None or "replicas" in (note["sampler"] or {}) for note in passes.values()):
        return False
    shares = {note["part"]: note["share"] or [0, 0] for note in passes.values()}
    wholes = {whole for _, whole in shares.values()}
    sizes = {part: size for part, (size, _) in shares.items()}
    return len(wholes) == 1 and len(sizes) > 1 and sum(sizes.values()) >= MIN_TOGETHER * min(wholes)


_MAX_SETS = 256


class Divergence(Rule):
    """Compares, per DDP model and optimizer, the fingerprints that ranks took between the same two collectives."""

    kinds = ("ddp", "parameter_set", "step", "fingerprint", "last_step", "load", *OwnParts.kinds)

    def __init__(self, context: RuleContext) -> None:
        super().__init__(context)
        self._parts = OwnParts(context.world_size)
        self._comparisons: BoundedDict[tuple[Any, ...], Comparison] = BoundedDict(_MAX_SETS)
        self._key_of_set: BoundedDict[tuple[int, int], tuple[Any, ...]] = BoundedDict(_MAX_SETS * context.world_size)
        self._orders: BoundedDict[tuple[str, str], tuple[int, list[Any]]] = BoundedDict(_MAX_SETS)
        self._loads: ByRank[tuple[Any, ...], Entry] = ByRank(_MAX_SETS)
        self._mismatched: BoundedDict[tuple[str, str], None] = BoundedDict(_MAX_SETS)

    def feed(self, rank: int, entry: Entry, /) -> Iterable[Finding]:
        if entry.kind == "ddp":
            return self._compare_order(rank, entry.values)
        if entry.kind == "parameter_set":
            self._add_set(rank, entry.values)
        elif entry.kind in ("step", "fingerprint", "last_step"):
            return self._feed_step(rank, entry)
        elif entry.kind in OwnParts.kinds:
            self._parts.feed(rank, entry)
            if entry.kind == "loader_pass":
                for comparison in self._comparisons.values():
                    comparison.begin_pass(rank, pass_of(entry.values))
        elif entry.kind == "load":
            key = ("ddp", entry.values["group"], entry.values["ordinal"])
            self._loads.put(key, rank, entry)
            for comparison in self._comparisons.values():
                if comparison.key[:3] == key:
                    comparison.loads[rank] = entry
        return ()

    def _feed_step(self, rank: int, entry: Entry) -> Iterable[Finding]:
        comparison = self._comparisons.get(self._key_of_set.get((rank, entry.values["parameter_set"]), ()))
        if comparison is None:
            return ()
        if entry.kind == "last_step":
            return self._report(comparison, comparison.last(rank, entry))
        if entry.kind == "step":
            comparison.step(rank, entry)
        else:
            comparison.steps.arrived(rank, entry)
        return self._report(comparison, self._open(comparison).find(None))

    def _report(self, comparison: Comparison, finding: Finding | None) -> Iterable[Finding]:
        if finding is None:
            return ()
        comparison.end()
        return (finding,)

    def _compare_order(self, rank: int, note: DdpNote) -> Iterable[Finding]:
        key = (note["group"], note["ordinal"])
        first, names = self._orders.setdefault(key, (rank, note["names"]))
        if names == note["names"] or sorted(names) != sorted(note["names"]) or key in self._mismatched:
            return []
        self._mismatched[key] = None  # all other differences are consequences
        for comparison in self._comparisons.values():
            if comparison.key[1:3] == key:
                comparison.end()
        return [_make_order_finding(first, names, rank, note)]

    def look(self, now_ns: int, /) -> Iterable[Finding]:
        return self._find(now_ns)

    def pause(self, now_ns: int, /, *, is_ok: bool) -> Iterable[Finding]:  # noqa: ARG002 - as every rule
        """See `Rule.pause`. Unlike at the end of the job, later steps may still prove or disprove a divergence."""
        return self._find(now_ns + WAIT_NS)

    def finish(self, now_ns: int, /) -> Iterator[Finding]:
        yield from self._find(now_ns + 10**12)
        for comparison in self._comparisons.values():
            yield from self._report(comparison, self._open(comparison).finish())

    def _find(self, now_ns: int) -> Iterator[Finding]:
        for comparison in self._comparisons.values():
            yield from self._report(comparison, self._open(comparison).find(now_ns))

    def _open(self, comparison: Comparison) -> Comparison:
        """Return `comparison`, ended if no DDP model has its parameters and each rank trains on a fold of its own."""
        if comparison.is_free and self._parts.overlap:
            comparison.end()
        return comparison

    def _add_set(self, rank: int, note: ParameterSetNote) -> None:
        key = tuple(note["key"])
        if key[1:3] in self._mismatched:
            return
        if key not in self._comparisons:
            is_short_lived = key[0] == "free" and not note["dropped"] and self._is_copy(key, note["names"])
            self._comparisons[key] = Comparison(key, self._context, self._comparisons.values)
            self._comparisons[key].loads.update(self._loads[key[:3]])
            if is_short_lived:
                self._comparisons[key].end()
        comparison = self._comparisons[key]
        comparison.sets[rank] = note
        self._key_of_set[rank, note["parameter_set"]] = key

    def _is_copy(self, key: tuple[Any, ...], names: list[str]) -> bool:
        """True if these parameters belong to a temporary copy of a model. Ends earlier comparisons of the copy.

        Their optimizer is created repeatedly, or a DDP model has the same shapes.
        """
        again = [each for of_key, each in self._comparisons.items() if of_key[:-1] == key[:-1]]
        for each in again:
            each.end()
        shapes = [name.partition("[")[2] for name in names]
        return bool(again) or any(
            shapes == [str(shape).removeprefix("[") for _, shape, _ in described]
            for _, described in self._orders.values()
        )


def _make_order_finding(first: int, names: list[Any], second: int, note: DdpNote) -> Finding:
    """Build the finding for parameters wrapped in a different order on two ranks; `note`: as written by `second`."""
    at = next(at for at, (one, other) in enumerate(zip(names, note["names"], strict=True)) if one != other)
    return make_finding(
        "DDP327",
        summary=f"the order of the model's parameters on rank {second} differs from that on rank {first}",
        ranks=(first, second),
        line=place_of(note["site"]),
        evidence=tuple(
            f"parameter {at}: rank {rank} {each[at][0]} {each[at][1]}"
            for rank, each in ((first, names), (second, note["names"]))
        ),
    )
