# SPDX-License-Identifier: Apache-2.0
"""DDP403: the ranks' parts of an epoch overlap or miss samples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ddpilot.findings.catalog import make_finding
from ddpilot.findings.finding import Finding
from ddpilot.findings.text import render_ranks
from ddpilot.guard.rules.data.same_batches import describe_sampler
from ddpilot.guard.rules.data.workers import WorkersReadAlike
from ddpilot.guard.rules.gathering import Gathering, Members
from ddpilot.guard.rules.newest import Newest
from ddpilot.guard.rules.rule import RuleContext, place_of
from ddpilot.record.journal import Entry

MIN_SHARED = 8
"""Of the 64 samples compared, this many plus the number of ranks must be read by several ranks in one epoch.
Padding repeats fewer samples than there are ranks.
"""
MIN_DIFFERENT = 4
"""Minimum number of them with different contents: constant data does not identify a sample."""


class ShardsOverlap:
    """Compares the attributes of samplers that divide by rank, and 64 samples of any sampler.

    A sample is the same if its number and its content are: ranks may number datasets of their own. Ranks that load the
    same batches in the same order are left to `SameBatch`, since they may select their part of each batch afterwards.
    The workers of one rank are left to `WorkersReadAlike`.
    """

    codes: tuple[str, ...] = ("DDP403",)
    kinds: tuple[str, ...] = ("ddp_model", "loader_pass", "trains", "batch", "shard")

    def __init__(self, context: RuleContext) -> None:
        self._workers = WorkersReadAlike(context)
        self._world_size = context.world_size
        self._members = Members(context.world_size)
        self._passes: Gathering[tuple[int, int], dict[str, Any]] = Gathering(64)
        self._training: Gathering[tuple[int, int], int] = Gathering(64)
        self._pairs: Gathering[tuple[int, int], dict[int, int]] = Gathering(64)
        self._first: Gathering[tuple[int, int], int] = Gathering(64)
        self._told: Newest[tuple[int, int], None] = Newest(64)

    def feed(self, rank: int, entry: Entry) -> Iterable[Finding]:
        """See `Rule.feed`."""
        values = entry.values
        if entry.kind in self._workers.kinds:
            self._workers.feed(rank, entry)
        if entry.kind == "ddp_model":
            self._members.note(values)
        elif entry.kind == "loader_pass":
            self._passes.put((values["loader"], values["pass"]), rank, dict(values))
        elif entry.kind == "trains":
            key = (values["loader"], values["pass"])
            self._training.put(key, rank, values["model"])
            return self._compare_samplers(key, values["model"])
        elif entry.kind == "batch" and values["batch"] == 1:
            self._first.put((values["loader"], values["pass"]), rank, values["print"])
        elif entry.kind == "shard":
            key = (values["loader"], values["pass"])
            self._pairs.put(key, rank, dict(values["pairs"]))
            return self._compare_samples(key)
        return ()

    def look(self, now_ns: int) -> Iterable[Finding]:
        """See `Rule.look`; returns findings about workers."""
        return self._workers.look(now_ns)

    def pause(self, now_ns: int, *, is_ok: bool) -> Iterable[Finding]:
        """See `Rule.pause`; returns findings about workers."""
        return self._workers.pause(now_ns, is_ok=is_ok)

    def finish(self, now_ns: int) -> Iterable[Finding]:
        """See `Rule.finish`; returns findings about workers."""
        return self._workers.finish(now_ns)

    def _of_model(self, key: tuple[int, int], model: int) -> dict[int, dict[str, Any]]:
        """Return what all ranks of `model` noted about a pass that trained it; empty until it is complete."""
        members = self._members.of(model)
        training, passes = self._training.get(key), self._passes.get(key)
        if key in self._told or len(members) < 2:
            return {}
        if any(training.get(rank) != model or rank not in passes for rank in members):
            return {}
        return {rank: passes[rank] for rank in members}

    def _compare_samplers(self, key: tuple[int, int], model: int) -> Iterable[Finding]:
        passes = self._of_model(key, model)
        samplers = {rank: facts.get("sampler") or {} for rank, facts in passes.items()}
        if not samplers or any("replicas" not in sampler or "rank" not in sampler for sampler in samplers.values()):
            return
        if wrong := _find_wrong(samplers, passes, self._world_size):
            self._told[key] = None
            yield self._finding(passes, *wrong)

    def _compare_samples(self, key: tuple[int, int]) -> Iterable[Finding]:
        training = self._training.get(key)
        passes = self._of_model(key, next(iter(training.values()), -1))
        pairs = self._pairs.get(key)
        first = self._first.get(key)
        if not passes or any(rank not in pairs for rank in passes) or len(set(first.values())) < len(first):
            return
        needed = MIN_SHARED + len(passes)
        by_sample: dict[tuple[int, int], list[int]] = {}
        for rank in passes:
            for sample in pairs[rank].items():
                by_sample.setdefault(sample, []).append(rank)
        shared = {sample: ranks for sample, ranks in by_sample.items() if len(ranks) > 1}
        if len(shared) < min(needed, 48) or len({content for _, content in shared}) < MIN_DIFFERENT:
            return
        self._told[key] = None
        ranks = sorted({rank for found in shared.values() for rank in found})
        numbers = sorted(number for number, _ in shared)[:4]
        what = f"samples {', '.join(map(str, numbers))} and others were read by several of {render_ranks(ranks)}"
        yield self._finding(passes, ranks, f"{render_ranks(ranks)} read the same samples in one epoch", what)

    def _finding(self, passes: Mapping[int, Any], ranks: list[int], summary: str, evidence: str) -> Finding:
        first = passes[ranks[0]]
        lines = [f"rank {rank}: {describe_sampler(passes[rank])}" for rank in ranks[:4]]
        return make_finding(
            "DDP403",
            summary=summary,
            ranks=tuple(ranks),
            line=place_of(first.get("site")),
            evidence=(evidence, *lines),
            why="The parts of the ranks are no division of the dataset: in an epoch some samples come several times, "
            "or never.",
            fix="Use DistributedSampler(dataset) with its own num_replicas, rank and seed on every rank, and call "
            "set_epoch with the same number everywhere; cut subsets with a seed that all ranks share.",
        )


def _find_wrong(samplers: Mapping[int, Any], passes: Mapping[int, Any], world_size: int) -> Any:
    """Return (ranks, summary, evidence) of a fault of the samplers; None if they divide the dataset."""
    ranks = sorted(samplers)
    if len({facts["samples"] for facts in passes.values()}) > 1:
        return None  # each rank has a dataset of its own
    places: dict[int, list[int]] = {}
    for rank in ranks:
        places.setdefault(samplers[rank]["rank"], []).append(rank)
    twice = [found for found in places.values() if len(found) > 1]
    if twice:
        number = samplers[twice[0][0]]["rank"]
        seen = f"the samplers of {render_ranks(twice[0])} all take part {number}"
        return sorted(rank for found in twice for rank in found), f"{render_ranks(twice[0])} read the same part", seen
    replicas = {sampler["replicas"] for sampler in samplers.values()}
    if len(ranks) == world_size and replicas != {world_size}:
        number = min(replicas - {world_size})
        seen = f"num_replicas={number} with {world_size} ranks"
        return ranks, f"the samplers divide the dataset in {number} parts for {world_size} ranks", seen
    if len({facts.get("part") for facts in passes.values()}) > 1 and len(replicas) == 1:
        seen = "the subsets that they divide take other samples of the dataset, as random_split does with another seed"
        return ranks, f"{render_ranks(ranks)} divide different subsets of the dataset", seen
    for name in ("seed", "epoch"):
        found = {rank: samplers[rank].get(name) for rank in ranks}
        if len(set(found.values())) > 1 and any(sampler.get("shuffle") for sampler in samplers.values()):
            seen = "; ".join(f"rank {rank}: {name}={value}" for rank, value in list(found.items())[:8])
            return ranks, f"the ranks divide different orders of the dataset: {name} differs", seen
    return None
