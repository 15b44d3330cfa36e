# SPDX-License-Identifier: Apache-2.0
"""DDP403 within a rank: the workers of a loader read the same stream, so that each batch comes several times."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ddpilot.findings.catalog import make_finding
from ddpilot.findings.finding import Finding
from ddpilot.guard.rules.newest import Newest
from ddpilot.guard.rules.rule import RuleContext, line_of, place_of
from ddpilot.guard.rules.waiting import WaitingRule
from ddpilot.record.journal import Entry

MIN_REPEATED = 3
"""Minimum number of repeated batches, in at least two rounds of the workers with different contents."""
_MAX_PASSES = 256


class WorkersReadAlike(WaitingRule):
    """Compares the fingerprints of batches that workers gave in turn. Each worker has its own copy of a stream."""

    codes: tuple[str, ...] = ("DDP403",)
    kinds: tuple[str, ...] = ("loader_pass", "batch")

    def __init__(self, context: RuleContext) -> None:
        super().__init__(context)
        self._passes: Newest[tuple[int, int, int], tuple[dict[str, Any], dict[int, int]]] = Newest(_MAX_PASSES)

    def feed(self, rank: int, entry: Entry) -> Iterable[Finding]:
        """See `Rule.feed`."""
        values = entry.values
        key = (rank, values["loader"], values["pass"])
        if entry.kind == "loader_pass":
            if values["workers"] > 1 and values["sampler"] is None:
                self._passes[key] = dict(values), {}
        elif (found := self._passes.get(key)) is not None and values["print"] is not None:
            facts, prints = found
            prints[values["batch"]] = values["print"]
            if _come_in_rounds(prints, facts["workers"]):
                del self._passes[key]
                self._waiting.put(line_of(facts.get("site")), rank, facts, entry.time_ns)
        return ()

    def _finding(self, by_rank: dict[int, Any]) -> Finding:
        facts = next(iter(by_rank.values()))
        return make_finding(
            "DDP403",
            summary=f"each batch comes {facts['workers']} times: the workers of the loader read the same stream",
            ranks=tuple(by_rank),
            line=place_of(facts.get("site")),
            evidence=(
                f"{facts['dataset']} is an IterableDataset, of which each of {facts['workers']} workers has a copy",
                "batches that they gave one after the other were the same, in round after round",
            ),
            why="A stream is not divided among workers by itself: each reads all of it.",
            fix="Let `__iter__` yield a part only, by torch.utils.data.get_worker_info() and the rank: as "
            "islice(stream, rank * num_workers + id, None, world_size * num_workers).",
        )


def _come_in_rounds(prints: dict[int, int], num_workers: int) -> bool:
    """True if the batches of each round, one of each worker, are equal, and rounds differ from each other."""
    rounds: dict[int, set[int]] = {}
    for batch, value in prints.items():
        rounds.setdefault((batch - 1) // num_workers, set()).add(value)
    if any(len(values) > 1 for values in rounds.values()) or len(set().union(*rounds.values())) < 2:
        return False
    return len(prints) - len(rounds) >= MIN_REPEATED
