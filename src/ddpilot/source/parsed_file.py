# SPDX-License-Identifier: Apache-2.0
"""Parse the user's source: the blocks around a line, and which conditions depend on the rank."""

from __future__ import annotations

import ast
import linecache
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from ddpilot.user_files import CodeLine

Chain = tuple[CodeLine, ...]
"""Calls in the user's code, outermost first: each is the line that made the next call."""


_RANK_NAME = re.compile(
    r"""_*(?:(?:is|am|i|on|if|not|get|my|own|this|the|cur|current)_?)*(?:
      # rank, LOCAL_RANK, ddp_rank, data_parallel_rank, rank0, is_rank_zero; not lora_rank, rank_loss, matrix_rank
      (?:(?:local|global|world|node|group|intra|inter|dist|distributed|torch|ddp|fsdp|dp|tp|pp|cp|ep|sp|
           (?:data|tensor|model|pipeline|expert|context|sequence)_?parallel|
           process|proc|worker|gpu|cuda|device|host|replica|shard|mpi|slurm|hvd)_?)*
        rank(?:_?(?:id|idx|index|zero|0|only))*
      # main_process, is_local_main_process, master_process, is_first_worker
      | (?:local_|global_|world_)?(?:main|master|chief|leader|primary|first|zero)_?
        (?:process|proc|rank|worker)(?:_only)?
      | (?:local_|global_|world_)*process_?(?:index|idx|zero)
      | master
    )_*
    | _*(?:is|am|on|not)_?(?:is_?)?(?:not_?)?(?:(?:local|global|world)_?)?(?:main|master|chief|leader|zero|root)_*
    """,
    re.IGNORECASE | re.VERBOSE,
)
"""Matches names that hold a process's rank, or whether it is a particular rank."""

_Function = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_Loop = (ast.For, ast.AsyncFor, ast.While)


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """A compound statement around a line, and the part of it that contains the line."""

    node: ast.stmt | ast.ExceptHandler
    part: str

    @property
    def is_loop(self) -> bool:
        """True if the line is in the body of a loop."""
        return isinstance(self.node, _Loop) and self.part == "body"

    def same_as(self, other: Block) -> bool:
        """Return True if `other` is the same part of the same statement."""
        return self.node is other.node and self.part == other.part


class Source:
    """One parsed source file of the user."""

    def __init__(self, text: str) -> None:
        self._lines = text.splitlines()
        self._tree = ast.parse(text)

    def text(self, line: int) -> str:
        """Return the line without indentation; empty if there is no such line."""
        return self._lines[line - 1].strip() if 0 < line <= len(self._lines) else ""

    def blocks(self, line: int) -> tuple[Block, ...]:
        """Return the compound statements around `line`, outermost first, within the innermost function around it."""
        return tuple(Block(node, part) for _, node, part in self._path(line) if part)

    def statement(self, line: int) -> ast.AST | None:
        """Return the innermost statement that contains `line`; a compound statement if the line is in its header."""
        path = self._path(line)
        return path[-1][1] if path else None

    def statements_before(self, line: int) -> Iterator[ast.stmt]:
        """Yield the statements before `line` in the bodies around it, within its function, innermost body first."""
        for body, node, _ in reversed(self._path(line)):
            yield from (each for each in reversed(body) if each.lineno < node.lineno)

    def _path(self, line: int) -> list[tuple[Sequence[ast.stmt], ast.stmt | ast.ExceptHandler, str]]:
        """Return (body, statement in it, part of the statement) around `line`, outermost first, within its function.

        The part is empty if the line is in the header of the statement, or if the statement has no parts.
        """
        path: list[tuple[Sequence[ast.stmt], ast.stmt | ast.ExceptHandler, str]] = []
        body: Sequence[ast.stmt] = self._tree.body
        while (node := _holding(body, line)) is not None:
            part, inner = _part_holding(node, line)
            path.append((body, node, part))
            if isinstance(node, (*_Function, ast.ClassDef)):
                path.clear()  # what surrounds a function definition does not surround its calls
            body = inner
        return path

    def functions_called(self, name: str) -> list[ast.FunctionDef]:
        """Return the functions of this file that are named `name`."""
        return [node for node in ast.walk(self._tree) if isinstance(node, ast.FunctionDef) and node.name == name]

    def depends_on_rank(self, test: ast.expr) -> bool:
        """Return True if a condition depends on the rank, also through names that are assigned from it."""
        return self._mentions_rank(test, depth=3)

    def is_fixed(self, test: ast.expr) -> bool:
        """Return True if a condition uses only the rank, constants and settings, so that it never changes on a rank."""
        bases = {id(node.value) for node in ast.walk(test) if isinstance(node, ast.Attribute)}
        for node in ast.walk(test):
            name = name_of(node)
            if not name or id(node) in bases or name.isupper():
                continue
            if _RANK_NAME.fullmatch(name):
                if isinstance(node, ast.Name) and name in self._loop_targets():
                    return False
            elif not self._is_made_from_rank(name, isinstance(node, ast.Attribute), 3):
                return False
        return True

    def _loop_targets(self) -> set[str]:
        loops = (node.target for node in ast.walk(self._tree) if isinstance(node, (ast.For, ast.comprehension)))
        return {each.id for target in loops for each in ast.walk(target) if isinstance(each, ast.Name)}

    def _mentions_rank(self, value: ast.AST, depth: int) -> bool:
        for node in ast.walk(value):
            name = name_of(node)
            if name and _RANK_NAME.fullmatch(name):
                return True
            if isinstance(node, ast.Constant) and node.value in ("RANK", "LOCAL_RANK", "SLURM_PROCID"):
                return True
            if depth and name and self._is_made_from_rank(name, isinstance(node, ast.Attribute), depth - 1):
                return True
        return False

    def _is_made_from_rank(self, name: str, is_attribute: bool, depth: int) -> bool:
        """True if the values assigned to `name`, or returned by functions of that name, depend on the rank."""
        values = [value for target, of, value in self._assignments() if (target, of) == (name, is_attribute)]
        for function in self.functions_called(name):
            values += [each.value for each in ast.walk(function) if isinstance(each, ast.Return) and each.value]
        return any(self._mentions_rank(value, depth) for value in values)

    def values_of(self, name: ast.Name | ast.Attribute) -> list[ast.expr]:
        """Return the values that this file assigns to a variable or attribute of this name, anywhere."""
        wanted = (name_of(name), isinstance(name, ast.Attribute))
        return [value for target, of, value in self._assignments() if (target, of) == wanted]

    def _assignments(self) -> Iterator[tuple[str, bool, ast.expr]]:
        """Yield (name, True for an attribute, value) of every assignment."""
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Assign) and len(node.targets) == 1:
                pairs = _unpack(node.targets[0], node.value)
            elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
                pairs = [(node.target, node.value)]
            else:
                continue
            for target, value in pairs:
                if isinstance(target, (ast.Name, ast.Attribute)):
                    yield name_of(target), isinstance(target, ast.Attribute), value

    def is_same_on_all_ranks(self, test: ast.expr) -> bool:
        """Return True if a condition uses only constants, settings and counters, which are the same on all ranks."""
        if self.depends_on_rank(test):
            return False
        counters = set(self._counters())
        for node in ast.walk(test):
            if isinstance(node, ast.Call):
                return False
            if isinstance(node, ast.Name) and not (node.id in counters or self._is_setting(node.id)):
                return False
        return True

    def _is_setting(self, name: str) -> bool:
        """True if the name is one of a setting and no items are assigned to it."""
        if not name.isupper():
            return name in _SETTINGS
        stores = (node for node in ast.walk(self._tree) if isinstance(node, ast.Subscript))
        return not any(isinstance(node.ctx, ast.Store) and name_of(node.value) == name for node in stores)

    def _counters(self) -> Iterator[str]:
        for node in ast.walk(self._tree):
            if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
                if isinstance(node.value, ast.Constant):
                    yield node.target.id
            elif isinstance(node, (ast.For, ast.comprehension)) and isinstance(node.iter, ast.Call):
                target = node.target
                if name_of(node.iter.func) == "enumerate" and isinstance(target, ast.Tuple):
                    target = target.elts[0]
                elif name_of(node.iter.func) != "range":
                    continue
                if isinstance(target, ast.Name):
                    yield target.id
            elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
                # A number that is assigned once; with more assignments it is an ordinary variable.
                yield from self._set_once(node)

    def _set_once(self, node: ast.Assign) -> Iterator[str]:
        names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        stores = [
            each.id for each in ast.walk(self._tree) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
        ]
        yield from (name for name in names if stores.count(name) == 1)


