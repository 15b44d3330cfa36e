# SPDX-License-Identifier: Apache-2.0
"""Run the rules over files: find them, read them, drop what is ignored. `LintOptions`: which rules and files."""

from __future__ import annotations

import ast
import io
import os
import re
import sys
import tokenize
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from ddpilot.errors import DdpilotError
from ddpilot.lint.notebook import read_notebook
from ddpilot.lint.program import Program
from ddpilot.lint.rule import Edit, Facts
from ddpilot.lint.rules import CODES, RULES

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True, kw_only=True)
class LintOptions:
    """Which codes are reported, and in which files. ``DDP4`` stands for all codes that begin with it."""

    select: tuple[str, ...] = ()
    """Codes to report; all if empty."""
    ignore: tuple[str, ...] = ()
    """Codes not to report, whether selected or not."""
    exclude: tuple[str, ...] = ()
    """Patterns of files and folders that are not checked, such as ``build`` or ``tests/*``."""

    def __post_init__(self) -> None:
        for each in (*self.select, *self.ignore):
            if not each or not any(code.startswith(each) for code in CODES):
                raise DdpilotError(
                    "choosing rules", found=f"no rule's code begins with {each!r}", fix=f"Rules: {', '.join(CODES)}"
                )

    def has(self, code: str) -> bool:
        """Return True if `code` is reported."""
        return (not self.select or code.startswith(self.select)) and not (self.ignore and code.startswith(self.ignore))


def read_options(folder: Path) -> LintOptions:
    """Return the options in the pyproject.toml of `folder` or of the nearest folder above it.

    Raises `DdpilotError` if the file cannot be read, or for an unknown option.
    """
    for each in (folder, *folder.parents):
        if (path := each / "pyproject.toml").is_file():
            try:
                table = tomllib.loads(path.read_text("utf-8")).get("tool", {}).get("ddpilot", {}).get("lint", {})
            except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
                raise DdpilotError(f"reading {path}", found=str(error), fix="Correct the file") from error
            return _options_in(table, path)
    return LintOptions()


def _options_in(table: Mapping[str, Any], path: Path) -> LintOptions:
    known = [field.name for field in fields(LintOptions)]
    for name, value in table.items():
        if name not in known or not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise DdpilotError(
                f"reading [tool.ddpilot.lint] in {path}",
                found=f"{name} = {value!r}",
                fix=f"Give lists of strings for {', '.join(known)}",
            )
    return LintOptions(**{name: tuple(value) for name, value in table.items()})


SUFFIXES = (".py", ".ipynb")
_RELEVANT = re.compile(r"\b(?:torch|lightning|pytorch_lightning|accelerate|fastai|transformers)\b")
"""A file without any of these words imports nothing that a rule is about."""
_IGNORE = re.compile(r"#\s*ddpilot:\s*ignore(?:\[(?P<codes>[\w\s,]*)\])?")
_SKIPPED_FOLDERS = ("__pycache__", "node_modules")


@dataclass(frozen=True, kw_only=True, order=True)
class Diagnostic:
    """One report, with its place."""

    path: str
    line: int
    """From 1; within the cell, if `cell` is not 0."""
    column: int
    """From 1."""
    code: str
    message: str
    cell: int = 0
    """Number of the code cell in a notebook, from 1; 0 in a script."""
    edit: Edit | None = None
    """The fix, if there is a safe one."""
    span: tuple[int, int, int, int] = (0, 0, 0, 0)
    """First line and column, from 0, and last line and column of what a fix changes."""

    @property
    def place(self) -> str:
        """``path:line:column``, with the cell between if there is one."""
        return f"{self.path}:{f'cell {self.cell}:' if self.cell else ''}{self.line}:{self.column}"


