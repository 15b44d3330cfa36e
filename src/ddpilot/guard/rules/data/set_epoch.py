# SPDX-License-Identifier: Apache-2.0
"""DDP402: set_epoch is never called on a sampler that shuffles by epoch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ddpilot.findings.finding import Finding
from ddpilot.guard.notes import LoaderPassNote
from ddpilot.guard.rules.rule import BoundedDict, RuleContext, WaitingRule, finding_at_line, line_of
from ddpilot.record.journal import Entry

_Pass = tuple[int, int, int]  # rank, loader, number of the pass
_MAX_PASSES = 4096
_MIN_BATCHES = 8
_EQUAL = ("replicas", "rank", "seed", "epoch")
"""Attributes of a sampler that decide the order."""


@dataclass
class _Seen:
    note: LoaderPassNote
    order: int | None = None
    is_sorted: bool = True
    num_batches: int = 0
    model: int | None = None
    is_fresh: bool = False
    """True if weights were loaded before the pass, or its optimizer is new: it begins a new training."""


class SetEpochForgotten(WaitingRule[LoaderPassNote]):
    """Reports two consecutive passes that trained the same model in the same order, with the sampler at the same epoch.

    A search over learning rates, or a series of folds, begins at the first epoch again: not reported if the program
    loads weights between the passes or continues with a new optimizer.
    """

    kinds = ("loader_pass", "order", "batch", "trains", "pass_end", "load", "parameter_set")

    def __init__(self, context: RuleContext) -> None:
        super().__init__(context)
        self._passes: BoundedDict[_Pass, _Seen] = BoundedDict(_MAX_PASSES)
        self._newest: dict[int, _Seen] = {}
        self._has_loaded: set[int] = set()
        self._last: BoundedDict[tuple[int, int], _Pass] = BoundedDict(_MAX_PASSES)

    def feed(self, rank: int, entry: Entry, /) -> Iterable[Finding]:
        values = entry.values
        if entry.kind == "loader_pass" and (values["sampler"] or {}).get("shuffle"):
            self._newest[rank] = seen = _Seen(values, is_fresh=rank in self._has_loaded)
            self._passes[rank, values["loader"], values["pass"]] = seen
            self._has_loaded.discard(rank)
        elif entry.kind == "load":
            self._has_loaded.add(rank)
        elif entry.kind == "parameter_set":
            if rank in self._newest:
                self._newest[rank].is_fresh = True
        elif entry.kind != "loader_pass":
            self._follow(rank, entry)
        return ()

    def _follow(self, rank: int, entry: Entry) -> None:
        values = entry.values
        key = (rank, values["loader"], values["pass"])
        seen = self._passes.get(key)
        if seen is None:
            return
        if entry.kind == "order":
            seen.order, seen.is_sorted = values["order"], values["sorted"]
        elif entry.kind == "batch":
            seen.num_batches = max(seen.num_batches, values["batch"])
        elif entry.kind == "trains":
            seen.model = values["model"]
        # By then a step was taken, also with gradient accumulation, so that a new optimizer is known.
        is_known = entry.kind == "pass_end" or seen.num_batches >= _MIN_BATCHES
        if is_known and seen.model is not None and seen.order is not None:
            self._judge(rank, seen.model, key, entry.time_ns)

    def _judge(self, rank: int, model: int, key: _Pass, now_ns: int) -> None:
        last, seen = self._passes.get(self._last.get((rank, model), (-1, -1, -1))), self._passes[key]
        if self._last.get((rank, model)) == key:
            return
        self._last[rank, model] = key
        # A pass that only read a first batch is not an epoch.
        if last is None or last.num_batches < 2 or seen.is_sorted or seen.is_fresh:
            return
        note, before = seen.note, last.note
        if seen.order != last.order or (note["part"], note["samples"]) != (before["part"], before["samples"]):
            return
        sampler, earlier = note["sampler"] or {}, before["sampler"] or {}
        if sampler.get("has_set_epoch") and all(sampler.get(name) == earlier.get(name) for name in _EQUAL):
            self._wait(line_of(note["site"]), rank, note, now_ns)

    def _finding(self, by_rank: dict[int, LoaderPassNote]) -> Finding:
        note = next(iter(by_rank.values()))
        sampler = note["sampler"] or {}
        return finding_at_line(
            "DDP402",
            by_rank,
            f"two epochs had the samples in the same order: {sampler['kind']} is still at epoch {sampler.get('epoch')}",
            f"{sampler['kind']}(seed={sampler.get('seed')}, shuffle=True), {note['samples']} samples",
            "two passes over them that trained the same model began with the same samples",
        )
