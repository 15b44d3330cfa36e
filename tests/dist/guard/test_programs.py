# SPDX-License-Identifier: Apache-2.0
"""Programs on two ranks: each wrong one gets its finding with its line, correct ones get none."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

import ddpilot
from ddpilot.findings.finding import Finding
from ddpilot.guard.rules.registry import RuleRunner
from ddpilot.record.flight_ring.reader import read_ring
from ddpilot.record.hook import journal_path, ring_path
from ddpilot.record.journal import read_journal
from ddpilot.watch.report import ReportHistory
from tests.dist.guard import programs
from tests.preload import PRELOAD

LIMIT_S = 100
RIGHT = [program.__name__ for program in programs.RIGHT]
LINES = Path(programs.__file__).read_text().splitlines()


def find_in(folder: Path) -> tuple[list[Finding], list[Finding]]:
    """What the rules say of what 2 ranks noted in `folder`: while they run, and at the end. No rule may fail."""
    book = RuleRunner(2, log=lambda rank: read_ring(ring_path(folder, rank)))
    now_ns = time.monotonic_ns()
    found = book.feed({rank: read_journal(journal_path(folder, rank)).entries for rank in (0, 1)}, now_ns)
    found += book.feed({}, now_ns + 10**9)
    late = book.finish(now_ns + 10**9)
    assert not book.faults
    told = ReportHistory(30.0)
    return told.new_findings(found), told.new_findings(late)


Found = Mapping[str, tuple[list[Finding], list[Finding]]]


class Ran(NamedTuple):
    """One launch of all programs."""

    folder: Path
    said: list[list[str]]
    with_faults: list[tuple[list[str], bool]]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """One launch that runs all programs."""
    folder = tmp_path_factory.mktemp("programs")
    launcher = ddpilot.Launcher(nproc_per_node=2, timeout_s=LIMIT_S, watch=False, preload=PRELOAD)
    results = launcher.run(programs.run_programs, str(folder), [*programs.WRONG, *RIGHT])
    return Ran(folder, [result[0] for result in results], [result[1] for result in results])


@pytest.fixture(scope="module")
def findings(ran: Ran) -> Found:
    """By program."""
    return {name: find_in(ran.folder / name) for name in programs.ALL}


def test_guard_and_the_recording_have_no_errors_of_their_own(ran: Ran) -> None:
    """In none of the programs, wrong or right."""
    assert ran.said == [[], []]


def test_guard_that_fails_says_so_once_and_changes_no_number(ran: Ran) -> None:
    """Training goes on to the very weights that it ends with when nobody looks."""
    line = "guard no longer looks at optimizer steps: RuntimeError: a mistake of ours"
    assert ran.with_faults == [([line], True)] * 2


@pytest.mark.parametrize("name", programs.WRONG)
def test_guard_names_what_is_wrong(findings: Found, name: str) -> None:
    """One finding, with its code, the line that is to be changed, and values."""
    early, late = findings[name]
    assert [finding.code for finding in early + late] == [programs.WRONG[name]]
    (finding,) = early + late
    assert finding.ranks
    assert finding.place is not None
    assert finding.place.file == programs.__file__
    marked = [number for number, text in enumerate(LINES, 1) if f"# line: {name}" in text]
    if marked:
        assert finding.place.line == marked[0]
    assert finding.fix
    assert finding.why


@pytest.mark.parametrize("name", RIGHT)
def test_guard_is_silent_about_a_right_program(findings: Found, name: str) -> None:
    """Not a word, not even an info."""
    early, late = findings[name]
    assert not early + late


@pytest.mark.parametrize("name", [name for name, code in programs.WRONG.items() if code in ("DDP325", "DDP332")])
def test_guard_speaks_while_the_ranks_run(findings: Found, name: str) -> None:
    """What is proven at a step is not kept for the end."""
    early, late = findings[name]
    assert early
    assert not late
