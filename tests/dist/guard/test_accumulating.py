# SPDX-License-Identifier: Apache-2.0
"""Gradients accumulated on two real ranks: undivided ones are told, and none that may be meant."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from ddpilot.findings.finding import Finding
from tests.dist.guard import accumulating
from tests.dist.guard.running import run_all

LINES = Path(accumulating.__file__).read_text().splitlines()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, list[Finding]]:
    """The findings on every program, of one launch."""
    return run_all(tmp_path_factory.mktemp("guard"), [*accumulating.WRONG, *accumulating.RIGHT])


@pytest.mark.parametrize("name", [program.__name__ for program in accumulating.WRONG])
def test_undivided_losses_are_told_with_the_line_of_backward(found: Mapping[str, list[Finding]], name: str) -> None:
    """Once, as a warning, with their number; clipping that changes nothing is nothing."""
    (finding,) = found[name]
    assert (finding.code, finding.severity, finding.ranks) == ("DDP333", "warning", (0, 1))
    assert finding.summary == "each step adds up the gradients of 4 mean losses, and nothing divides by 4"
    assert finding.place is not None
    assert finding.place.file == accumulating.__file__
    line = accumulating.LINES_OF.get(name, name)
    assert f"# line: {line}" in LINES[finding.place.line - 1]


@pytest.mark.parametrize("name", [program.__name__ for program in accumulating.RIGHT])
def test_accumulation_that_may_be_right_is_not_told(found: Mapping[str, list[Finding]], name: str) -> None:
    """Divided in whatever way, or a sum that is meant."""
    assert found[name] == []