def lint_text(text: str, path: str, options: LintOptions = LintOptions()) -> list[Diagnostic]:
    """Return what the rules find in a script, or in a notebook if `path` ends in ``.ipynb``, in the order of the lines.

    Raises `SyntaxError`, `ValueError` or `RecursionError` if `text` cannot be parsed; a text without any name that the
    rules look for is not parsed.
    """
    if not is_relevant(text):
        return []
    code, cells = read_notebook(text) if path.endswith(".ipynb") else (text, ())
    facts = Facts(Program(code, cells))
    lines = code.split("\n")
    found = set()
    for rule in RULES:
        for report in rule.check(facts) if options.has(rule.code) else ():
            line, last = getattr(report.node, "lineno", 1), getattr(report.node, "end_lineno", 1)
            if not any(_is_ignored(each, rule.code) for each in (*lines[line - 1 : line], *lines[last - 1 : last])):
                span = _span(report.node, lines)
                number = next((i for i, cell in enumerate(cells, 1) if line in cell), 0)
                first = cells[number - 1].start if number else 1
                found.add(
                    Diagnostic(
                        path=path,
                        line=line - first + 1,
                        column=span[1] + 1,
                        code=rule.code,
                        message=report.message,
                        cell=number,
                        edit=report.edit,
                        span=span,
                    )
                )
    return sorted(found, key=lambda each: (each.cell, each.line, each.column, each.code))


def is_relevant(text: str) -> bool:
    """Return True if the rules look into `text`: it names a library that they are about."""
    return _RELEVANT.search(text) is not None


def _span(node: ast.AST, lines: Sequence[str]) -> tuple[int, int, int, int]:
    """Return where `node` begins and ends, with columns in characters: those of `ast` count bytes."""
    line, last = getattr(node, "lineno", 1), getattr(node, "end_lineno", 1)
    columns = getattr(node, "col_offset", 0), getattr(node, "end_col_offset", 0)
    first, end = (
        len(lines[at - 1].encode()[:column].decode(errors="replace")) if 0 < at <= len(lines) else column
        for at, column in zip((line, last), columns, strict=True)
    )
    return line, first, last, end


def _is_ignored(line: str, code: str) -> bool:
    found = _IGNORE.search(line)
    return found is not None and (found["codes"] is None or code in re.split(r"[\s,]+", found["codes"]))


def read_text(path: Path) -> str:
    """Return the text of a file in the encoding that it declares; bytes that do not fit are replaced."""
    data = path.read_bytes()
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        return data.decode(encoding, errors="replace")
    except (SyntaxError, LookupError):
        return data.decode("latin-1")


def find_files(paths: Iterable[str], exclude: Sequence[str] = ()) -> Iterator[str]:
    """Yield the scripts and notebooks of `paths`, folders recursively.

    Without hidden folders, virtual environments and `exclude`.

    `exclude`: patterns of paths or of parts of them. Raises `DdpilotError` for a path that does not exist.
    """
    for path in paths:
        if os.path.isfile(path):
            yield path
        elif os.path.isdir(path):
            for folder, folders, files in os.walk(path):
                folders[:] = sorted(each for each in folders if not _is_skipped(folder, each, exclude))
                for file in (os.path.join(folder, name) for name in sorted(files) if name.endswith(SUFFIXES)):
                    if os.path.isfile(file) and not _is_excluded(file, exclude):  # opening a named pipe would block
                        yield file
        else:
            raise DdpilotError("linting", found=f"{path} does not exist", fix="Give files or folders")


def _is_skipped(folder: str, name: str, exclude: Sequence[str]) -> bool:
    path = os.path.join(folder, name)
    is_environment = os.path.isfile(os.path.join(path, "pyvenv.cfg"))
    return is_environment or name.startswith(".") or name in _SKIPPED_FOLDERS or _is_excluded(path, exclude)


def _is_excluded(path: str, exclude: Sequence[str]) -> bool:
    whole = Path(path).as_posix()
    return any(fnmatch(whole, each) or fnmatch(whole, f"*/{each}") for each in exclude)


def lint_files(
    paths: Iterable[str],
    options: LintOptions,
    on_unreadable: Callable[[str, str], None],
    *,
    named: Collection[str] = (),
) -> Iterator[Diagnostic]:
    """Yield what the rules find in files. `on_unreadable`: called with path and reason if a file cannot be checked.

    `named`: files that are parsed in any case, also without any name that the rules look for.
    """
    for path in paths:
        try:
            text = read_text(Path(path))
            if path in named and not is_relevant(text):
                Program(*(read_notebook(text) if path.endswith(".ipynb") else (text, ())))
            yield from lint_text(text, path, options)
        except (SyntaxError, ValueError, RecursionError, MemoryError, OSError) as error:
            on_unreadable(path, f"{type(error).__name__}: {error}".partition("\n")[0])
