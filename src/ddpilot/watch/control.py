# SPDX-License-Identifier: Apache-2.0
"""How a program's flow can part: guards, loops that end early, errors that are swallowed, rounds that are skipped."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ddpilot.watch.source import Block, Source

_ENDS = ("exit", "_exit", "quit", "abort")
_SUPPRESSES = ("suppress",)
_PARTS_OF_MODELS = frozenset({"parameters", "named_parameters", "modules", "named_modules", "buffers", "named_buffers"})


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
    fixed_lines: range = range(0)
    """Lines behind it that a rank runs each time or never: the condition is made of the rank and constants alone."""


def guards(source: Source, blocks: Sequence[Block], line: int, callee: str = "") -> list[Spot]:
    """The conditions that decide whether `line` is reached: around it, and those that leave before it; outermost first.

    `blocks`: those around the line that matter; `callee`: what is called there, where that is known. Of conditions that
    return before it only those on the rank are told, and those in a loop are told by `find_exits`.
    """
    found = [spot for block in blocks if (spot := _condition(source, block)) is not None]
    found += _inline_conditions(source, line, callee)
    for statement in source.before(line):
        if not isinstance(statement, ast.If) or statement.orelse or not _leaves(statement.body):
            continue
        is_in_loop = any(block.is_loop for block in source.blocks(statement.lineno))
        if source.depends_on_rank(statement.test) and not is_in_loop:
            lines = range((statement.end_lineno or statement.lineno) + 1, line + 1)
            fixed = lines if source.is_fixed(statement.test) else range(0)
            found.append(Spot(statement.lineno, source.text(statement.lineno), True, True, fixed_lines=fixed))
    return found


def _condition(source: Source, block: Block) -> Spot | None:
    node = block.node
    if isinstance(node, ast.If):
        is_else = block.part == "orelse"
        depends = source.depends_on_rank(node.test)
        lines = _lines_of(node.orelse if is_else else node.body)
        fixed = lines if depends and source.is_fixed(node.test) else range(0)
        return Spot(node.lineno, source.text(node.lineno), depends, is_else, bool(node.orelse), fixed)
    if isinstance(node, ast.Match) and block.part.startswith("case "):
        case = node.cases[int(block.part.removeprefix("case "))]
        asked = [node.subject, *([case.guard] if case.guard is not None else [])]
        others = any(not isinstance(each.body[0], ast.Pass) for each in node.cases if each is not case)
        text = f"{source.text(node.lineno)} {source.text(case.pattern.lineno)}"
        return Spot(node.lineno, text, any(map(source.depends_on_rank, asked)), False, others)
    return None


def _inline_conditions(source: Source, line: int, callee: str) -> list[Spot]:
    """Conditions on the rank within the statement of `line` itself: `is_main and dist.barrier()`, `... if is_main`.

    Not those that only decide what `callee` is given: `share(load() if is_main else None)`.
    """
    statement = source.statement(line)
    if statement is None or hasattr(statement, "body"):
        return []
    found = []
    for node in ast.walk(statement):
        test, is_else, decided = None, False, []
        if isinstance(node, ast.BoolOp) and any(map(_calls, node.values[1:])):
            test, is_else, decided = node.values[0], isinstance(node.op, ast.Or), node.values[1:]
        elif isinstance(node, ast.IfExp) and _calls(node.body) != _calls(node.orelse):
            test, is_else, decided = node.test, _calls(node.orelse), [node.body, node.orelse]
        if test is None or (_num_calls([statement], callee) and not _num_calls(decided, callee)):
            continue
        if source.depends_on_rank(test):
            fixed = _lines_of([statement]) if source.is_fixed(test) else range(0)
            found.append(Spot(test.lineno, source.text(test.lineno), True, is_else, fixed_lines=fixed))
    return found


def _lines_of(body: Sequence[ast.AST]) -> range:
    return range(line_of(body[0]), (getattr(body[-1], "end_lineno", 0) or 0) + 1)


def _calls(node: ast.AST) -> bool:
    return any(isinstance(each, ast.Call) for each in ast.walk(node))


def _num_calls(nodes: Sequence[ast.AST], name: str) -> int:
    """How many calls of what is named `name` are in `nodes`."""
    return sum(isinstance(each, ast.Call) and call_name(each) == name for node in nodes for each in ast.walk(node))


def _leaves(body: Sequence[ast.stmt]) -> bool:
    return isinstance(body[-1], ast.Return)


def has_same_rounds(source: Source, loop: ast.AST) -> bool:
    """Whether it is a `for` over a range that is the same on all ranks."""
    call = loop.iter if isinstance(loop, ast.For) else None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.func.id != "range":
        return False
    return all(source.is_the_same_everywhere(value) for value in call.args)


def goes_over_model(loop: ast.AST) -> bool:
    """Whether it is a `for` over parameters, buffers or modules, of which all ranks have as many."""
    if not isinstance(loop, ast.For):
        return False
    calls = {call_name(node) for node in ast.walk(loop.iter) if isinstance(node, ast.Call)}
    return bool(calls & _PARTS_OF_MODELS) or _mentions(loop.iter, "param_groups")


def early_returns(source: Source, line: int) -> list[Spot]:
    """Conditions that leave the function before `line` and may not be the same on all ranks, the nearest first."""
    return [
        Spot(statement.lineno, with_condition(source, statement.body[-1], [statement.test]))
        for statement in source.before(line)
        if isinstance(statement, ast.If) and _leaves(statement.body) and may_differ(source, [statement.test])
    ]


def handler_of(source: Source, blocks: Sequence[Block], line: int) -> Spot | None:
    """The handler or `finally` among `blocks` to which only an error leads while others are at `line`."""
    for block in blocks:
        if not isinstance(block.node, ast.Try) or block.part not in ("handlers", "finalbody"):
            continue
        if not (block.node.body[0].lineno <= line <= (block.node.body[-1].end_lineno or 0)):
            continue
        if block.part == "finalbody":
            return Spot(block.node.lineno, "finally:")
        inner = next((each.node for each in blocks if isinstance(each.node, ast.ExceptHandler)), None)
        return Spot(inner.lineno, source.text(inner.lineno)) if inner is not None else None
    return None


def is_behind_yield(source: Source, line: int, function: str) -> bool:
    """Whether `line` is in an `__exit__`, or in a generator behind its `yield`: what a `with` calls when it is left."""
    name = function.rpartition(".")[2]
    if name in ("__exit__", "__aexit__"):
        return True
    bodies = [one for one in source.functions_called(name) if one.lineno <= line <= (one.end_lineno or 0)]
    yields = [each.lineno for one in bodies for each in ast.walk(one) if isinstance(each, ast.Yield)]
    return bool(yields) and max(yields) < line


def unsynced(source: Source, blocks: Sequence[Block]) -> list[Spot]:
    """Blocks around a line in which DDP exchanges nothing, in rounds that are not the same on all ranks."""
    return [
        Spot(block.node.lineno, source.text(block.node.lineno))
        for block in blocks
        if isinstance(block.node, ast.With)
        and any(_mentions(item.context_expr, "no_sync") for item in block.node.items)
        and not all(source.is_the_same_everywhere(item.context_expr) for item in block.node.items)
    ]


def _mentions(node: ast.AST, name: str) -> bool:
    return any(getattr(each, "attr", getattr(each, "id", "")) == name for each in ast.walk(node))


def skips(source: Source, loop: ast.AST, line: int) -> list[Spot]:
    """Where a round of the loop may be cut short before `line`, for a reason that is not the same on all ranks."""
    return [
        Spot(node.lineno, with_condition(source, node, tests), any(map(source.depends_on_rank, tests)))
        for node, tests in walk(loop, [], nested=False)
        if isinstance(node, ast.Continue) and tests and node.lineno < line and may_differ(source, tests)
    ]


def may_start_over(source: Source, line: int) -> bool:
    """Whether what `line` goes over may be begun anew at its end, for as long as something else lasts.

    An iterator that is held by hand; or a loop inside another that counts no rounds, which hands on what it gets or is
    left from inside, as after a number of steps.
    """
    statement = source.statement(line)
    if statement is None:
        return False
    head = statement.iter if isinstance(statement, (ast.For, ast.AsyncFor)) else statement
    calls = {call_name(node) for node in ast.walk(head) if isinstance(node, ast.Call)}
    if "cycle" in calls or ("iter" in calls and head is statement):
        return True
    if not any(block.is_loop and _counts_nothing(block.node) for block in source.blocks(line)):
        return False
    leaves = (ast.Break, ast.Return, ast.Yield, ast.YieldFrom)
    inner = [statement, *(node for node, _ in walk(statement, [], nested=False))]
    return any(isinstance(node, leaves) or is_exit(node) for node in inner)


def _counts_nothing(loop: ast.AST) -> bool:
    if isinstance(loop, ast.While):
        return True
    calls = [node for node in ast.walk(getattr(loop, "iter", loop)) if isinstance(node, ast.Call)]
    return isinstance(loop, ast.For) and any(call_name(call) in ("count", "repeat") for call in calls)


def call_name(call: ast.Call) -> str:
    """The last part of the name of what is called."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else str(getattr(call.func, "id", ""))


