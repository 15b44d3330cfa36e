# SPDX-License-Identifier: Apache-2.0
"""DDP407: ranks, or the workers of a loader, draw the same random numbers while they train."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ddpilot.findings.catalog import make_finding
from ddpilot.findings.finding import Finding, Severity
from ddpilot.findings.text import render_ranks
from ddpilot.guard.rules.rule import BoundedDict, ByRank, ModelRanks, PromptRule, RuleContext, place_of
from ddpilot.record.journal import Entry

MIN_STEPS = 3
"""Number of forwards, or fetched batches, at which all ranks must start from the same state and draw from it."""

MIN_WORDS = 8
"""Fewer numbers per batch may be a single choice, such as an image size that all ranks have to share."""

_MAX_MODELS = 256

_LIBRARIES = {"torch": "torch", "numpy": "numpy.random", "python": "random", "cuda": "torch.cuda"}


class SameRandomStreams(PromptRule):
    """Compares the states of generators before and after a DDP model's forward and a loader's fetch.

    The same state alone is not an error: ranks seed alike to create the same model. Drawing from it for different
    samples is.
    """

    codes: tuple[str, ...] = ("DDP407",)
    kinds: tuple[str, ...] = ("ddp_model", "random", "draws", "trains")

    def __init__(self, context: RuleContext) -> None:
        super().__init__(context)
        self._members = ModelRanks(context.world_size)
        self._forwards: ByRank[tuple[int, int], dict[str, Any]] = ByRank(128)
        self._alike: BoundedDict[int, int] = BoundedDict(_MAX_MODELS)
        self._between: BoundedDict[int, int] = BoundedDict(_MAX_MODELS)
        self._told_fetches = False
        self._fetches: ByRank[tuple[Any, ...], int] = ByRank(512)
        self._fetched: BoundedDict[tuple[int, int, str], int] = BoundedDict(256)
        self._training: ByRank[tuple[int, int], dict[str, Any]] = ByRank(64)
        self._judged: BoundedDict[tuple[Any, ...], None] = BoundedDict(2 * _MAX_MODELS)

    def feed(self, rank: int, entry: Entry) -> Iterable[Finding]:
        """See `Rule.feed`."""
        values = entry.values
        if entry.kind == "ddp_model":
            self._members.note(values)
        elif entry.kind == "trains":
            self._training.put((values["loader"], values["pass"]), rank, dict(values))
        elif entry.kind == "random":
            return self._compare_forwards(rank, values)
        else:
            return self._compare_fetches(rank, values)
        return ()

    def _compare_forwards(self, rank: int, values: Any) -> Iterable[Finding]:
        model, number = values["model"], values["forward"]
        members = self._members.of(model)
        if ("forward", model) in self._judged or rank not in members:
            return
        found = self._forwards.put((model, number), rank, dict(values))
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
            evidence = f"before {self._alike[model]} forwards, {number} the last, the state of {values['library']} was "
            yield _make_finding(
                "info",
                f"{render_ranks(members)} draw the same random numbers in the model, such as dropout's",
                members,
                values,
                (evidence + "the same on all of them, and each drew from it",),
            )

    def _compare_between(
        self, model: int, members: tuple[int, ...], found: Mapping[int, Mapping[str, Any]]
    ) -> Finding | None:
        """Check numbers drawn for a batch outside the model, such as added noise; a few numbers may be intended."""
        if self._told_fetches or any(one["library"] != "torch" for one in found.values()):
            return None
        drawn = min(one["drawn"] for one in found.values())
        self._between[model] = self._between.get(model, 0) + (drawn >= MIN_WORDS)
        if self._between[model] < MIN_STEPS:
            return None
        evidence = (
            f"before {self._between[model]} forwards, each of a new batch, the state of torch was the same on all "
            f"of them, and each had drawn {drawn} numbers or more since the forward before"
        )
        return _make_finding(
            "info",
            f"{render_ranks(members)} draw the same random numbers for their batches, outside of the model",
            members,
            next(iter(found.values())),
            (evidence,),
        )

    def _compare_fetches(self, rank: int, values: Any) -> Iterable[Finding]:
        loader, library, worker = values["loader"], values["library"], values["worker"]
        training = self._training.get((loader, values["pass"]))
        key = (loader, values["pass"], library, worker, values["fetch"])
        found = self._fetches.put(key, rank, values["before"])
        members = self._members.of(next((one["model"] for one in training.values()), -1))
        if (loader, library) in self._judged or len(members) < 2:
            return
        if worker >= 0 and (alike := self._compare_workers(rank, values)):
            yield alike
            return
        if any(member not in found for member in members):
            return
        if len({found[member] for member in members}) > 1:
            self._judged[loader, library] = None
            return
        count_key = (loader, values["pass"], library)
        self._fetched[count_key] = self._fetched.get(count_key, 0) + 1
        if self._fetched[count_key] >= MIN_STEPS:
            self._told_fetches = True
            where = "in the workers of the loader" if worker >= 0 else "while samples are read"
            evidence = f"before {self._fetched[count_key]} batches the state of {_LIBRARIES[library]} was the same on "
            summary = f"{render_ranks(members)} draw the same random numbers {where}"
            facts = (evidence + "all of them, and each drew from it",)
            yield _make_finding("warning", summary, members, values, facts)

    def _compare_workers(self, rank: int, values: Any) -> Finding | None:
        """Check the workers of one rank: their states differ unless the program seeds all of them alike."""
        loader, library = values["loader"], values["library"]
        if values["fetch"] > 1:
            return None
        before = {
            worker: self._fetches.get((loader, values["pass"], library, worker, 1)).get(rank) for worker in range(64)
        }
        same = [worker for worker, state in before.items() if state == values["before"]]
        if len(same) < 2:
            return None
        summary = f"workers {', '.join(map(str, same[:4]))} of a loader draw the same random numbers"
        evidence = f"their state of {_LIBRARIES[library]} was the same at their first batch, and each drew from it"
        return _make_finding("warning", summary, (rank,), values, (evidence,))


def _make_finding(
    severity: Severity, summary: str, ranks: Iterable[int], values: Mapping[str, Any], evidence: tuple[str, ...]
) -> Finding:
    return make_finding(
        "DDP407",
        severity=severity,
        summary=summary,
        ranks=tuple(ranks),
        line=place_of(values.get("site")),
        evidence=evidence,
        why="They were seeded alike, which is right for making the model, and not seeded again before training.",
        fix="After the model is made, seed with a number that depends on the rank: torch.manual_seed(seed + rank), and "
        "numpy and random where samples are augmented; in workers by worker_init_fn, from torch.initial_seed().",
    )
