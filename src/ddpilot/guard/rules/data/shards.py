# SPDX-License-Identifier: Apache-2.0
"""DDP401 and DDP403: ranks train on the same batches, or their parts of an epoch overlap or miss samples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ddpilot.findings.catalog import make_finding
from ddpilot.findings.finding import Finding
from ddpilot.findings.text import render_ranks
from ddpilot.guard.rules.rule import (
    BoundedDict,
    ByRank,
    ModelRanks,
    PromptRule,
    RuleContext,
    WaitingRule,
    line_of,
    place_of,
)
from ddpilot.record.journal import Entry

MIN_DIFFERENT_BATCHES = 3
"""Minimum number of batches that are equal on the ranks and differ from each other; none may differ between ranks."""
MIN_MADE_BY_HAND = 6
"""The same in forwards if no loader gave equal batches, since synthetic inputs may be equal on purpose."""
MIN_ELEMENTS = 4
"""An input of fewer elements, such as a step number, is not a batch."""
_MAX_FORWARDS = 64
_MAX_MODELS = 256
_SAME = "The gradients of these ranks are the same, so that their mean is that of one rank: the others add nothing."
_NEARLY_SAME = "The gradients of these ranks differ by what they draw at random only: the others add next to nothing."


class SameBatch(PromptRule):
    """Compares fingerprints of the inputs of a DDP model in training, and of the batches of its loader.

    The model's inputs decide: a program may load the same data on every rank and select its part afterwards. A model
    that selects its part itself, as of a sequence, is recognized by outputs that differ although nothing random was
    drawn.
    """

    codes: tuple[str, ...] = ("DDP401",)
    kinds: tuple[str, ...] = ("ddp_model", "loader_pass", "batch", "input", "random")

    def __init__(self, context: RuleContext) -> None:
        super().__init__(context)
        self._members = ModelRanks(context.world_size)
        self._inputs: BoundedDict[int, ByRank[int, int]] = BoundedDict(_MAX_MODELS)
        self._outputs: ByRank[tuple[int, int], tuple[Any, bool]] = ByRank(256)
        self._numbers: BoundedDict[int, BoundedDict[int, None]] = BoundedDict(_MAX_MODELS)
        self._loaded: ByRank[tuple[int, int, int], int] = ByRank(1024)
        self._passes: ByRank[tuple[int, int], dict[str, Any]] = ByRank(64)
        self._judged: BoundedDict[int, None] = BoundedDict(_MAX_MODELS)

    def feed(self, rank: int, entry: Entry) -> Iterable[Finding]:
        """See `Rule.feed`."""
        values = entry.values
        if entry.kind == "ddp_model":
            self._members.note(values)
        elif entry.kind == "loader_pass":
            self._passes.put((values["loader"], values["pass"]), rank, dict(values))
        elif entry.kind == "batch":
            self._loaded.put((values["loader"], values["pass"], values["batch"]), rank, values["print"])
        elif entry.kind == "random":
            is_drawn = values["before"] != values["after"]
            self._outputs.put((values["model"], values["forward"]), rank, (values.get("output"), is_drawn))
        elif entry.kind == "input" and values["elements"] >= MIN_ELEMENTS:
            return self._compare(rank, values)
        return ()

    def _compare(self, rank: int, values: Any) -> Iterable[Finding]:
        model = values["model"]
        members = self._members.of(model)
        if model in self._judged or len(members) < 2 or rank not in members:
            return
        inputs = self._inputs.setdefault(model, ByRank(_MAX_FORWARDS))
        inputs.put(values["forward"], rank, values["print"])
        numbers = self._numbers.setdefault(model, BoundedDict(_MAX_FORWARDS))
        numbers[values["forward"]] = None
        complete = [n for n in numbers if len(inputs.get(n)) == len(members)]
        whole = [inputs.get(n) for n in complete]
        if len(whole) < MIN_DIFFERENT_BATCHES:
            return
        alike: dict[tuple[int, ...], list[int]] = {}
        for member in members:
            alike.setdefault(tuple(found[member] for found in whole), []).append(member)
        for prints, ranks in alike.items():
            if len(ranks) < 2 or len(set(prints)) < MIN_DIFFERENT_BATCHES:
                continue
            outputs = self._compare_outputs(model, complete, ranks)
            if outputs == "parts":
                self._judged[model] = None
                continue
            num_loaded = self._count_loaded(ranks, values)
            if num_loaded >= MIN_DIFFERENT_BATCHES or len(whole) >= MIN_MADE_BY_HAND:
                yield self._finding(ranks, values, len(whole), num_loaded, is_sure=outputs == "same")
        if not any(len(ranks) > 1 for ranks in alike.values()):
            # The inputs have differed once: later ones may coincide.
            self._judged[model] = None

    def _compare_outputs(self, model: int, forwards: list[int], ranks: list[int]) -> str:
        """Compare the outputs of the model on `ranks`: "same" as far as known, "random", or "parts" of the work."""
        found = [self._outputs.get((model, forward)) for forward in forwards]
        known = [[one[rank] for rank in ranks] for one in found if all(rank in one for rank in ranks)]
        known = [one for one in known if all(output is not None for output, _ in one)]
        if all(len({output for output, _ in one}) == 1 for one in known):
            return "same"
        return "random" if any(is_drawn for one in known for _, is_drawn in one) else "parts"

    def _count_loaded(self, ranks: list[int], values: Any) -> int:
        """Count the different batches that the loader gave alike to `ranks`; 0 if one differed or there were none."""
        if "loader" not in values:
            return 0
        key = (values["loader"], values["pass"])
        given = [self._loaded.get((*key, number)) for number in range(1, 9)]
        whole = [[found[rank] for rank in ranks] for found in given if all(rank in found for rank in ranks)]
        return len({one[0] for one in whole}) if all(len(set(one)) == 1 for one in whole) else 0

    def _finding(self, ranks: list[int], values: Any, num_forwards: int, num_loaded: int, *, is_sure: bool) -> Finding:
        is_loaded = num_loaded >= MIN_DIFFERENT_BATCHES
        mine = self._passes.get((values["loader"], values["pass"])).get(ranks[0], {}) if is_loaded else {}
        evidence = [f"the inputs of {num_forwards} forwards were the same on {render_ranks(ranks)}"]
        if is_loaded:
            whose = "a stream" if mine.get("samples") is None else f"{mine['samples']} samples"
            evidence.append(f"so were {num_loaded} batches of the loader of {whose}")
            evidence.append(describe_sampler(mine))
        return make_finding(
            "DDP401",
            severity="error" if is_loaded and is_sure else "warning",
            summary=f"{render_ranks(ranks)} train on the same batches",
            ranks=tuple(ranks),
            line=place_of(mine.get("site")) or place_of(values.get("site")),
            evidence=tuple(evidence),
            why=(_SAME if is_sure else _NEARLY_SAME)
            + ("" if (mine.get("sampler") or {}).get("replicas") else " Nothing divides the samples among the ranks."),
            fix=_fix(mine),
        )


def _fix(loader: Mapping[str, Any]) -> str:
    """Return the fix. `loader`: the notes on the loader that gave the batches; empty if none did."""
    sampler = loader.get("sampler") or {}
    if loader and not sampler:
        return (
            "Let the dataset's __iter__ pass over the other ranks' samples: itertools.islice(samples, rank, None, "
            "world_size); with workers, for rank * num_workers + worker of world_size * num_workers."
        )
    if sampler.get("replicas"):
        return f"Give {sampler['kind']} the number of ranks, dist.get_world_size(), and each one's dist.get_rank()."
    return (
        "Give the loader sampler=DistributedSampler(dataset) and leave shuffle out, or let each rank draw its own "
        "samples (a seed that depends on the rank)."
    )


def describe_sampler(values: Any) -> str:
    """Describe the order of a pass over a loader; for a dataset without indexed samples, that it streams them."""
    sampler = values.get("sampler")
    if not sampler:
        return f"its dataset ({values.get('dataset', 'unknown')}) streams its samples"
    facts = [f"{name}={sampler[name]}" for name in ("replicas", "rank", "seed", "epoch") if name in sampler]
    return f"its sampler is {sampler['kind']}({', '.join(facts)})"


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
        self._members = ModelRanks(context.world_size)
        self._passes: ByRank[tuple[int, int], dict[str, Any]] = ByRank(64)
        self._training: ByRank[tuple[int, int], int] = ByRank(64)
        self._pairs: ByRank[tuple[int, int], dict[int, int]] = ByRank(64)
        self._first: ByRank[tuple[int, int], int] = ByRank(64)
        self._told: BoundedDict[tuple[int, int], None] = BoundedDict(64)

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


MIN_REPEATED = 3
"""Minimum number of repeated batches, in at least two rounds of the workers with different contents."""
_MAX_WORKER_PASSES = 256


class WorkersReadAlike(WaitingRule):
    """Compares the fingerprints of batches that workers gave in turn. Each worker has its own copy of a stream."""

    codes: tuple[str, ...] = ("DDP403",)
    kinds: tuple[str, ...] = ("loader_pass", "batch")

    def __init__(self, context: RuleContext) -> None:
        super().__init__(context)
        self._passes: BoundedDict[tuple[int, int, int], tuple[dict[str, Any], dict[int, int]]] = BoundedDict(
            _MAX_WORKER_PASSES
        )

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
