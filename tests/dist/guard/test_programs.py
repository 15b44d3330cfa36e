# SPDX-License-Identifier: Apache-2.0
"""Programs on two real ranks: each wrong one gets its finding with its line, and the right ones get none."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import pytest

import ddpilot
from ddpilot.findings.finding import Finding
from ddpilot.record.hook import journal_path, ring_path
from ddpilot.record.journal import read_journal
from ddpilot.record.reading import read_ring
from ddpilot.watch.rules.book import RuleBook
from tests.dist.guard import programs

LIMIT_S = 100
RIGHT = [program.__name__ for program in programs.RIGHT]
LINES = Path(programs.__file__).read_text().splitlines()


def find_in(folder: Path) -> tuple[list[Finding], list[Finding]]:
    """What the rules say of what 2 ranks noted in `folder`: while they run, and at the end. No rule may fail."""
    book = RuleBook(2, log=lambda rank: read_ring(ring_path(folder, rank)))
    now_ns = time.monotonic_ns()
    found = book.feed({rank: read_journal(journal_path(folder, rank)).entries for rank in (0, 1)}, now_ns)
    found += book.feed({}, now_ns + 10**9)
    late = book.finish(now_ns + 10**9)
    assert not book.faults
    return found, late


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, tuple[list[Finding], list[Finding]]]:
    """By program, of one launch that runs all of them."""
    folder = tmp_path_factory.mktemp("programs")
    # The first optimizer of a process imports torch's compiler; the sharded one imports more.
    launcher = ddpilot.Launcher(
        nproc_per_node=2, timeout_s=LIMIT_S, watch=False, preload=("torch._dynamo", "torch.distributed.optim")
    )
    said = launcher.run(programs.run_programs, str(folder), [*programs.WRONG, *RIGHT])
    assert list(said) == [[], []], "a probe or the recording failed"
    return {name: find_in(folder / name) for name in programs.ALL}


Found = Mapping[str, tuple[list[Finding], list[Finding]]]


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
