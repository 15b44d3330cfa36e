# SPDX-License-Identifier: Apache-2.0
"""DDP408 and DDP409: BatchNorm statistics from small parts of a batch, and weights that became NaN or infinite."""

from __future__ import annotations

from collections.abc import Iterable

from ddpilot.findings.catalog import make_finding
from ddpilot.findings.finding import Finding
from ddpilot.findings.text import render_ranks
from ddpilot.guard.notes import MIN_NORM_SAMPLES, NormsNote, NotFiniteNote, SpoiledNote
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


class NotFinite(WaitingRule[tuple[int, SpoiledNote]]):
    """Reports where non-finite values began, once an optimizer step has written them into finite weights.

    A non-finite loss or gradient alone is not an error: a scaler, or the program, may skip that step. Waits for
    (number of the report, note).
    """

    kinds = ("not_finite", "spoiled")
    patience_ns = 5 * NS_PER_S
    """All ranks of a DDP model note it; where it began is known from all of them, and one of them may be slow."""

    def __init__(self, context: RuleContext) -> None:
        super().__init__(context)
        self._seen: dict[int, BoundedDict[int, NotFiniteNote]] = {}
        self._num_noted: dict[int, int] = {}
        self._num_found = 0

    def feed(self, rank: int, entry: Entry, /) -> Iterable[Finding]:
        if entry.kind == "not_finite":
            mine = self._seen.setdefault(rank, BoundedDict(_MAX_BACKWARDS))
            mine[entry.values["backward"]] = entry.values
        else:
            # A rank may have missed an earlier one, if it stopped before its own loss was not finite.
            number = max(self._num_noted.get(rank, 0), self._num_found)
            self._num_noted[rank] = number + 1
            self._wait(number, rank, (number, entry.values), entry.time_ns)
        return ()

    def _finding(self, by_rank: dict[int, tuple[int, SpoiledNote]]) -> Finding:
        number, spoiled = next(iter(by_rank.values()))
        self._num_found = max(self._num_found, 1 + number)
        # A rank whose own loss was finite notices it only in its next backward.
        last = min(note["backward"] for _, note in by_rank.values())
        firsts = {rank: _first_of_step(mine, last) for rank, mine in self._seen.items() if last in mine}
        begun = min(firsts.values(), default=last)
        origins = {rank: self._seen[rank][begun] for rank, at in sorted(firsts.items()) if at == begun}
        unknown = self._members(note for _, note in by_rank.values()).difference(by_rank, firsts)
        evidence = [_describe(rank, note) for rank, note in list(origins.items())[:8]]
        others = [rank for rank in by_rank if rank not in origins]
        if unknown:
            evidence.append(f"values of {render_ranks(sorted(unknown))} are missing; it may have begun there earlier")
        elif others and origins:
            evidence.append(f"on {render_ranks(others)} loss and gradients were finite before they were averaged")
        evidence.append(f"weights that are not finite since that step: {some(spoiled['parameters'])}")
        is_known = bool(origins) and not unknown
        ranks = tuple(origins) if is_known else tuple(by_rank)
        site = next((note["site"] for note in origins.values()), {})
        return make_finding(
            "DDP409",
            summary=f"weights are not finite since backward {begun}"
            + (f"; it began on {render_ranks(ranks)}" if is_known else ""),
            ranks=ranks,
            line=place_of(site) or place_of(spoiled["site"]),
            evidence=tuple(evidence),
        )

    def _members(self, notes: Iterable[SpoiledNote]) -> set[int]:
        """Return the ranks that train the same model on a device, of which a rank reads the values when they arrive."""
        groups = {note["group"] for note in notes if note["device"] != "cpu"}
        return {rank for group in groups for rank in ranks_of(group, self._context.world_size)}


def _first_of_step(mine: dict[int, NotFiniteNote], last: int) -> int:
    """Return the first of the consecutive backwards up to `last`, which belong to one accumulated step."""
    while last - 1 in mine:
        last -= 1
    return last


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
