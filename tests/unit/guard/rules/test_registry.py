# SPDX-License-Identifier: Apache-2.0
"""Run all rules."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ddpilot.findings.finding import Finding
from ddpilot.guard.notes import NOTES
from ddpilot.guard.rules.parameters.divergence import Divergence
from ddpilot.guard.rules.registry import RULES, RuleRunner, rules_for
from ddpilot.guard.rules.rule import Rule, RuleContext, place_of
from ddpilot.record.hook import journal_path
from ddpilot.record.journal import Entry, JournalWriter
from ddpilot.user_files import CodeLine
from ddpilot.watch.observer import Observer
from ddpilot.watch.options import WatchOptions
from ddpilot.watch.report import Report


class Echo(Rule):
    """Returns a finding for each entry; fails at the number 13."""

    kinds = ("number",)

    def feed(self, rank: int, entry: Entry) -> Iterable[Finding]:
        """As `Rule.feed`."""
        if entry.values["n"] == 13:
            raise ValueError("thirteen")
        place = CodeLine(file="a.py", line=entry.values["n"])
        yield Finding(code="DDP999", name="echo", severity="info", ranks=(rank,), place=place)

    def look(self, now_ns: int) -> Iterable[Finding]:
        """As `Rule.look`."""
        return [Finding(code="DDP998", name="time", severity="info", summary=str(now_ns))] if now_ns else ()

    def finish(self, _: int) -> Iterable[Finding]:
        """As `Rule.finish`."""
        return [Finding(code="DDP997", name="end", severity="info", summary=f"of {self._context.world_size}")]


def entry(number: int, kind: str = "number") -> Entry:
    """Number `number`."""
    return Entry(number, 0, kind, {"n": number})


def test_rule_book_says_what_each_rule_finds() -> None:
    """While ranks run and at their end; kinds that no rule reads are ignored."""
    book = RuleRunner(4, rules=[Echo])
    found = book.feed({0: [entry(1), entry(2)], 1: [entry(1), entry(5, "other")]}, 0)
    assert [(finding.code, finding.ranks, finding.place and finding.place.line) for finding in found] == [
        ("DDP999", (0,), 1),
        ("DDP999", (0,), 2),
        ("DDP999", (1,), 1),
    ]
    assert [finding.summary for finding in book.feed({}, 7)] == ["7"]
    assert [finding.summary for finding in book.finish(7)] == ["of 4"]


def test_rule_book_goes_on_without_a_rule_that_fails() -> None:
    """It is disabled and reported once, and the other rules continue."""
    book = RuleRunner(2, rules=[Echo, Echo])
    assert len(book.feed({0: [entry(1)]}, 0)) == 2
    assert book.feed({0: [entry(13), entry(2)]}, 0) == []
    assert book.faults == ["rule Echo is off: ValueError: thirteen"] * 2
    assert book.feed({0: [entry(3)]}, 5) == []


@pytest.mark.parametrize(
    ("kind", "values", "code"),
    [
        ("left_out", {"names": ["w"], "num": 1}, "DDP308"),
        ("on_graph", {"case": "sum", "op": "all_reduce", "losses": 3, "numel": 1}, "DDP410"),
    ],
)
def test_what_a_later_cell_does_wrong_at_the_same_line_is_told_again(
    tmp_path: Path, kind: str, values: dict[str, Any], code: str
) -> None:
    """Once in each cell, however often it is noted there."""
    journal = JournalWriter(journal_path(tmp_path, 0), rank=0)
    told: list[Report] = []
    observer = Observer(tmp_path, 1, facts=dict, notify=told.append, options=WatchOptions())
    site = {"file": "train.py", "line": 3, "function": "train", "text": "step()"}
    seen = []
    for number in (1, 2):
        observer.resume(number, lambda: None)
        for _ in range(3):
            journal.write(kind, {**values, "site": site})
            observer.finish()
        seen.append([finding.code for report in told for finding in report.findings])
        told.clear()
    journal.close()
    assert seen == [[code], [code]]


@pytest.mark.parametrize("reports", [True, False], ids=["ok", "failed"])
def test_what_one_rank_noted_last_in_a_cell_is_reported_at_its_end_and_not_in_the_next_cell(
    tmp_path: Path, reports: bool
) -> None:
    """The rule that waits for the other ranks waits no longer. After a cell that failed, the finding is dropped."""
    told: list[Report] = []
    observer = Observer(tmp_path, 2, facts=dict, notify=told.append, options=WatchOptions())
    site = {"file": "Cell In[1]", "line": 2, "function": "<module>", "text": "optimizer.step()"}
    observer.resume(1, lambda: None)
    with closing(JournalWriter(journal_path(tmp_path, 1), rank=1)) as journal:
        journal.write("on_graph", {"case": "sum", "op": "all_reduce", "losses": 3, "numel": 1, "site": site})
        observer._step()  # the last look in the cell, so that no entry is new when the cell ends
        observer.pause(reports=reports)
        codes = [finding.code for report in told for finding in report.findings]
        observer.resume(2, lambda: None)
        told.clear()
        observer.finish()
    assert codes == (["DDP410"] if reports else [])
    assert told == []


def test_rules_read_kinds_that_probes_write_and_find_nothing_without_entries() -> None:
    """A kind that no probe writes would never reach its rule."""
    rules = [make(RuleContext(world_size=2)) for make in RULES]
    assert all(rule.kinds and set(rule.kinds) <= NOTES.keys() for rule in rules)
    assert all(not list(rule.look(1)) and not list(rule.finish(1)) for rule in rules)


def test_place_of_takes_what_a_probe_noted() -> None:
    """None if it found no line."""
    assert place_of({}) is None
    assert place_of({"file": "a.py", "line": 3, "text": "x()"}) == CodeLine(file="a.py", line=3, text="x()")


def test_rules_for_compares_ranks_only_where_all_are_in_sight() -> None:
    """On one node of two, ranks of the other node would seem to do nothing."""
    assert rules_for(4, (0, 1, 2, 3)) == RULES
    assert Divergence not in rules_for(4, (0, 1))
