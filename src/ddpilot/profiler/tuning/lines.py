# SPDX-License-Identifier: Apache-2.0
"""Lines to paste: a call of the user's script with the options that help, old and new. No torch."""

from __future__ import annotations

import ast
import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpilot.profiler.tuning.options import Option
from ddpilot.user_files import CodeLine

_CALLED = {
    "ddp": ("DistributedDataParallel", "DDP", "prepare"),
    "loader": ("DataLoader", "loader"),
    "threads": ("set_num_threads",),
    "compression": ("DistributedDataParallel", "DDP", "prepare"),
}
_OF_LOOP = "prepare"
_Edit = tuple[int, int, str]
"""Begin and end in the file's bytes, and what stands there afterwards."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """A place to change."""

    where: str
    """File and line, or what the line is for."""
    old: tuple[str, ...] = ()
    new: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join([self.where, *(f"- {line}" for line in self.old), *(f"+ {line}" for line in self.new)])


def write_changes(options: Sequence[Option], command: str) -> list[Change]:
    """Return the lines to paste for `options`. `command`: the command line that runs the script."""
    by_line: dict[tuple[str, int], tuple[CodeLine, list[Option]]] = {}
    changes = []
    for option in options:
        for line in option.lines:
            by_line.setdefault(line.position, (line, []))[1].append(option)
        if not option.lines:
            changes.append(Change(where="in the shell", new=(f"{option.name}={option.value} {command}",)))
    return [*(_change_line(line, found) for line, found in by_line.values()), *changes]


def _change_line(line: CodeLine, options: Sequence[Option]) -> Change:
    where = f"{_show_file(line.file)}:{line.line}" if line.file else "where it is created"
    try:
        source = Path(line.file).read_bytes()
        new = _edit(source, line.line, options)
    except (OSError, SyntaxError, UnicodeDecodeError, ValueError):
        new = None
    if new is None:
        wanted = ", ".join(map(str, options))
        return Change(where=where, old=(line.text,) if line.text else (), new=(f"{_advise(options[0])} {wanted}",))
    rows = list(difflib.ndiff(source.decode().splitlines(), new.decode().splitlines()))
    old, added = ([row[2:].strip() for row in rows if row.startswith(sign)] for sign in "-+")
    return Change(where=where, old=tuple(old), new=tuple(added))


def _show_file(file: str) -> str:
    """Return `file` relative to the working directory if it is in there."""
    relative = os.path.relpath(file)
    return file if relative.startswith("..") else relative


def _advise(option: Option) -> str:
    called = {"loader": "the DataLoader that is read here", "threads": "set"}
    return f"# give {called.get(option.kind, 'DistributedDataParallel')}"


def _edit(source: bytes, line: int, options: Sequence[Option]) -> bytes | None:
    """Return the file with the call at `line` changed; None if there is no call that takes the options."""
    tree = ast.parse(source)
    names = _CALLED.get(options[0].kind, ())
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and node.lineno <= line <= (node.end_lineno or 0) and _name(node.func) in names
    ]
    if len(calls) != 1 or any(keyword.arg is None for keyword in calls[0].keywords):
        return None
    starts = _line_starts(source)
    edits = []
    new_names: dict[str, Any] = {}
    for option in options:
        if option.kind == "threads":
            edits += [_replace(starts, calls[0].args[0], option.value)] if calls[0].args else []
        elif option.kind == "compression" and _name(calls[0].func) != _OF_LOOP:
            edits.append(_add_hook(source, starts, tree, calls[0], option))
        else:
            new_names |= {"comm": option.value} if option.kind == "compression" else option.changes
    edits += _change_keywords(source, starts, calls[0], new_names)
    for begin, end, text in sorted(edits, reverse=True):
        source = source[:begin] + text.encode() + source[end:]
    ast.parse(source)
    return source


def _name(function: ast.expr) -> str:
    return (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )


def _line_starts(source: bytes) -> list[int]:
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    return starts


def _replace(starts: Sequence[int], node: ast.expr, value: Any) -> _Edit:
    begin, end = starts[node.lineno - 1] + node.col_offset, _end(starts, node)
    return begin, end, repr(value)


def _end(starts: Sequence[int], node: ast.expr | ast.stmt) -> int:
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    return starts[node.end_lineno - 1] + node.end_col_offset


def _change_keywords(source: bytes, starts: Sequence[int], call: ast.Call, values: Mapping[str, Any]) -> list[_Edit]:
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    edits = [_replace(starts, given[name], value) for name, value in values.items() if name in given]
    added = [f"{name}={value!r}" for name, value in values.items() if name not in given]
    if not added:
        return edits
    arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
    if not arguments:
        end = _end(starts, call) - 1
        return [*edits, (end, end, ", ".join(added))]
    last = max(arguments, key=lambda node: _end(starts, node))
    end = _end(starts, last)
    separator = ", "
    if last.lineno != call.lineno:  # one argument a line
        row = source[starts[last.lineno - 1] : starts[last.lineno]].decode()
        separator = ",\n" + row[: len(row) - len(row.lstrip())]
    return [*edits, (end, end, "".join(separator + each for each in added))]


def _add_hook(source: bytes, starts: Sequence[int], tree: ast.AST, call: ast.Call, option: Option) -> _Edit:
    """Return the edit that registers the hook of torch after the statement that wraps the model."""
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.stmt) and not hasattr(node, "body")]
    around = [node for node in statements if any(each is call for each in ast.walk(node))]
    if not around:
        raise ValueError("the call is in no simple statement")
    target = around[0].targets[0] if isinstance(around[0], ast.Assign) else None
    model = ast.unparse(target) if isinstance(target, ast.Name | ast.Attribute) else "model"
    row = source[starts[around[0].lineno - 1] : starts[around[0].lineno]].decode()
    indent = row[: len(row) - len(row.lstrip())]
    end = _end(starts, around[0])
    text = (
        f"\n{indent}from torch.distributed.algorithms.ddp_comm_hooks import default_hooks"
        f"\n{indent}{model}.register_comm_hook(None, default_hooks.{option.value}_compress_hook)"
    )
    return end, end, text
