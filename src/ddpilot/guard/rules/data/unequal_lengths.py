# SPDX-License-Identifier: Apache-2.0
"""DDP404: the ranks' loaders have different numbers of batches; reported before the epoch hangs at its end."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ddpilot.findings.catalog import make_finding
from ddpilot.findings.finding import Finding
from ddpilot.findings.text import render_ranks
from ddpilot.guard.rules.rule import BoundedDict, ByRank, ModelRanks, PromptRule, RuleContext, place_of
from ddpilot.record.journal import Entry
from ddpilot.source.control_flow import may_start_over
from ddpilot.source.parsed_file import Sources

_Key = tuple[int, int]
_MAX_LOADERS = 256


class UnequalBatches(PromptRule):
    """Compares the lengths of loaders that train a DDP model, when the shortest is within two batches of its end.

    Not reported for a loop that restarts its loader, as one with a fixed number of steps does: it does not end with the
    loader. Not reported if the program calls collectives of its own, since ranks may have agreed on when to stop, nor
    within DDP's `join`.
    """

    codes: tuple[str, ...] = ("DDP404",)
    kinds: tuple[str, ...] = ("ddp_model", "loader_pass", "trains", "near_end")

    def __init__(self, context: RuleContext) -> None:
        super().__init__(context)
        self._members = ModelRanks(context.world_size)
        self._passes: ByRank[_Key, dict[str, Any]] = ByRank(64)
        self._training: ByRank[_Key, dict[str, Any]] = ByRank(64)
        self._ending: ByRank[_Key, int] = ByRank(64)
        self._had_no_words: BoundedDict[_Key, bool] = BoundedDict(64)
        self._judged: BoundedDict[int, None] = BoundedDict(_MAX_LOADERS)

    def feed(self, rank: int, entry: Entry) -> Iterable[Finding]:
        """See `Rule.feed`."""
        values = entry.values
        if entry.kind == "ddp_model":
            self._members.note(values)
            return ()
        key = (values["loader"], values["pass"])
        if entry.kind == "loader_pass":
            self._passes.put(key, rank, dict(values))
        elif entry.kind == "trains":
            self._training.put(key, rank, dict(values))
        else:
            self._ending.put(key, rank, values["batch"])
        return self._compare(key)

    def _compare(self, key: _Key) -> Iterable[Finding]:
        if key[0] in self._judged:
            return
        training, passes = self._training.get(key), self._passes.get(key)
        members = self._members.of(next((found["model"] for found in training.values()), -1))
        if len(members) < 2 or any(rank not in training or rank not in passes for rank in members):
            return
        lengths = {rank: passes[rank].get("length") for rank in members}
        if len({found["model"] for found in training.values()}) > 1 or None in lengths.values():
            return
        if any(training[rank]["join"] for rank in members) or len(set(lengths.values())) == 1:
            return
        shortest = min(length for length in lengths.values() if length is not None)
        short = [rank for rank in members if lengths[rank] == shortest]
        if key not in self._had_no_words:
            self._had_no_words[key] = self._say_nothing_else(members, is_whole=True)
        if not self._had_no_words[key]:
            self._judged[key[0]] = None
        elif any(rank in self._ending.get(key) for rank in short):
            if self._say_nothing_else(members, is_whole=False) and not self._may_start_over(passes, members):
                yield self._finding(members, lengths, short, passes[short[0]])
            else:
                self._judged[key[0]] = None

    def _say_nothing_else(self, members: tuple[int, ...], *, is_whole: bool) -> bool:
        """True if the first of these ranks starts only DDP's collectives, barriers and point-to-point operations.

        `is_whole`: the ring must still hold all of its collectives.
        """
        log = self._context.log(members[0])
        if log is None or (is_whole and log.num_begun > len(log.collectives) + log.num_torn):
            return False
        return all(one.ddp is not None or one.is_p2p or one.op == "barrier" for one in log.collectives)

    def _may_start_over(self, passes: dict[int, dict[str, Any]], members: tuple[int, ...]) -> bool:
        """True if the loop has a fixed number of steps and restarts the loader, so that it does not end with it."""
        sources = Sources(self._context.sources())
        places = {place for rank in members if (place := place_of(passes[rank].get("site")))}
        for place in places:
            source = sources.find(place)
            if source is not None and may_start_over(source, place.line):
                return True
        return False

    def _finding(self, members: tuple[int, ...], lengths: Any, short: list[int], facts: Any) -> Finding:
        most = max(lengths.values())
        long = [rank for rank in members if lengths[rank] == most]
        seen = [f"rank {rank}: {lengths[rank]} batches" for rank in members[:8]]
        return make_finding(
            "DDP404",
            summary=f"{render_ranks(short)} {'has' if len(short) == 1 else 'have'} {lengths[short[0]]} batches in this "
            f"epoch, {render_ranks(long)} {'has' if len(long) == 1 else 'have'} {most}",
            ranks=tuple(short),
            line=place_of(facts.get("site")),
            evidence=tuple(seen),
            why="Each backward of DDP needs all ranks. Unless the loop is left before, those with more batches wait "
            "for those with fewer, for ever.",
            fix="Let a DistributedSampler divide the dataset, use drop_last=True, or put the loop in "
            "`with Join([model]):` (torch.distributed.algorithms.join).",
        )
