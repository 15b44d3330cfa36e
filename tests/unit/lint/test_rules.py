# SPDX-License-Identifier: Apache-2.0
"""Each rule on programs that have its fault (noise) and on right ones that look like it (silence)."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpilot.findings.catalog import find_entry
from ddpilot.lint.linter import lint_text
from ddpilot.lint.notebook import read_notebook
from ddpilot.lint.program import Program
from ddpilot.lint.rule import Facts, Rule
from ddpilot.lint.rules import CODES, RULES
from tests.unit.lint.labels import expected_in, found_in

FIXTURES = Path(__file__).parent / "fixtures"
NOISE = sorted([*FIXTURES.glob("*/noise_*.py"), *FIXTURES.glob("*/noise_*.ipynb")])
SILENCE = sorted([*FIXTURES.glob("*/silence_*.py"), *FIXTURES.glob("*/silence_*.ipynb")])


def name_of(path: Path) -> str:
    """Folder and file."""
    return f"{path.parent.name}/{path.name}"


@pytest.mark.parametrize("path", NOISE, ids=name_of)
def test_rule_reports_the_marked_lines_and_no_other(path: Path) -> None:
    """The folder's code is among the marks, and all rules together report exactly the marks."""
    assert path.parent.name in {code for _, _, code in expected_in(path)}
    assert found_in(path) == expected_in(path)


@pytest.mark.parametrize("path", SILENCE, ids=name_of)
def test_rules_are_silent_on_right_programs(path: Path) -> None:
    """No rule reports anything."""
    assert found_in(path) == []


def test_every_code_has_a_page_noise_and_silence() -> None:
    """A rule is a check, a page and both kinds of fixtures."""
    for code in CODES:
        assert find_entry(code).code == code
    assert {path.parent.name for path in NOISE} == {path.parent.name for path in SILENCE} == set(CODES)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.code}-{rule.check.__name__}")
def test_every_check_reports_something_in_the_noise_of_its_code(rule: Rule) -> None:
    """No check is dead, and each says in its docstring what it reports."""
    paths = [path for path in NOISE if path.parent.name == rule.code]
    programs = [read_notebook(p.read_text()) if p.suffix == ".ipynb" else (p.read_text(), ()) for p in paths]
    assert any(list(rule.check(Facts(Program(*each)))) for each in programs)
    assert rule.summary.endswith(".")


def test_page_lists_every_rule() -> None:
    """docs/how_to/lint.md is up to date: `make reference` writes it."""
    listed = (Path(__file__).parents[3] / "docs" / "how_to" / "lint.md").read_text()
    for rule in RULES:
        assert (
            f"[{rule.code}](../../src/ddpilot/findings/pages/{rule.code}.md) | {find_entry(rule.code).name} | "
            in listed
        )
        assert rule.summary in listed


def test_rules_marked_fixable_are_those_that_give_edits() -> None:
    """Over all programs of the fixtures and of the corpus."""
    paths = [*NOISE, *(FIXTURES.parent / "corpus").glob("*.py")]
    found = [each for path in paths if path.suffix == ".py" for each in lint_text(path.read_text(), "train.py")]
    assert {each.code for each in found if each.edit} == {rule.code for rule in RULES if rule.is_fixable}
