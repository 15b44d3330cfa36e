# SPDX-License-Identifier: Apache-2.0
"""`--fix` on every noise program that has a safe fix, and on the formats that programs are written in."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from ddpilot.lint.fixes import fix_text, render_diff
from ddpilot.lint.linter import lint_text
from ddpilot.lint.options import LintOptions

HERE = Path(__file__).parent
PROGRAMS = sorted([*HERE.glob("fixtures/*/noise_*.py"), *HERE.glob("corpus/bad_*.py")])
FIXABLE = [path for path in PROGRAMS if any(each.edit for each in lint_text(path.read_text(), "train.py"))]


@pytest.mark.parametrize("path", FIXABLE, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_fix_leaves_a_program_without_these_reports_and_changes_few_lines(path: Path) -> None:
    """The result parses, has no report with a fix, no new one, and all lines but those of the fixes."""
    before = path.read_text()
    after = fix_text(before, "train.py", LintOptions())
    ast.parse(after)
    found, left = (lint_text(text, "train.py") for text in (before, after))
    num_fixed = sum(each.edit is not None for each in found)
    assert [each for each in left if each.edit is not None] == []
    assert sorted(each.code for each in left) == sorted(each.code for each in found if each.edit is None)
    diff = render_diff(before, after, "train.py").splitlines()[2:]
    assert 0 < sum(line.startswith("+") for line in diff) <= num_fixed
    assert sum(line.startswith("-") for line in diff) <= num_fixed


def test_each_fixable_rule_is_fixed_somewhere() -> None:
    """The programs above have a fix of each kind."""
    kinds = {e.edit[0] for path in FIXABLE for e in lint_text(path.read_text(), "train.py") if e.edit is not None}
    assert kinds == {"remove-argument", "add-argument", "insert-module", "move-inside", "rename-amp", "insert-first"}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("DataLoader(d, shuffle=True, sampler=S(d))", "DataLoader(d, sampler=S(d))"),
        ("DataLoader(d, sampler=S(d), shuffle=True)", "DataLoader(d, sampler=S(d))"),
        (
            "DataLoader(\n    d,\n    sampler=S(d),  # kept\n    shuffle=True,  # why\n)",
            "DataLoader(\n    d,\n    sampler=S(d),  # kept\n)",
        ),
        ("'ä', DataLoader(d, sampler=S(d), shuffle=True)", "'ä', DataLoader(d, sampler=S(d))"),
    ],
)
def test_removing_an_argument_keeps_the_format(before: str, after: str) -> None:
    """In the middle, at the end, one on each line, behind characters of several bytes."""
    head = "from torch.utils.data import DataLoader, DistributedSampler as S\n"
    assert fix_text(f"{head}{before}\r\n", "train.py", LintOptions()) == f"{head}{after}\r\n"


def test_fix_obeys_options_and_comments() -> None:
    """What is not reported is not fixed."""
    text = "from torch.utils.data import DataLoader, DistributedSampler as S\nDataLoader(d, sampler=S(d), shuffle=True)"
    assert fix_text(text, "train.py", LintOptions(ignore=("DDP413",))) == text
    assert fix_text(f"{text}  # ddpilot: ignore", "train.py", LintOptions()) == f"{text}  # ddpilot: ignore"