def swallowers(source: Source, blocks: Sequence[Block], *, leaving: ast.AST | None = None) -> list[Spot]:
    """Handlers around a line that go on after an error, innermost first.

    `leaving`: an endless loop; of the handlers in it only those count that leave it.
    """
    found = []
    for block in reversed(blocks):
        if isinstance(block.node, ast.Try) and block.part == "body":
            swallowing = [each for each in block.node.handlers if not (_raises(each) or is_end_of_data(each))]
            if leaving is not None and _holds(leaving, block.node):
                swallowing = [handler for handler in swallowing if _has_way_out(handler)]
            found += [Spot(handler.lineno, source.text(handler.lineno)) for handler in swallowing]
        is_inside = leaving is not None and _holds(leaving, block.node)
        if (
            isinstance(block.node, ast.With)
            and not is_inside
            and any(_is_suppress(item.context_expr) for item in block.node.items)
        ):
            found.append(Spot(block.node.lineno, source.text(block.node.lineno)))
    return found


def is_end_of_data(handler: ast.ExceptHandler) -> bool:
    """Whether it is `except StopIteration`: an iterator has come to its end, which is no error."""
    return isinstance(handler.type, ast.Name) and handler.type.id in ("StopIteration", "StopAsyncIteration")


def _holds(outer: ast.AST, inner: ast.AST) -> bool:
    return line_of(outer) < line_of(inner) <= (getattr(outer, "end_lineno", 0) or 0)


