# SPDX-License-Identifier: Apache-2.0
"""DDP407: ranks, or the workers of a loader, draw the same random numbers while they train."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ddpilot.findings.finding import Finding
from ddpilot.findings.text import render_ranks
from ddpilot.guard.notes import DrawsNote, RandomNote
from ddpilot.guard.rules.rule import (
    BoundedDict,
    ByRank,
    Rule,
    RuleContext,
    TrainingPasses,
    finding_at_line,
    pass_of,
)
from ddpilot.record.journal import Entry

MIN_STEPS = 3
"""Number of forwards, or fetched batches, at which all ranks must start from the same state and draw from it."""

MIN_WORDS = 8
"""Fewer numbers per batch may be a single choice, such as an image size that all ranks have to share."""

_MAX_MODELS = 256

_LIBRARIES = {"torch": "torch", "numpy": "numpy.random", "python": "random"}


class SameRandomStreams(Rule):
    """Compares the states of generators before and after a DDP model's forward and a loader's fetch.

    The same state alone is not an error: ranks seed alike to create the same model. Drawing from it for different
    samples is.
    """

    kinds = ("ddp_model", "random", "draws", "trains")

    def __init__(self, context: RuleContext) -> None:
        super().__init__(context)
        self._passes = TrainingPasses(context.world_size)
        self._forwards: ByRank[tuple[int, int], RandomNote] = ByRank(128)
        self._alike: BoundedDict[int, int] = BoundedDict(_MAX_MODELS)
        self._between: BoundedDict[int, int] = BoundedDict(_MAX_MODELS)
        self._has_reported_fetches = False
        self._fetches: ByRank[tuple[Any, ...], int] = ByRank(512)
        self._fetched: BoundedDict[tuple[int, int, str], int] = BoundedDict(256)
        self._judged: BoundedDict[tuple[Any, ...], None] = BoundedDict(2 * _MAX_MODELS)

    def feed(self, rank: int, entry: Entry, /) -> Iterable[Finding]:
        if entry.kind == "random":
            return self._compare_forwards(rank, entry.values)
        if entry.kind == "draws":
            return self._compare_fetches(rank, entry.values)
        self._passes.add(rank, entry)
        return ()

    def _compare_forwards(self, rank: int, note: RandomNote) -> Iterable[Finding]:
        model, number = note["model"], note["forward"]
        members = self._passes.ranks_of(model)
        if ("forward", model) in self._judged or rank not in members:
            return
        found = self._forwards.put((model, number), rank, note)
        if len(found) < len(members) or len(members) < 2:
            return
        if len({one["before"] for one in found.values()}) > 1:
            self._judged["forward", model] = None
            return
        if between := self._compare_between(model, members, found):
            yield between
            return
        self._alike[model] = self._alike.get(model, 0) + all(one["before"] != one["after"] for one in found.values())
        if self._alike[model] >= MIN_STEPS:
            evidence = f"before {self._alike[model]} forwards, {number} the last, the state of {note['library']} was "
            summary = f"{render_ranks(members)} draw the same random numbers in the model, such as dropout's"
            evidence += "the same on all of them, and each drew from it"
            yield finding_at_line("DDP407", dict.fromkeys(members, note), summary, evidence, severity="info")

    def _compare_between(self, model: int, members: Sequence[int], found: Mapping[int, RandomNote]) -> Finding | None:
        """Check numbers drawn for a batch outside the model, such as added noise; a few numbers may be intended."""
        if self._has_reported_fetches or any(one["library"] != "torch" for one in found.values()):
            return None
        drawn = min(one["drawn"] for one in found.values())
        self._between[model] = self._between.get(model, 0) + (drawn >= MIN_WORDS)
        if self._between[model] < MIN_STEPS:
            return None
        evidence = (
            f"before {self._between[model]} forwards, each of a new batch, the state of torch was the same on all "
            f"of them, and each had drawn at least {drawn} numbers since the previous forward"
        )
        summary = f"{render_ranks(members)} draw the same random numbers for their batches, outside of the model"
        note = next(iter(found.values()))
        return finding_at_line("DDP407", dict.fromkeys(members, note), summary, evidence, severity="info")

    def _compare_fetches(self, rank: int, note: DrawsNote) -> Iterable[Finding]:
        loader, library, worker = note["loader"], note["library"], note["worker"]
        key = (*pass_of(note), library, worker, note["fetch"])
        found = self._fetches.put(key, rank, note["before"])
        members = self._passes.members(pass_of(note))
        if (loader, library) in self._judged or len(members) < 2:
            return
        if worker >= 0 and (alike := self._compare_workers(rank, note)):
            yield alike
            return
        if any(member not in found for member in members):
            return
        if len({found[member] for member in members}) > 1:
            self._judged[loader, library] = None
            return
        count_key = (*pass_of(note), library)
        self._fetched[count_key] = self._fetched.get(count_key, 0) + 1
        if self._fetched[count_key] >= MIN_STEPS:
            self._has_reported_fetches = True
            where = "in the workers of the loader" if worker >= 0 else "while samples are read"
            evidence = f"before {self._fetched[count_key]} batches the state of {_LIBRARIES[library]} was the same on "
            evidence += "all of them, and each drew from it"
            summary = f"{render_ranks(members)} draw the same random numbers {where}"
            yield finding_at_line("DDP407", dict.fromkeys(members, note), summary, evidence, severity="warning")

    def _compare_workers(self, rank: int, note: DrawsNote) -> Finding | None:
        """Check the workers of one rank: their states differ unless the program seeds all of them alike."""
        if note["fetch"] > 1:
            return None
        loader, number = pass_of(note)
        first = {worker: self._fetches[loader, number, note["library"], worker, 1] for worker in range(64)}
        same = [worker for worker, found in first.items() if found.get(rank) == note["before"]]
        if len(same) < 2:
            return None
        summary = f"workers {', '.join(map(str, same[:4]))} of a loader draw the same random numbers"
        evidence = (
            f"their state of {_LIBRARIES[note['library']]} was the same at their first batch, and each drew from it"
        )
        return finding_at_line("DDP407", {rank: note}, summary, evidence, severity="warning")
