# SPDX-License-Identifier: Apache-2.0
"""Run all rules: feed them entries and collect their findings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

from ddpilot.findings.finding import Finding
from ddpilot.guard.rules.collectives import AllRanksSave, NotAwaited, NotMember, OnGraph
from ddpilot.guard.rules.data.evaluation import MeanOfMeans, PaddedEvaluation
from ddpilot.guard.rules.data.random_draws import SameRandomStreams
from ddpilot.guard.rules.data.set_epoch import SetEpochForgotten
from ddpilot.guard.rules.data.shards import SameBatch, ShardsOverlap, WorkersReadAlike
from ddpilot.guard.rules.data.unequal_lengths import UnequalBatches
from ddpilot.guard.rules.ddp_use import (
    AccumulationSynced,
    DataParallel,
    GradientsMissing,
    NeedlessFindUnused,
    NoSyncInVain,
)
from ddpilot.guard.rules.devices import OneDevice, SeveralDevices
from ddpilot.guard.rules.numerics import NotFinite, SmallBatchNorm
from ddpilot.guard.rules.parameters.divergence import Divergence
from ddpilot.guard.rules.parameters.reduction_order import ReductionOrder
from ddpilot.guard.rules.rule import Rule, RuleContext, no_log
from ddpilot.record.flight_ring.log import RankLog
from ddpilot.record.journal import Entry

RULES: tuple[type[Rule], ...] = (
    SameBatch,
    SetEpochForgotten,
    ShardsOverlap,
    WorkersReadAlike,
    UnequalBatches,
    PaddedEvaluation,
    MeanOfMeans,
    SameRandomStreams,
    SmallBatchNorm,
    NotFinite,
    OnGraph,
    OneDevice,
    SeveralDevices,
    AllRanksSave,
    Divergence,
    ReductionOrder,
    NoSyncInVain,
    DataParallel,
    NeedlessFindUnused,
    GradientsMissing,
    AccumulationSynced,
    NotAwaited,
    NotMember,
)
"""Every rule."""

RULES_OF_SEVERAL_RANKS = tuple(rule for rule in RULES if rule.compares_ranks)


def rules_for(world_size: int, ranks: Iterable[int]) -> tuple[type[Rule], ...]:
    """Return all rules if `ranks` are all ranks of the job, else those that do not compare ranks."""
    is_whole = len(set(ranks)) == world_size
    return tuple(rule for rule in RULES if is_whole or not rule.compares_ranks)


class RuleRunner:
    """All rules for a job of `world_size` ranks. Repeated findings are returned again; the caller removes them.

    For `log`, `sources` and `has_all_logs` see `RuleContext`: without `log`, rules that need to know which collectives
    ran report nothing. `rules`: replaces the default, all rules.
    """

    def __init__(
        self,
        world_size: int,
        *,
        log: Callable[[int], RankLog | None] = no_log,
        sources: Callable[[], Mapping[str, str]] = dict,
        rules: Iterable[type[Rule]] = RULES,
        has_all_logs: bool = True,
    ) -> None:
        context = RuleContext(world_size=world_size, log=log, has_all_logs=has_all_logs, sources=sources)
        self._rules = [make(context) for make in rules]
        self.faults: list[str] = []
        """Errors raised by rules, as text; such a rule is disabled afterwards."""

    def feed(self, by_rank: Mapping[int, Iterable[Entry]], now_ns: int) -> list[Finding]:
        """Return the findings after these entries, which are in order for each rank. `now_ns`: on CLOCK_MONOTONIC."""
        found: list[Finding] = []
        for rank, entries in by_rank.items():
            for entry in entries:
                for rule in tuple(self._rules):
                    if entry.kind in rule.kinds:
                        found += self._run(rule, partial(rule.feed, rank, entry))
        return found + self._run_all(lambda rule: rule.look(now_ns))

    def pause(self, now_ns: int, *, is_ok: bool) -> list[Finding]:
        """Return the findings that wait for notes of other ranks, at the end of a cell; see `Rule.pause`."""
        return self._run_all(lambda rule: rule.pause(now_ns, is_ok=is_ok))

    def finish(self, now_ns: int) -> list[Finding]:
        """Return the last findings, after the ranks have ended and all their entries have been fed."""
        return self._run_all(lambda rule: rule.finish(now_ns))

    def _run_all(self, examine: Callable[[Rule], Iterable[Finding]]) -> list[Finding]:
        return [finding for rule in tuple(self._rules) for finding in self._run(rule, partial(examine, rule))]

    def _run(self, rule: Rule, examine: Callable[[], Iterable[Finding]]) -> list[Finding]:
        try:
            return list(examine())
        except Exception as error:  # noqa: BLE001 - an error in one rule must not hide the findings of the others
            self._rules.remove(rule)
            self.faults.append(f"rule {type(rule).__name__} is off: {type(error).__name__}: {error}")
            return []
