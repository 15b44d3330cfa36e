# SPDX-License-Identifier: Apache-2.0
"""`Sources`: the text of the user's program, what `ddpilot lint` finds in it, and where it calls a function."""

from __future__ import annotations

import ast
import functools
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddpilot.diagnose.verify.target import Program
from ddpilot.lint.linter import Diagnostic, lint_text, read_options, read_text
from ddpilot.lint.notebook import read_notebook
from ddpilot.lint.program import Program as ParsedProgram
from ddpilot.user_files import CodeLine, is_users, label_cell

_MAX_FILES = 50
_UNREADABLE = (SyntaxError, ValueError, RecursionError, OSError)
_NOTEBOOK = "session.ipynb"


@dataclass(frozen=True, kw_only=True)
class LintFinding:
    """A fault that a rule found."""

    code: str
    message: str
    place: CodeLine


@dataclass(frozen=True)
class _File:
    name: str
    program: ParsedProgram
    cells: Mapping[int, str] = field(default_factory=dict)
    """Labels of cells by their numbers, from 1; empty for a script."""

    def line_of(self, node: ast.AST) -> CodeLine:
        line = getattr(node, "lineno", 1)
        text = self.program.text.split("\n")[line - 1].strip()
        for number, lines in enumerate(self.program.cells, 1):
            if line in lines:
                return CodeLine(self.cells.get(number, self.name), line - lines.start + 1, "", text)
        return CodeLine(self.name, line, "", text)


@dataclass(frozen=True)
class Sources:
    """The files, or the cells, of a program."""

    files: tuple[_File, ...] = ()
    findings: tuple[LintFinding, ...] = ()

    def find_call(self, *names: str) -> CodeLine | None:
        """Return the first line that calls one of `names`, as `ddpilot.lint.program.Program.calls` spells them."""
        return next((each.line_of(call) for each in self.files for call in each.program.calls_to(*names)), None)

    def find_main_guard(self) -> CodeLine | None:
        """Return the line with ``if __name__ == "__main__":``."""
        for each in self.files:
            for node in each.program.tree.body:
                if isinstance(node, ast.If) and "__name__" in ast.dump(node.test):
                    return each.line_of(node)
        return None


def read_sources(program: Program) -> Sources:
    """Read the script or the function's file with the modules next to it that it imports, or the cells of a session.

    What cannot be read or parsed is left out.
    """
    if program.script:
        return _read_files(program.script)
    if program.name.rpartition(":")[0]:
        return _read_files(str(program.args[0]))
    file = _file_of(program.fn)
    if file and os.path.isfile(file) and not label_cell(file).startswith("Cell "):
        return _read_files(file) if is_users(file) else Sources()
    return _read_cells(file)


def _file_of(fn: Callable[..., Any] | None) -> str:
    while isinstance(fn, functools.partial):
        fn = fn.func
    code = getattr(inspect.unwrap(fn), "__code__", None) if fn is not None else None
    return str(code.co_filename) if code is not None else ""


def _read_files(first: str) -> Sources:
    files, found = [], []
    options = read_options(Path(first).resolve().parent)
    for path in _with_imports(first):
        try:
            text = read_text(Path(path))
            files.append(_File(path, ParsedProgram(text)))
            lines = text.split("\n")
            for each in lint_text(text, path, options):
                place = CodeLine(path, each.line, "", lines[each.line - 1].strip())
                found.append(LintFinding(code=each.code, message=each.message, place=place))
        except _UNREADABLE:
            continue
    return Sources(tuple(files), tuple(found))


def _with_imports(first: str) -> Iterator[str]:
    """Yield a script and the user's modules next to it that it imports, directly or through one of them."""
    folder = Path(first).resolve().parent
    waiting, seen = [Path(first)], {Path(first).resolve()}
    while waiting and len(seen) <= _MAX_FILES:
        path = waiting.pop(0)
        yield str(path)
        try:
            tree = ast.parse(read_text(path))
        except _UNREADABLE:
            continue
        for name in _imported(tree):
            parts = name.split(".")
            for candidate in (folder.joinpath(*parts).with_suffix(".py"), folder.joinpath(*parts, "__init__.py")):
                if candidate.is_file() and candidate.resolve() not in seen and is_users(str(candidate)):
                    seen.add(candidate.resolve())
                    waiting.append(Path(os.path.relpath(candidate)) if not os.path.isabs(first) else candidate)


def _imported(tree: ast.Module) -> Iterator[str]:
    """Yield the names of modules that a file may import, with the packages that hold them."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            yield from (".".join(parts[: num + 1]) for num in range(len(parts)))


# Cells


def _read_cells(file: str) -> Sources:
    """Read the cells of this IPython session; rules report only those whose functions and classes still exist."""
    interactive: Any = getattr(sys.modules.get("IPython.core.interactiveshell"), "InteractiveShell", None)
    if interactive is None or not interactive.initialized():
        return Sources()
    shell = interactive.instance()
    cells: Sequence[str] = [str(each) for each in shell.user_ns.get("In", ())[1:]]
    labels = {number: f"Cell In[{number}]" for number in range(1, len(cells) + 1)}
    text = json.dumps({"cells": [{"cell_type": "code", "source": each} for each in cells]})
    live = {label_cell(file)} | {label_cell(_file_of_value(value)) for value in dict(shell.user_ns).values()}
    try:
        code, ranges = read_notebook(text)
        parsed = _File(_NOTEBOOK, ParsedProgram(code, ranges), labels)
        reported = lint_text(text, _NOTEBOOK)
    except _UNREADABLE:
        return Sources()
    kept = [each for each in reported if labels.get(each.cell) in live]
    return Sources((parsed,), tuple(_in_cell(each, cells[each.cell - 1], labels) for each in kept))


def _in_cell(each: Diagnostic, cell: str, labels: Mapping[int, str]) -> LintFinding:
    text = (cell.splitlines()[each.line - 1 : each.line] or [""])[0].strip()
    return LintFinding(code=each.code, message=each.message, place=CodeLine(labels[each.cell], each.line, "", text))


def _file_of_value(value: object) -> str:
    if isinstance(value, type):
        codes = (getattr(each, "__code__", None) for each in vars(value).values())
        return next((str(code.co_filename) for code in codes if code is not None), "")
    return str(code.co_filename) if (code := getattr(value, "__code__", None)) is not None else ""
