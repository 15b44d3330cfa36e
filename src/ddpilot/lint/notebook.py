# SPDX-License-Identifier: Apache-2.0
"""Turn the code cells of a notebook into one program, with the lines of each cell, and change the code of cells."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import SequenceMatcher

_PYTHON_MAGICS = ("ddp", "time", "timeit", "capture", "prun", "memit")
_MAGIC_LINE = re.compile(r"^(\s*)(?:[%!].*|[\w.]+\?{1,2}|\?{1,2}[\w.]+)$")
_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\r\n]*")
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


def replace_code(text: str, changed: Mapping[int, tuple[str, str]]) -> str:
    """Return a notebook with the code of some cells changed, and every other byte as it was.

    `changed`: number of the code cell, from 1, and its code before and after, both as `read_notebook` returns it. A
    cell stays as it was if a line with a magic would change.
    """
    spans = list(_source_spans(text))
    for number in sorted(changed, reverse=True):
        start, end = spans[number - 1]
        written = _with_source(text[start:end], *changed[number])
        text = text[:start] + written + text[end:]
    return text


def _source_spans(text: str) -> Iterator[tuple[int, int]]:
    """Yield where the source of each code cell begins and ends in the text of a notebook."""
    top = {key: start for key, start, _ in _members(text, _skip(text, 0))}
    holder = next((start for _, start, _ in _members(text, top["worksheets"])), 0) if "worksheets" in top else 0
    cells = {key: start for key, start, _ in _members(text, holder or _skip(text, 0))}["cells"]
    for _, cell, _ in _members(text, cells):
        values = {key: (start, end) for key, start, end in _members(text, cell)}
        if "cell_type" in values and json.loads(text[slice(*values["cell_type"])]) == "code":
            yield values.get("source") or values["input"]


def _members(text: str, at: int) -> Iterator[tuple[object, int, int]]:
    """Yield key or number, begin and end of each value of the JSON object or array at `at`."""
    is_object, at, number = text[at] == "{", _skip(text, at + 1), 0
    while text[at] not in "}]":
        key: object = number
        if is_object:
            key, at = _DECODER.raw_decode(text, at)
            at = _skip(text, _skip(text, at) + 1)
        start = at
        _, at = _DECODER.raw_decode(text, start)
        yield key, start, at
        at = _skip(text, at)
        at = _skip(text, at + 1) if text[at] == "," else at
        number += 1


def _skip(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found is not None else at


def _with_source(written: str, before: str, after: str) -> str:
    """Return the JSON of a source whose code is now `after`; parts that stay are written as they were."""
    parts = json.loads(written)
    source = "".join(parts) if isinstance(parts, list) else str(parts)
    changed = _with_magics(source, before.split("\n"), after.split("\n"))
    if changed is None:
        return written
    to_ascii = written.isascii() and "\\u" in written
    if not isinstance(parts, list):
        return json.dumps(changed, ensure_ascii=to_ascii)
    spans = [(start, end) for _, start, end in _members(written, 0)]
    lines = changed.splitlines(keepends=True) if parts == source.splitlines(keepends=True) else [changed]
    old = [written[start:end] for start, end in spans]
    new = [json.dumps(line, ensure_ascii=to_ascii) for line in lines]
    for kind, i1, i2, j1, j2 in SequenceMatcher(None, parts, lines, autojunk=False).get_opcodes():
        if kind == "equal":
            new[j1:j2] = old[i1:i2]
    head, tail = written[: spans[0][0]], written[spans[-1][1] :]
    between = written[spans[0][1] : spans[1][0]] if len(spans) > 1 else f",{head[1:] or ' '}"
    return head + between.join(new) + tail


def _with_magics(source: str, before: Sequence[str], after: Sequence[str]) -> str | None:
    """Return `source` with the lines that differ between `before` and `after`; None if one of them is a magic."""
    newline = "\r\n" if "\r\n" in source else "\n"
    own = source.removesuffix(newline).split(newline)
    if len(own) != len(before):
        return None
    lines: list[str] = []
    for kind, i1, i2, j1, j2 in SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if kind != "equal" and own[i1:i2] != list(before[i1:i2]):
            return None
        lines += own[i1:i2] if kind == "equal" else after[j1:j2]
    return newline.join(lines) + (newline if source.endswith(newline) else "")
