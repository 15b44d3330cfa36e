# SPDX-License-Identifier: Apache-2.0
"""DDP401 and DDP403: ranks train on the same batches, or their parts of an epoch overlap or miss samples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from ddpilot.findings.catalog import make_finding
from ddpilot.findings.finding import Finding
from ddpilot.findings.text import render_ranks
from ddpilot.guard.notes import InputNote, LoaderPassNote
from ddpilot.guard.rules.rule import (
    BoundedDict,
    ByRank,
    Pass,
    Rule,
    RuleContext,
    TrainingPasses,
    WaitingRule,
    finding_at_line,
    line_of,
    pass_of,
    place_of,
)
from ddpilot.record.journal import Entry

MIN_DIFFERENT_BATCHES = 3
"""Minimum number of batches that are equal on the ranks and differ from each other; none may differ between ranks."""
MIN_SYNTHETIC = 6
"""The same in forwards if no loader gave equal batches, since synthetic inputs may be equal on purpose."""
MIN_ELEMENTS = 4
"""An input of fewer elements, such as a step number, is not a batch."""
_MAX_FORWARDS = 64
_MAX_MODELS = 256
_SAME = "The gradients of these ranks are equal, so that their mean equals the gradient of one rank alone."
_NEARLY_SAME = "The gradients of these ranks differ by random draws only: further ranks add next to nothing."


class SameBatch(Rule):
    """Compares fingerprints of the inputs of a DDP model in training, and of the batches of its loader.

    The model's inputs decide: a program may load the same data on every rank and select its part afterwards. A model
    that selects its part itself, as of a sequence, is recognized by outputs that differ although nothing random was
    drawn.
    """

    kinds = ("ddp_model", "loader_pass", "batch", "input", "random")

    def __init__(self, context: RuleContext) -> None:
        super().__init__(context)
        self._inputs: BoundedDict[int, ByRank[int, int]] = BoundedDict(_MAX_MODELS)
        self._outputs: ByRank[tuple[int, int], tuple[int | None, bool]] = ByRank(256)
        self._loaded: ByRank[tuple[int, int, int], int | None] = ByRank(1024)
        self._passes = TrainingPasses(context.world_size)
        self._judged: BoundedDict[int, None] = BoundedDict(_MAX_MODELS)

    def feed(self, rank: int, entry: Entry, /) -> Iterable[Finding]:
        values = entry.values
        self._passes.add(rank, entry)
        if entry.kind == "batch":
            self._loaded.put((*pass_of(values), values["batch"]), rank, values["checksum"])
        elif entry.kind == "random":
            is_drawn = values["before"] != values["after"]
            self._outputs.put((values["model"], values["forward"]), rank, (values["output"], is_drawn))
        elif entry.kind == "input" and values["elements"] >= MIN_ELEMENTS:
            return self._compare(rank, values)
        return ()

    def _compare(self, rank: int, note: InputNote) -> Iterable[Finding]:
        model = note["model"]
        members = self._passes.ranks_of(model)
        if model in self._judged or len(members) < 2 or rank not in members:
            return
        inputs = self._inputs.setdefault(model, ByRank(_MAX_FORWARDS))
        inputs.put(note["forward"], rank, note["checksum"])
        complete = [number for number, found in inputs.items() if len(found) == len(members)]
        whole = [inputs[number] for number in complete]
        if len(whole) < MIN_DIFFERENT_BATCHES:
            return
        alike: dict[tuple[int, ...], list[int]] = {}
        for member in members:
            alike.setdefault(tuple(found[member] for found in whole), []).append(member)
        for checksums, ranks in alike.items():
            if len(ranks) < 2 or len(set(checksums)) < MIN_DIFFERENT_BATCHES:
                continue
            outputs = self._compare_outputs(model, complete, ranks)
            if outputs == "parts":
                self._judged[model] = None
                continue
            num_loaded = self._count_loaded(ranks, note)
            if num_loaded >= MIN_DIFFERENT_BATCHES or len(whole) >= MIN_SYNTHETIC:
                yield self._finding(ranks, note, len(whole), num_loaded, is_sure=outputs == "same")
        if not any(len(ranks) > 1 for ranks in alike.values()):
            # The inputs have differed once: later ones may coincide.
            self._judged[model] = None

    def _compare_outputs(self, model: int, forwards: list[int], ranks: list[int]) -> Literal["same", "random", "parts"]:
        """Compare the outputs of the model on `ranks`: "same" as far as known, "random", or "parts" of the work."""
        found = [self._outputs[model, forward] for forward in forwards]
        known = [[one[rank] for rank in ranks] for one in found if all(rank in one for rank in ranks)]
        known = [one for one in known if all(output is not None for output, _ in one)]
        if all(len({output for output, _ in one}) == 1 for one in known):
            return "same"
        return "random" if any(is_drawn for one in known for _, is_drawn in one) else "parts"

    def _count_loaded(self, ranks: list[int], note: InputNote) -> int:
        """Count the different batches that the loader gave alike to `ranks`; 0 if one differed or there were none."""
        if "loader" not in note:
            return 0
        given = [self._loaded[note["loader"], note["pass"], number] for number in range(1, 9)]
        whole = [[found[rank] for rank in ranks] for found in given if all(rank in found for rank in ranks)]
        return len({one[0] for one in whole}) if all(len(set(one)) == 1 for one in whole) else 0

    def _finding(
        self, ranks: list[int], note: InputNote, num_forwards: int, num_loaded: int, *, is_sure: bool
    ) -> Finding:
        is_loaded = num_loaded >= MIN_DIFFERENT_BATCHES
        loader = self._passes.passes[note["loader"], note["pass"]].get(ranks[0]) if is_loaded else None
        evidence = [f"the inputs of {num_forwards} forwards were the same on {render_ranks(ranks)}"]
        if loader is not None:
            samples = "a stream" if loader["samples"] is None else f"{loader['samples']} samples"
            evidence.append(f"so were {num_loaded} batches of the loader of {samples}")
            evidence.append(describe_sampler(loader))
        is_divided = loader is not None and (loader["sampler"] or {}).get("replicas")
        return make_finding(
            "DDP401",
            severity="error" if is_loaded and is_sure else "warning",
            summary=f"{render_ranks(ranks)} train on the same batches",
            ranks=tuple(ranks),
            line=place_of((loader or note)["site"]) or place_of(note["site"]),
            evidence=tuple(evidence),
            why=(_SAME if is_sure else _NEARLY_SAME)
            + ("" if is_divided else " Nothing divides the samples among the ranks."),
            fix=_fix(loader),
        )


def _fix(loader: LoaderPassNote | None) -> str:
    """Return the fix. `loader`: the loader that gave the batches; None if none did."""
    sampler = (loader["sampler"] if loader is not None else None) or {}
    if loader is not None and not sampler:
        return (
            "Let the dataset's __iter__ skip the other ranks' samples: itertools.islice(samples, rank, None, "
            "world_size); with workers, for rank * num_workers + worker of world_size * num_workers."
        )
    if sampler.get("replicas"):
        return f"Give {sampler['kind']} the number of ranks, dist.get_world_size(), and each one's dist.get_rank()."
    return (
        "Give the loader sampler=DistributedSampler(dataset) and leave shuffle out, or let each rank draw its own "
        "samples (a seed that depends on the rank)."
    )


def describe_sampler(note: LoaderPassNote) -> str:
    """Describe the order of a pass over a loader; for a dataset without indexed samples, that it streams them."""
    sampler = note["sampler"]
    if not sampler:
        return f"its dataset ({note['dataset']}) streams its samples"
    facts = [f"{name}={sampler[name]}" for name in ("replicas", "rank", "seed", "epoch") if name in sampler]
    return f"its sampler is {sampler['kind']}({', '.join(facts)})"


MIN_SHARED = 8
"""Of the 64 samples compared, this many plus the number of ranks must be read by several ranks in one epoch.
Padding repeats fewer samples than there are ranks.
"""
MIN_DIFFERENT = 4
"""Minimum number of them with different contents: constant data does not identify a sample."""


class ShardsOverlap(Rule):
    """Compares the attributes of samplers that divide by rank, and 64 samples of any sampler.

    A sample is the same if its number and its content are: ranks may number datasets of their own. Ranks that load the
    same batches in the same order are left to `SameBatch`, since they may select their part of each batch afterwards.
    """

    kinds = (*TrainingPasses.kinds, "batch", "shard")

    def __init__(self, context: RuleContext) -> None:
        super().__init__(context)
        self._passes = TrainingPasses(context.world_size)
        self._pairs: ByRank[Pass, dict[int, int]] = ByRank(64)
        self._first: ByRank[Pass, int | None] = ByRank(64)
        self._judged: BoundedDict[Pass, None] = BoundedDict(64)

    def feed(self, rank: int, entry: Entry, /) -> Iterable[Finding]:
        values = entry.values
        self._passes.add(rank, entry)
        if entry.kind == "trains":
            return self._compare_samplers(pass_of(values))
        if entry.kind == "batch" and values["batch"] == 1:
            self._first.put(pass_of(values), rank, values["checksum"])
        elif entry.kind == "shard":
            self._pairs.put(pass_of(values), rank, dict(values["pairs"]))
            return self._compare_samples(pass_of(values))
        return ()

    def _complete(self, key: Pass) -> Mapping[int, LoaderPassNote]:
        return {} if key in self._judged else self._passes.complete(key)

    def _compare_samplers(self, key: Pass) -> Iterable[Finding]:
        passes = self._complete(key)
        samplers = {rank: note["sampler"] or {} for rank, note in passes.items()}
        if not samplers or any("replicas" not in sampler or "rank" not in sampler for sampler in samplers.values()):
            return
        if wrong := _find_wrong(samplers, passes, self._context.world_size):
            self._judged[key] = None
            yield self._finding(passes, *wrong)

    def _compare_samples(self, key: Pass) -> Iterable[Finding]:
        passes, pairs, first = self._complete(key), self._pairs[key], self._first[key]
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
        self._judged[key] = None
        ranks = sorted({rank for found in shared.values() for rank in found})
        numbers = sorted(number for number, _ in shared)[:4]
        what = f"samples {', '.join(map(str, numbers))} and others were read by several of {render_ranks(ranks)}"
        yield self._finding(passes, ranks, f"{render_ranks(ranks)} read the same samples in one epoch", what)

    def _finding(self, passes: Mapping[int, LoaderPassNote], ranks: list[int], summary: str, evidence: str) -> Finding:
        lines = [f"rank {rank}: {describe_sampler(passes[rank])}" for rank in ranks[:4]]
        return finding_at_line("DDP403", {rank: passes[rank] for rank in ranks}, summary, evidence, *lines)


def _find_wrong(
    samplers: Mapping[int, Mapping[str, Any]], passes: Mapping[int, LoaderPassNote], world_size: int
) -> tuple[list[int], str, str] | None:
    """Return (ranks, summary, evidence) of a fault of the samplers; None if they divide the dataset."""
    ranks = sorted(samplers)
    if len({note["samples"] for note in passes.values()}) > 1:
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
        return ranks, f"the samplers divide the dataset into {number} parts for {world_size} ranks", seen
    if len({note["part"] for note in passes.values()}) > 1 and len(replicas) == 1:
        seen = "they divide subsets of different samples, as random_split returns with a different seed on each rank"
        return ranks, f"{render_ranks(ranks)} divide different subsets of the dataset", seen
    for name in ("seed", "epoch"):
        found = {rank: samplers[rank].get(name) for rank in ranks}
        if len(set(found.values())) > 1 and any(sampler.get("shuffle") for sampler in samplers.values()):
            seen = "; ".join(f"rank {rank}: {name}={value}" for rank, value in list(found.items())[:8])
            return ranks, f"the ranks divide different orders of the dataset: {name} differs", seen
    return None


MIN_REPEATED = 3
"""Minimum number of repeated batches, in at least two turns of the workers with different contents."""
_MAX_WORKER_PASSES = 256


class WorkersReadAlike(WaitingRule[LoaderPassNote]):
    """Compares the fingerprints of batches that workers gave in turn. Each worker has its own copy of a stream."""

    kinds = ("loader_pass", "batch")
    compares_ranks = False

    def __init__(self, context: RuleContext) -> None:
        super().__init__(context)
        self._passes: BoundedDict[tuple[int, Pass], tuple[LoaderPassNote, dict[int, int]]] = BoundedDict(
            _MAX_WORKER_PASSES
        )

    def feed(self, rank: int, entry: Entry, /) -> Iterable[Finding]:
        values = entry.values
        key = (rank, pass_of(values))
        if entry.kind == "loader_pass":
            if values["workers"] > 1 and values["sampler"] is None:
                self._passes[key] = values, {}
        elif (found := self._passes.get(key)) is not None and values["checksum"] is not None:
            note, checksums = found
            checksums[values["batch"]] = values["checksum"]
            if _repeat_per_worker(checksums, note["workers"]):
                del self._passes[key]
                self._wait(line_of(note["site"]), rank, note, entry.time_ns)
        return ()

    def _finding(self, by_rank: dict[int, LoaderPassNote]) -> Finding:
        note = next(iter(by_rank.values()))
        return finding_at_line(
            "DDP403",
            by_rank,
            f"each batch is read {note['workers']} times: the workers of the loader read the same stream",
            f"{note['dataset']} is an IterableDataset, of which each of {note['workers']} workers has a copy",
            "the workers returned the same batch one after the other, several times",
            why="A DataLoader does not divide a stream among its workers: each reads all of it.",
            fix="Let `__iter__` yield a part only, by torch.utils.data.get_worker_info() and the rank: as "
            "islice(stream, rank * num_workers + id, None, world_size * num_workers).",
        )


def _repeat_per_worker(checksums: Mapping[int, int], num_workers: int) -> bool:
    """True if the batches of each turn, one of each worker, are equal, and turns differ from each other."""
    turns: dict[int, set[int]] = {}
    for batch, value in checksums.items():
        turns.setdefault((batch - 1) // num_workers, set()).add(value)
    if any(len(values) > 1 for values in turns.values()) or len(set().union(*turns.values())) < 2:
        return False
    return len(checksums) - len(turns) >= MIN_REPEATED
