# SPDX-License-Identifier: Apache-2.0
"""Turn the code cells of a notebook into one program, with the lines of each cell."""

from __future__ import annotations

import ast
import json
import re

_PYTHON_MAGICS = ("ddp", "time", "timeit", "capture", "prun", "memit")
_MAGIC_LINE = re.compile(r"^(\s*)(?:[%!].*|[\w.]+\?{1,2}|\?{1,2}[\w.]+)$")
_MAGIC_VALUE = re.compile(r"^(\s*[\w., ]+=\s*)[!%].*$")


def read_notebook(text: str) -> tuple[str, tuple[range, ...]]:
    """Return the code of a notebook without magics, and the lines of each code cell in it.

    A cell that is not Python, as under ``%%bash``, becomes empty lines, as does one that cannot be parsed. Raises
    `ValueError` if `text` is not a notebook.
    """
    notebook = json.loads(text)
    sheets = notebook.get("worksheets") if isinstance(notebook, dict) else None
    holder = sheets[0] if isinstance(sheets, list) and sheets else notebook
    cells = holder.get("cells") if isinstance(holder, dict) else None
    if not isinstance(cells, list):
        raise ValueError("no cells")
    lines: list[str] = []
    ranges = []
    for cell in cells:
        if isinstance(cell, dict) and cell.get("cell_type") == "code":
            source = cell.get("source", cell.get("input", ""))
            code = _clean("".join(source) if isinstance(source, list) else str(source))
            ranges.append(range(len(lines) + 1, len(lines) + 1 + len(code)))
            lines += code
    return "\n".join(lines) + "\n", tuple(ranges)


def _clean(source: str) -> list[str]:
    lines = source.splitlines() or [""]
    magic = re.match(r"%%(\w+)", lines[0])
    if magic is not None and magic[1] not in _PYTHON_MAGICS:
        return [""] * len(lines)
    if magic is not None:
        lines[0] = ""
    cleaned = [_MAGIC_VALUE.sub(r"\1None", _MAGIC_LINE.sub(r"\1pass", line)) for line in lines]
    for each in (lines, cleaned):  # a line of a string may look like a magic
        try:
            ast.parse("\n".join(each))
        except (SyntaxError, ValueError, RecursionError):
            continue
        return each
    return [""] * len(lines)
