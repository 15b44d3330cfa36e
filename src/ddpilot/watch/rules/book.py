# SPDX-License-Identifier: Apache-2.0
"""All rules together: entries in, findings out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

from ddpilot.findings.finding import Finding
from ddpilot.record.journal import Entry
from ddpilot.record.log import RankLog
from ddpilot.watch.rules.collectives import NotAwaited, NotMember
from ddpilot.watch.rules.ddp_use import DataParallel, GradientsMissing, NeedlessFindUnused, NoSyncInVain
from ddpilot.watch.rules.divergence import Divergence
from ddpilot.watch.rules.evaluation import MeanOfMeans, PaddedEvaluation
from ddpilot.watch.rules.not_finite import NotFinite
from ddpilot.watch.rules.on_graph import OnGraph
from ddpilot.watch.rules.placement import OneDevice, SeveralDevices
from ddpilot.watch.rules.rule import Rule, RuleContext, no_log
from ddpilot.watch.rules.same_batch import SameBatch
from ddpilot.watch.rules.saving import AllRanksSave
from ddpilot.watch.rules.set_epoch import SetEpochForgotten
from ddpilot.watch.rules.shards import ShardsOverlap
from ddpilot.watch.rules.small_norm import SmallBatchNorm
from ddpilot.watch.rules.streams import SameRandomStreams
from ddpilot.watch.rules.synced import AccumulationSynced
from ddpilot.watch.rules.undivided import Undivided
from ddpilot.watch.rules.unequal import UnequalBatches
from ddpilot.watch.rules.workers import WorkersReadAlike

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
    Undivided,
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
    Undivided,
    DataParallel,
    NeedlessFindUnused,
    GradientsMissing,
    AccumulationSynced,
    NotAwaited,
    NotMember,
)
"""Those that look at each rank by itself: where ranks of other nodes are out of sight, a comparison would miss them."""

RULES_OF_SEVERAL_RANKS = tuple(rule for rule in RULES if rule not in RULES_OF_ONE_RANK)
"""Those that compare ranks."""


def rules_for(world_size: int, ranks: Iterable[int]) -> tuple[Callable[[RuleContext], Rule], ...]:
    """Every rule where all of the job's ranks are in sight, which are `ranks`; else those that compare none."""
    return RULES if len(set(ranks)) == world_size else RULES_OF_ONE_RANK


class RuleBook:
    """Every rule, for a job of `world_size` ranks. What is found again is returned again: `Told` knows what was told.

    `log`: what a rank's ring holds now, asked only before something is said; without it rules that need to know which
    collectives ran say nothing. `sources`: the user's texts that lie in no file, by name. `rules`: others than all.
    `has_all_logs`: whether what has no `log` has none at all, or it may be on another machine.
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
        """Errors of rules, in words: such a rule is off from then on."""

    def feed(self, by_rank: Mapping[int, Iterable[Entry]], now_ns: int) -> list[Finding]:
        """What is found after these entries of the ranks, each rank's in their order. `now_ns`: on CLOCK_MONOTONIC."""
        found: list[Finding] = []
        for rank, entries in by_rank.items():
            for entry in entries:
                for rule in tuple(self._rules):
                    if entry.kind in rule.kinds:
                        found += self._ask(rule, partial(rule.feed, rank, entry))
        for rule in tuple(self._rules):
            found += self._ask(rule, partial(rule.look, now_ns))
        return found

    def finish(self, now_ns: int) -> list[Finding]:
        """What can be said at the end, when the ranks have ended and all their entries have been fed."""
        found: list[Finding] = []
        for rule in tuple(self._rules):
            found += self._ask(rule, partial(rule.finish, now_ns))
        return found

    def _ask(self, rule: Rule, question: Callable[[], Iterable[Finding]]) -> list[Finding]:
        try:
            return list(question())
        except Exception as error:  # noqa: BLE001 - one rule's error is no reason to miss what others see
            self._rules.remove(rule)
            self.faults.append(f"rule {'/'.join(rule.codes)} is off: {type(error).__name__}: {error}")
            return []
