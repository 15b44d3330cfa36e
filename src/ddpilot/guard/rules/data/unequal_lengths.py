# SPDX-License-Identifier: Apache-2.0
"""DDP404: the ranks' loaders have different numbers of batches; reported before the epoch hangs at its end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ddpilot.findings.finding import Finding
from ddpilot.findings.text import render_ranks
from ddpilot.guard.notes import LoaderPassNote
from ddpilot.guard.rules.rule import (
    BoundedDict,
    ByRank,
    Pass,
    Rule,
    RuleContext,
    TrainingPasses,
    finding_at_line,
    pass_of,
    place_of,
)
from ddpilot.record.journal import Entry
from ddpilot.source.control_flow import may_start_over
from ddpilot.source.parsed_file import Sources

_MAX_LOADERS = 256


class UnequalBatches(Rule):
    """Compares the lengths of loaders that train a DDP model, when the shortest is within two batches of its end.

    Not reported for a loop that restarts its loader, as one with a fixed number of steps does: it does not end with the
    loader. Not reported if the program calls collectives of its own, since ranks may have agreed on when to stop, nor
    within DDP's `join`.
    """

    kinds = (*TrainingPasses.kinds, "near_end")

    def __init__(self, context: RuleContext) -> None:
        super().__init__(context)
        self._passes = TrainingPasses(context.world_size)
        self._ending: ByRank[Pass, None] = ByRank(64)
        self._began_with_ddp_only: BoundedDict[Pass, bool] = BoundedDict(64)
        self._judged: BoundedDict[int, None] = BoundedDict(_MAX_LOADERS)

    def feed(self, rank: int, entry: Entry, /) -> Iterable[Finding]:
        self._passes.add(rank, entry)
        if entry.kind == "ddp_model":
            return ()
        if entry.kind == "near_end":
            self._ending.put(pass_of(entry.values), rank, None)
        return self._compare(pass_of(entry.values))

    def _compare(self, key: Pass) -> Iterable[Finding]:
        if key[0] in self._judged:
            return
        passes, training = self._passes.complete(key), self._passes.training[key]
        members = tuple(passes)
        lengths = {rank: length for rank in members if (length := passes[rank]["length"]) is not None}
        if len(lengths) < len(members) or len(set(lengths.values())) < 2:
            return
        if len({note["model"] for note in training.values()}) > 1 or any(training[rank]["join"] for rank in members):
            return
        shortest = min(lengths.values())
        short = [rank for rank in members if lengths[rank] == shortest]
        if key not in self._began_with_ddp_only:
            self._began_with_ddp_only[key] = self._has_only_ddp(members[0], is_whole=True)
        if not self._began_with_ddp_only[key]:
            self._judged[key[0]] = None
        elif any(rank in self._ending[key] for rank in short):
            if self._has_only_ddp(members[0], is_whole=False) and not self._may_start_over(passes):
                yield self._finding(lengths, short, passes)
            else:
                self._judged[key[0]] = None

    def _has_only_ddp(self, rank: int, *, is_whole: bool) -> bool:
        """True if `rank` starts only DDP's collectives, barriers and point-to-point operations.

        `is_whole`: the ring must still hold all of its collectives.
        """
        log = self._context.log(rank)
        if log is None or (is_whole and log.num_begun > len(log.collectives) + log.num_torn):
            return False
        return all(one.ddp is not None or one.is_p2p or one.op == "barrier" for one in log.collectives)

    def _may_start_over(self, passes: Mapping[int, LoaderPassNote]) -> bool:
        """True if the loop has a fixed number of steps and restarts the loader, so that it does not end with it."""
        sources = Sources(self._context.sources())
        for place in {place for note in passes.values() if (place := place_of(note["site"]))}:
            source = sources.find(place)
            if source is not None and may_start_over(source, place.line):
                return True
        return False

    def _finding(self, lengths: Mapping[int, int], short: list[int], passes: Mapping[int, LoaderPassNote]) -> Finding:
        most = max(lengths.values())
        long = [rank for rank, length in lengths.items() if length == most]
        return finding_at_line(
            "DDP404",
            {rank: passes[rank] for rank in short},
            f"{render_ranks(short)} {'has' if len(short) == 1 else 'have'} {lengths[short[0]]} batches in this epoch, "
            f"{render_ranks(long)} {'has' if len(long) == 1 else 'have'} {most}",
            *(f"rank {rank}: {length} batches" for rank, length in list(lengths.items())[:8]),
        )