def _has_way_out(handler: ast.ExceptHandler) -> bool:
    return any(isinstance(node, (ast.Break, ast.Return)) for node, _ in walk(handler, [], nested=False))


def skipping_handlers(source: Source, loop: ast.AST, line: int) -> list[Spot]:
    """Handlers before `line` in the loop that go on with its next round after an error."""
    return [
        Spot(handler.lineno, source.text(handler.lineno))
        for node, _ in walk(loop, [], nested=False)
        if isinstance(node, ast.Try) and (node.end_lineno or line) < line
        for handler in node.handlers
        if not is_end_of_data(handler)
        if any(isinstance(each, ast.Continue) for each, _ in walk(handler, [], nested=False))
    ]


def walk(node: ast.AST, tests: list[ast.expr], *, nested: bool) -> Iterator[tuple[ast.AST, list[ast.expr]]]:
    """What is inside a loop, with the conditions around it; what leaves or goes on in an inner loop is left out."""
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                continue
            inner = nested or isinstance(child, (ast.For, ast.AsyncFor, ast.While))
            around = [*tests, node.test] if isinstance(node, ast.If) and name in ("body", "orelse") else tests
            if not (nested and isinstance(child, (ast.Break, ast.Continue))):
                yield child, around
            yield from walk(child, around, nested=inner)


def may_differ(source: Source, tests: Sequence[ast.expr]) -> bool:
    """Whether what is behind `tests` may not be the same on all ranks."""
    return not tests or any(not source.is_the_same_everywhere(test) for test in tests)


def line_of(node: ast.AST) -> int:
    """Its number."""
    return int(getattr(node, "lineno", 0))


def with_condition(source: Source, node: ast.AST, tests: Sequence[ast.expr]) -> str:
    """The text of its line, after that of the nearest condition around it."""
    text = source.text(line_of(node))
    condition = source.text(tests[-1].lineno) if tests else ""
    return condition if condition.startswith(("if", "elif")) and text in condition else f"{condition} {text}".strip()


def _raises(handler: ast.ExceptHandler) -> bool:
    """Whether it always ends by an error of its own, or by the end of the program."""
    goes_on = any(isinstance(node, (ast.Continue, ast.Break, ast.Return)) for node in ast.walk(handler))
    return not goes_on and (isinstance(handler.body[-1], ast.Raise) or is_exit(handler.body[-1]))


def is_exit(node: ast.AST) -> bool:
    """Whether it ends the program: `sys.exit()`, `raise SystemExit`."""
    if isinstance(node, ast.Raise):
        raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
        return isinstance(raised, ast.Name) and raised.id == "SystemExit"
    call = node.value if isinstance(node, ast.Expr) else node
    if not isinstance(call, ast.Call):
        return False
    return call_name(call) in _ENDS


def _is_suppress(call: ast.expr) -> bool:
    return isinstance(call, ast.Call) and call_name(call) in _SUPPRESSES
