# SPDX-License-Identifier: Apache-2.0
"""Read the labels of a program, and what the rules report in it."""

from __future__ import annotations

import re
from pathlib import Path

from ddpilot.lint.linter import lint_text
from ddpilot.lint.notebook import read_notebook


def expected_in(path: Path) -> list[tuple[int, int, str]]:
    """Cell, line and code of every comment ``# expect: DDP401``; the cell is 0 in a script."""
    text, cells = read_notebook(path.read_text()) if path.suffix == ".ipynb" else (path.read_text(), ())
    lines = text.splitlines()
    parts = list(enumerate(cells, 1)) or [(0, range(1, len(lines) + 1))]
    return [
        (cell, at - part.start + 1, code)
        for cell, part in parts
        for at in part
        if (mark := re.search(r"# expect: ([\w ]+)", lines[at - 1])) is not None
        for code in mark[1].split()
    ]


def found_in(path: Path) -> list[tuple[int, int, str]]:
    """Cell, line and code of every report."""
    return [(each.cell, each.line, each.code) for each in lint_text(path.read_text(), str(path))]