_SETTINGS = frozenset({"args", "config", "cfg", "opt", "options", "self", "hparams", "len"})


class Sources:
    """The user's source files. `texts`: by name, sources that cannot be read from a file, such as cells."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self._texts = texts

    def find(self, frame: CodeLine) -> Source | None:
        """Return the source of `frame`; None if there is none, or if it has changed since."""
        text = self._texts.get(frame.file) or _read(frame.file)
        source = _parse(text) if text else None
        if source is None or (frame.text and source.text(frame.line)[:200] != frame.text[:200]):
            return None
        return source

    def line(self, frame: CodeLine) -> str:
        """Return the text of the line without indentation; empty if unknown."""
        source = None if frame.text else self.find(frame)
        return source.text(frame.line) if source is not None else frame.text


def _read(file: str) -> str:
    linecache.checkcache(file)
    return "".join(linecache.getlines(file))


@lru_cache(maxsize=32)
def _parse(text: str) -> Source | None:
    try:
        return Source(text)
    except (SyntaxError, ValueError, RecursionError):  # as in a cell with magics
        return None


def _holding(body: Sequence[ast.stmt], line: int) -> ast.stmt | ast.ExceptHandler | None:
    for node in body:
        start = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])
        if start <= line <= (node.end_lineno or node.lineno):
            return node
    return None


def _part_holding(node: ast.AST, line: int) -> tuple[str, list[ast.stmt]]:
    """Return name and body of the part of `node` that contains `line`; empty if no part does, as in its header."""
    for part in ("body", "orelse", "handlers", "finalbody"):
        body = getattr(node, part, None)
        if isinstance(body, list) and _holding(body, line) is not None:
            return part, body
    for number, case in enumerate(getattr(node, "cases", ())):
        if _holding(case.body, line) is not None:
            return f"case {number}", case.body
    return "", []


def _unpack(target: ast.expr, value: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
    """Pair targets with values: ``a, b = c, d`` element by element; for ``a, b = f()`` the call with each target."""
    if not isinstance(target, (ast.Tuple, ast.List)):
        return [(target, value)]
    values = value.elts if isinstance(value, (ast.Tuple, ast.List)) else []
    alike = len(values) == len(target.elts) and not any(isinstance(each, ast.Starred) for each in target.elts)
    return list(zip(target.elts, values if alike else [value] * len(target.elts), strict=True))


def name_of(node: ast.AST) -> str:
    """Return a variable's name, or the last part of an attribute's; empty for other expressions."""
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else ""
