# SPDX-License-Identifier: Apache-2.0
"""How a program's flow can part: guards, loops that end early, errors that are swallowed, rounds that are skipped."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ddpilot.watch.source import Block, Source

_ENDS = ("exit", "_exit", "quit", "abort")
_SUPPRESSES = ("suppress",)


@dataclass(frozen=True, slots=True)
class Spot:
    """A line of a source that decides something."""

    line: int
    text: str
    depends_on_rank: bool = False
    is_else: bool = False
    """It is what happens where the condition is false."""
    has_other_branch: bool = False
    """The other ranks have something else to do there."""


def guards(source: Source, blocks: Sequence[Block], line: int) -> list[Spot]:
    """The conditions that decide whether `line` is reached: around it, and those that leave before it; outermost first.

    `blocks`: those around the line that matter. Of conditions that return before it only those on the rank are told,
    and those in a loop are told by `early_exits`.
    """
    found = [
        Spot(
            block.node.lineno,
            source.text(block.node.lineno),
            source.depends_on_rank(block.node.test),
            block.part == "orelse",
            bool(block.node.orelse),
        )
        for block in blocks
        if isinstance(block.node, ast.If)
    ]
    for statement in source.before(line):
        if not isinstance(statement, ast.If) or statement.orelse or not _leaves(statement.body):
            continue
        is_in_loop = any(block.is_loop for block in source.blocks(statement.lineno))
        if source.depends_on_rank(statement.test) and not is_in_loop:
            found.append(Spot(statement.lineno, source.text(statement.lineno), True, True))
    return found


def _leaves(body: Sequence[ast.stmt]) -> bool:
    return isinstance(body[-1], ast.Return)


def early_exits(source: Source, loop: ast.AST) -> list[Spot]:
    """Where the loop may be left before its end, for a reason that is not the same on all ranks."""
    return [
        Spot(_line_of(node), _with_condition(source, node, tests), any(map(source.depends_on_rank, tests)))
        for node, tests in _walk(loop, [], nested=False)
        if (isinstance(node, (ast.Break, ast.Return)) or _is_exit(node)) and _may_differ(source, tests)
    ]


def skips(source: Source, loop: ast.AST, line: int) -> list[Spot]:
    """Where a round of the loop may be cut short before `line`, for a reason that is not the same on all ranks."""
    return [
        Spot(node.lineno, _with_condition(source, node, tests), any(map(source.depends_on_rank, tests)))
        for node, tests in _walk(loop, [], nested=False)
        if isinstance(node, ast.Continue) and tests and node.lineno < line and _may_differ(source, tests)
    ]


def swallowers(source: Source, blocks: Sequence[Block]) -> list[Spot]:
    """Handlers around a line that go on after an error, innermost first."""
    found = []
    for block in reversed(blocks):
        if isinstance(block.node, ast.Try) and block.part == "body":
            swallowing = (handler for handler in block.node.handlers if not _raises(handler))
            found += [Spot(handler.lineno, source.text(handler.lineno)) for handler in swallowing]
        if isinstance(block.node, ast.With) and any(_is_suppress(item.context_expr) for item in block.node.items):
            found.append(Spot(block.node.lineno, source.text(block.node.lineno)))
    return found


def _walk(node: ast.AST, tests: list[ast.expr], *, nested: bool) -> Iterator[tuple[ast.AST, list[ast.expr]]]:
    """What is inside a loop, with the conditions around it; what leaves or goes on in an inner loop is left out."""
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                continue
            inner = nested or isinstance(child, (ast.For, ast.AsyncFor, ast.While))
            around = [*tests, node.test] if isinstance(node, ast.If) and name in ("body", "orelse") else tests
            if not (nested and isinstance(child, (ast.Break, ast.Continue))):
                yield child, around
            yield from _walk(child, around, nested=inner)


def _may_differ(source: Source, tests: Sequence[ast.expr]) -> bool:
    return not tests or any(not source.is_the_same_everywhere(test) for test in tests)


def _line_of(node: ast.AST) -> int:
    return int(getattr(node, "lineno", 0))


def _with_condition(source: Source, node: ast.AST, tests: Sequence[ast.expr]) -> str:
    text = source.text(_line_of(node))
    condition = source.text(tests[-1].lineno) if tests else ""
    return condition if condition.startswith(("if", "elif")) and text in condition else f"{condition} {text}".strip()


def _raises(handler: ast.ExceptHandler) -> bool:
    """Whether it always ends by an error of its own, or by the end of the program."""
    goes_on = any(isinstance(node, (ast.Continue, ast.Break, ast.Return)) for node in ast.walk(handler))
    return not goes_on and (isinstance(handler.body[-1], ast.Raise) or _is_exit(handler.body[-1]))


def _is_exit(node: ast.AST) -> bool:
    call = node.value if isinstance(node, ast.Expr) else node
    if not isinstance(call, ast.Call):
        return False
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    return name in _ENDS


def _is_suppress(call: ast.expr) -> bool:
    if not isinstance(call, ast.Call):
        return False
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    return name in _SUPPRESSES
