# SPDX-License-Identifier: Apache-2.0
"""`--fix` on every noise program that has a safe fix, and on the formats that programs are written in."""

from __future__ import annotations

import ast
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from ddpilot.lint.fixes import fix_text, render_diff
from ddpilot.lint.linter import LintOptions, lint_text
from ddpilot.lint.notebook import read_notebook

HERE = Path(__file__).parent
PROGRAMS = sorted([*HERE.glob("fixtures/*/noise_*.*"), *HERE.glob("corpus/bad_*.*")])
FIXABLE = [path for path in PROGRAMS if any(each.edit for each in lint_text(path.read_text(), path.name))]


@pytest.mark.parametrize("path", FIXABLE, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_fix_leaves_a_program_without_these_reports_and_changes_few_lines(path: Path) -> None:
    """The result parses, has no report with a fix, no new one, and all lines but those of the fixes."""
    before = path.read_text()
    after = fix_text(before, path.name, LintOptions())
    ast.parse(read_notebook(after)[0] if path.suffix == ".ipynb" else after)
    found, left = (lint_text(text, path.name) for text in (before, after))
    num_fixed = sum(each.edit is not None for each in found)
    assert [each for each in left if each.edit is not None] == []
    assert sorted(each.code for each in left) == sorted(each.code for each in found if each.edit is None)
    diff = render_diff(before, after, "train.py").splitlines()[2:]
    assert 0 < sum(line.startswith("+") for line in diff) <= num_fixed
    assert sum(line.startswith("-") for line in diff) <= num_fixed


def test_each_fixable_rule_is_fixed_somewhere() -> None:
    """The programs above have a fix of each kind."""
    kinds = {e.edit[0] for path in FIXABLE for e in lint_text(path.read_text(), path.name) if e.edit is not None}
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


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("torch.load('a')", "torch.load('a', weights_only=True)"),
        ("torch.load(p, None)", "torch.load(p, None, weights_only=True)"),
        ("torch.load(\n    'a',\n)", "torch.load(\n    'a',\n    weights_only=True,\n)"),
        (
            "torch.load(\n    'a',  # first\n    map_location=d,  # last\n)",
            "torch.load(\n    'a',  # first\n    map_location=d,  # last\n    weights_only=True,\n)",
        ),
    ],
)
def test_adding_an_argument_keeps_the_format(before: str, after: str) -> None:
    """On one line, and on lines of their own with a comma at the end."""
    head = "import torch\nfrom torch.nn.parallel import DistributedDataParallel as DDP\nDDP(m)\n"
    assert fix_text(f"{head}{before}\n", "train.py", LintOptions()) == f"{head}{after}\n"


FIRST_CELL = """%%ddp -n 2
from torch.utils.data import DataLoader, DistributedSampler
from torch.nn.parallel import DistributedDataParallel as DDP
!ls 'ä'
m = DDP(net).to('cpu')
sampler = DistributedSampler(d)
loader = DataLoader(
    d,
    sampler=sampler,
    shuffle=True,
)
"""
SECOND_CELL = "%%ddp\nfor epoch in range(3):\n    for x in loader:\n        m(x).mean().backward()\n%time 3"
CELLS = (FIRST_CELL, SECOND_CELL, "%%bash\nls")
FIXED_CELLS = (
    CELLS[0].replace("DDP(net).to('cpu')", "DDP(net.to('cpu'))").replace("    shuffle=True,\n", ""),
    CELLS[1].replace("3):\n", "3):\n    sampler.set_epoch(epoch)\n"),
    CELLS[2],
)


def write_notebook(cells: Sequence[str], style: str) -> str:
    """A notebook with outputs and metadata, in one of the styles that tools write."""
    pages = [each if style == "strings" else each.splitlines(keepends=True) for each in cells]
    outputs = [{"text": ["ü \u2028 1.50\n"], "data": {"scale": 2e5}}]
    code = [{"cell_type": "code", "metadata": {"a": 1.0}, "outputs": outputs, "source": each} for each in pages]
    notebook = {"cells": [{"cell_type": "markdown", "source": "x"}, *code], "metadata": {}, "nbformat": 4}
    if style == "old":
        notebook = {"worksheets": [{"cells": [{"input": each.pop("source"), **each} for each in code]}]}
    text = json.dumps(notebook, indent=None if style == "compact" else 1, ensure_ascii=style == "strings")
    return text.replace("200000.0", "2E5").replace("1.0", "1.00") + "\n"  # what no JSON writer writes


@pytest.mark.parametrize("style", ["lines", "strings", "compact", "old"])
def test_fix_of_a_notebook_changes_the_lines_of_the_fix_and_no_other_byte(style: str) -> None:
    """Magics, outputs, metadata, numbers and escapes stay; a loop may be in a different cell than its sampler."""
    before, wanted = write_notebook(CELLS, style), write_notebook(FIXED_CELLS, style)
    after = fix_text(before, "train.ipynb", LintOptions())
    assert after == wanted
    assert [each.code for each in lint_text(before, "train.ipynb")] == ["DDP331", "DDP402", "DDP413"]
    assert lint_text(after, "train.ipynb") == []
    assert fix_text(after, "train.ipynb", LintOptions()) == after


def test_fix_of_a_notebook_leaves_a_cell_whose_magic_would_change() -> None:
    """A call that contains a value by a magic cannot be parsed, and its cell is passed over."""
    text = write_notebook([CELLS[0].replace("    sampler=sampler,", "    sampler=!ls,")], "lines")
    assert fix_text(text, "train.ipynb", LintOptions()) == text
