# SPDX-License-Identifier: Apache-2.0
"""DDP408 and DDP409: BatchNorm statistics from small parts of a batch, and weights that became NaN or infinite."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ddpilot.findings.catalog import make_finding
from ddpilot.findings.finding import Finding
from ddpilot.findings.text import render_ranks
from ddpilot.guard.notes import MIN_NORM_SAMPLES, BackwardNote, NormsNote, NotFiniteNote, SpoiledNote
from ddpilot.guard.rules.rule import (
    NS_PER_S,
    BoundedDict,
    RuleContext,
    WaitingRule,
    finding_at_line,
    place_of,
    ranks_of,
    some,
)
from ddpilot.record.journal import Entry

_MAX_BACKWARDS = 64
_MAX_GENERATIONS = 4

_Key = tuple[int, int]
"""Training and backward of a note."""


class _Checks:
    """Notes of one rank on its backwards, in one generation of its default process group."""

    def __init__(self) -> None:
        self.not_finite: BoundedDict[_Key, NotFiniteNote] = BoundedDict(_MAX_BACKWARDS)
        self._last: _Key = (0, 0)  # up to which all values of a device were read, but for those of `_unchecked`
        self._unchecked: BoundedDict[_Key, None] = BoundedDict(_MAX_BACKWARDS)

    def add(self, kind: str, note: Any) -> None:
        training, backward = key = _key_of(note)
        if kind == "unchecked":
            self._unchecked[key] = None
            return
        self._last = key if kind == "checked" else (training, backward - 1)  # values are read in their order
        if kind == "not_finite":
            self.not_finite[key] = note

    def first_of_step(self, last: _Key) -> _Key:
        """Return the first of the consecutive backwards up to `last`, which belong to one accumulated step."""
        training, backward = last
        while (training, backward - 1) in self.not_finite:
            backward -= 1
        return training, backward

    def are_known(self, begun: _Key, last: _Key) -> bool:
        """True if all values of the backwards from `begun` to `last` were read."""
        if len(self._unchecked) == _MAX_BACKWARDS and begun < next(iter(self._unchecked)):
            return False
        is_read = self._last >= last or last in self.not_finite
        return is_read and not any(begun <= one <= last and one not in self.not_finite for one in self._unchecked)


class NotFinite(WaitingRule[tuple[int, SpoiledNote]]):
    """Reports where non-finite values began, once an optimizer step has written them into finite weights.

    A non-finite loss or gradient alone is not an error: a scaler, or the program, may skip that step. Waits for
    (number of the report, note).
    """

    kinds = ("not_finite", "spoiled", "checked", "unchecked")
    patience_ns = 5 * NS_PER_S
    """All ranks of a DDP model note it; where it began is known from all of them, and one of them may be slow."""

    def __init__(self, context: RuleContext) -> None:
        super().__init__(context)
        self._by_rank: dict[int, BoundedDict[str, _Checks]] = {}
        """By rank and generation of its default process group."""
        self._num_noted: dict[int, int] = {}
        self._num_found = 0

    def feed(self, rank: int, entry: Entry, /) -> Iterable[Finding]:
        note = entry.values
        generations = self._by_rank.setdefault(rank, BoundedDict(_MAX_GENERATIONS))
        generations.setdefault(note["generation"], _Checks()).add(entry.kind, note)
        if entry.kind == "spoiled":
            # A rank may have missed an earlier one, if it stopped before its own loss was not finite.
            number = max(self._num_noted.get(rank, 0), self._num_found)
            self._num_noted[rank] = number + 1
            self._wait(number, rank, (number, entry.values), entry.time_ns)
        return ()

    def _finding(self, by_rank: dict[int, tuple[int, SpoiledNote]]) -> Finding:
        number, spoiled = next(iter(by_rank.values()))
        self._num_found = max(self._num_found, 1 + number)
        # A rank whose own loss was finite notices it only in its next backward.
        last = min(_key_of(note) for _, note in by_rank.values())
        generation = spoiled["generation"]
        are_counted_alike = all(note["generation"] == generation for _, note in by_rank.values())
        generations = self._by_rank.items() if are_counted_alike else ()
        known = {rank: checks[generation] for rank, checks in generations if generation in checks}
        firsts = {rank: checks.first_of_step(last) for rank, checks in known.items() if last in checks.not_finite}
        begun = min(firsts.values(), default=last)
        origins = {rank: known[rank].not_finite[begun] for rank, at in sorted(firsts.items()) if at == begun}
        members = self._members(note for _, note in by_rank.values()) if are_counted_alike else []
        unknown = [rank for rank in members if rank not in known or not known[rank].are_known(begun, last)]
        evidence = [_describe(rank, note) for rank, note in list(origins.items())[:8]]
        others = [rank for rank in by_rank if rank not in origins]
        if not are_counted_alike:
            evidence.append("where it began is not known: the process group changed before all ranks noticed")
        if unknown:
            evidence.append(f"values of {render_ranks(unknown)} are missing; it may have begun there earlier")
        elif others and origins:
            evidence.append(f"on {render_ranks(others)} loss and gradients were finite before they were averaged")
        evidence.append(f"weights that are not finite since that step: {some(spoiled['parameters'])}")
        is_known = bool(origins) and not unknown
        ranks = tuple(origins) if is_known else tuple(by_rank)
        site = next((note["site"] for note in origins.values()), {})
        return make_finding(
            "DDP409",
            summary=f"weights are not finite since backward {begun[1]}"
            + (f"; it began on {render_ranks(ranks)}" if is_known else ""),
            ranks=ranks,
            line=place_of(site) or place_of(spoiled["site"]),
            evidence=tuple(evidence),
        )

    def _members(self, notes: Iterable[SpoiledNote]) -> list[int]:
        """Return the ranks that train the same model on a device, of which a rank reads the values when they arrive."""
        groups = {note["group"] for note in notes if note["device"] != "cpu"}
        return sorted({rank for group in groups for rank in ranks_of(group, self._context.world_size)})


def _key_of(note: BackwardNote) -> _Key:
    return note["training"], note["backward"]


def _describe(rank: int, note: NotFiniteNote) -> str:
    what = f"the loss was {note['loss']}" if note["loss"] else "the loss was finite, its gradient was not"
    where = f"backward {note['backward']}"
    if "batch" in note:
        where += f", batch {note['batch']} of pass {note['pass']} over the loader"
    indices = note["indices"]
    return f"rank {rank}: {what} in {where}" + (f", samples {some(indices, 8)}" if indices else "")


class SmallBatchNorm(WaitingRule[NormsNote]):
    """Reports DDP models whose first three training forwards had fewer than `MIN_NORM_SAMPLES`."""

    kinds = ("norms",)
    compares_ranks = False

    def feed(self, rank: int, entry: Entry, /) -> Iterable[Finding]:
        note: NormsNote = entry.values
        if max(note["rows"]) < MIN_NORM_SAMPLES:
            self._wait(note["model"], rank, note, entry.time_ns)
        return ()

    def _finding(self, by_rank: dict[int, NormsNote]) -> Finding:
        first = next(iter(by_rank.values()))
        rows = sorted({row for note in by_rank.values() for row in note["rows"]})
        return finding_at_line(
            "DDP408",
            by_rank,
            f"BatchNorm takes its statistics from {rows[-1]} samples",
            f"layers in training mode: {some(first['layers'])}",
            f"samples per rank in a batch: {', '.join(map(str, rows))}",
        )
