# SPDX-License-Identifier: Apache-2.0
"""Run all rules: feed them entries and collect their findings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

from ddpilot.findings.finding import Finding
from ddpilot.guard.rules.collectives import NotAwaited, NotMember, OnGraph
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
from ddpilot.guard.rules.rule import Rule, RuleContext, no_log
from ddpilot.guard.rules.saving import AllRanksSave
from ddpilot.record.flight_ring.log import RankLog
from ddpilot.record.journal import Entry

RULES: tuple[Callable[[RuleContext], Rule], ...] = (
    SameBatch,
    SetEpochForgotten,
    ShardsOverlap,
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
    NoSyncInVain,
    DataParallel,
    NeedlessFindUnused,
    GradientsMissing,
    AccumulationSynced,
    NotAwaited,
    NotMember,
)
"""Every rule."""

RULES_OF_ONE_RANK: tuple[Callable[[RuleContext], Rule], ...] = (
    WorkersReadAlike,
    SmallBatchNorm,
    OnGraph,
    SeveralDevices,
    NoSyncInVain,
    DataParallel,
    NeedlessFindUnused,
    GradientsMissing,
    AccumulationSynced,
    NotAwaited,
    NotMember,
)
"""Rules that examine each rank separately; used alone if the ranks of other nodes cannot be seen."""

RULES_OF_SEVERAL_RANKS = tuple(rule for rule in RULES if rule not in RULES_OF_ONE_RANK)
"""Rules that compare ranks."""


def rules_for(world_size: int, ranks: Iterable[int]) -> tuple[Callable[[RuleContext], Rule], ...]:
    """Return all rules if `ranks` are all ranks of the job, else those that do not compare ranks."""
    return RULES if len(set(ranks)) == world_size else RULES_OF_ONE_RANK


class RuleRunner:
    """All rules for a job of `world_size` ranks. Repeated findings are returned again; `Told` filters them.

    `log`: returns what a rank's ring holds; called only before a finding is reported. Without it, rules that need to
    know which collectives ran report nothing. `sources`: returns by name the user's sources that are not in a file.
    `rules`: replaces the default, all rules. `has_all_logs`: True if a rank without a `log` has no ring; False if it
    may be on a different machine.
    """

    def __init__(
        self,
        world_size: int,
        *,
        log: Callable[[int], RankLog | None] = no_log,
        sources: Callable[[], Mapping[str, str]] = dict,
        rules: Iterable[Callable[[RuleContext], Rule]] = RULES,
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
                        found += self._ask(rule, partial(rule.feed, rank, entry))
        for rule in tuple(self._rules):
            found += self._ask(rule, partial(rule.look, now_ns))
        return found

    def pause(self, now_ns: int, *, is_ok: bool) -> list[Finding]:
        """Return the findings that wait for notes of other ranks, at the end of a cell; see `Rule.pause`."""
        found: list[Finding] = []
        for rule in tuple(self._rules):
            found += self._ask(rule, partial(rule.pause, now_ns, is_ok=is_ok))
        return found

    def finish(self, now_ns: int) -> list[Finding]:
        """Return the last findings, after the ranks have ended and all their entries have been fed."""
        found: list[Finding] = []
        for rule in tuple(self._rules):
            found += self._ask(rule, partial(rule.finish, now_ns))
        return found

    def _ask(self, rule: Rule, question: Callable[[], Iterable[Finding]]) -> list[Finding]:
        try:
            return list(question())
        except Exception as error:  # noqa: BLE001 - an error in one rule must not hide the findings of the others
            self._rules.remove(rule)
            self.faults.append(f"rule {'/'.join(rule.codes)} is off: {type(error).__name__}: {error}")
            return []
