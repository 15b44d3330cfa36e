# SPDX-License-Identifier: Apache-2.0
"""Find statements where control flow may differ between ranks: guards, early exits, swallowed errors, skipped steps."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ddpilot.source.parsed_file import Block, Source

_ENDS = ("exit", "_exit", "quit", "abort")
_SUPPRESSES = ("suppress",)
_PARTS_OF_MODELS = frozenset({"parameters", "named_parameters", "modules", "named_modules", "buffers", "named_buffers"})


@dataclass(frozen=True, slots=True)
class Spot:
    """A source line that decides which path is taken."""

    line: int
    text: str
    depends_on_rank: bool = False
    is_else: bool = False
    """True if the path is the one taken when the condition is false."""
    has_other_branch: bool = False
    """True if the condition has a different branch for the other ranks."""
    fixed_lines: range = range(0)
    """Lines that a rank runs either every time or never: the condition depends only on the rank and on constants."""


def guards(source: Source, blocks: Sequence[Block], line: int, callee: str = "") -> list[Spot]:
    """Return the conditions that decide whether `line` is reached, outermost first.

    These are conditions around it and early returns before it. `blocks`: the enclosing blocks to consider. `callee`:
    name of the function called at `line`, if known. Of the conditions that return before `line`, only those on the rank
    are included; those in a loop are left to `find_exits`.
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
    """Return conditions on the rank within the statement at `line`: `is_main and dist.barrier()`, `... if is_main`.

    Excludes those that only decide the arguments of `callee`: `share(load() if is_main else None)`.
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
    """Return the number of calls of a function named `name` in `nodes`."""
    return sum(isinstance(each, ast.Call) and call_name(each) == name for node in nodes for each in ast.walk(node))


def _leaves(body: Sequence[ast.stmt]) -> bool:
    return isinstance(body[-1], ast.Return)


def has_same_rounds(source: Source, loop: ast.AST) -> bool:
    """Return True if the loop is a `for` over a range that is the same on all ranks."""
    call = loop.iter if isinstance(loop, ast.For) else None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.func.id != "range":
        return False
    return all(source.is_the_same_everywhere(value) for value in call.args)


def goes_over_model(loop: ast.AST) -> bool:
    """Return True if the loop is a `for` over parameters, buffers or modules, whose number is the same on all ranks."""
    if not isinstance(loop, ast.For):
        return False
    calls = {call_name(node) for node in ast.walk(loop.iter) if isinstance(node, ast.Call)}
    return bool(calls & _PARTS_OF_MODELS) or _mentions(loop.iter, "param_groups")


def early_returns(source: Source, line: int) -> list[Spot]:
    """Return conditions that leave the function before `line` and may differ between ranks, nearest first."""
    return [
        Spot(statement.lineno, with_condition(source, statement.body[-1], [statement.test]))
        for statement in source.before(line)
        if isinstance(statement, ast.If) and _leaves(statement.body) and may_differ(source, [statement.test])
    ]


def handler_of(source: Source, blocks: Sequence[Block], line: int) -> Spot | None:
    """Return the `except` or `finally` among `blocks` whose `try` body contains `line`.

    Only an error leads there while other ranks are at `line`. None if there is none.
    """
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
    """Return True if `line` runs when a `with` ends: in an `__exit__`, or after the `yield` of a generator."""
    name = function.rpartition(".")[2]
    if name in ("__exit__", "__aexit__"):
        return True
    bodies = [one for one in source.functions_called(name) if one.lineno <= line <= (one.end_lineno or 0)]
    yields = [each.lineno for one in bodies for each in ast.walk(one) if isinstance(each, ast.Yield)]
    return bool(yields) and max(yields) < line


def unsynced(source: Source, blocks: Sequence[Block]) -> list[Spot]:
    """Return the `no_sync` blocks around a line that may apply in different iterations on different ranks."""
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
    """Return `continue` statements that may skip the rest of an iteration before `line`, on some ranks only."""
    return [
        Spot(node.lineno, with_condition(source, node, tests), any(map(source.depends_on_rank, tests)))
        for node, tests in walk(loop, [], nested=False)
        if isinstance(node, ast.Continue) and tests and node.lineno < line and may_differ(source, tests)
    ]


def may_start_over(source: Source, line: int) -> bool:
    """Return True if the iterable at `line` may be restarted when it is exhausted, for as long as something else lasts.

    That is the case for `cycle(...)`, for `iter(...)` outside the head of a `for`, and for a loop inside an outer one
    without a fixed number of iterations, if the inner loop yields its items or is left early, as after some steps.
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
    """Return the last part of the name of the function called."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else str(getattr(call.func, "id", ""))


def swallowers(source: Source, blocks: Sequence[Block], *, leaving: ast.AST | None = None) -> list[Spot]:
    """Return handlers and `suppress` blocks around a line that continue after an error, innermost first.

    `leaving`: an endless loop; of the handlers inside it only those that leave it are included.
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
    """Return True for `except StopIteration`: the end of an iterator, not an error."""
    return isinstance(handler.type, ast.Name) and handler.type.id in ("StopIteration", "StopAsyncIteration")


def _holds(outer: ast.AST, inner: ast.AST) -> bool:
    return line_of(outer) < line_of(inner) <= (getattr(outer, "end_lineno", 0) or 0)


def _has_way_out(handler: ast.ExceptHandler) -> bool:
    return any(isinstance(node, (ast.Break, ast.Return)) for node, _ in walk(handler, [], nested=False))


def skipping_handlers(source: Source, loop: ast.AST, line: int) -> list[Spot]:
    """Return handlers before `line` in the loop that continue with its next iteration after an error."""
    return [
        Spot(handler.lineno, source.text(handler.lineno))
        for node, _ in walk(loop, [], nested=False)
        if isinstance(node, ast.Try) and (node.end_lineno or line) < line
        for handler in node.handlers
        if not is_end_of_data(handler)
        if any(isinstance(each, ast.Continue) for each, _ in walk(handler, [], nested=False))
    ]


def walk(node: ast.AST, tests: list[ast.expr], *, nested: bool) -> Iterator[tuple[ast.AST, list[ast.expr]]]:
    """Yield the nodes inside a loop with the conditions around each.

    Excludes nested functions, and `break` and `continue` of inner loops.
    """
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
    """Return True if code under the conditions `tests` may not run alike on all ranks."""
    return not tests or any(not source.is_the_same_everywhere(test) for test in tests)


def line_of(node: ast.AST) -> int:
    """Return the line number of `node`, 0 if it has none."""
    return int(getattr(node, "lineno", 0))


def with_condition(source: Source, node: ast.AST, tests: Sequence[ast.expr]) -> str:
    """Return the source line of `node`, preceded by that of the nearest condition around it."""
    text = source.text(line_of(node))
    condition = source.text(tests[-1].lineno) if tests else ""
    return condition if condition.startswith(("if", "elif")) and text in condition else f"{condition} {text}".strip()


def _raises(handler: ast.ExceptHandler) -> bool:
    """True if the handler always ends by raising an exception or by ending the program."""
    goes_on = any(isinstance(node, (ast.Continue, ast.Break, ast.Return)) for node in ast.walk(handler))
    return not goes_on and (isinstance(handler.body[-1], ast.Raise) or is_exit(handler.body[-1]))


def is_exit(node: ast.AST) -> bool:
    """Return True if `node` ends the program: `sys.exit()`, `raise SystemExit`."""
    if isinstance(node, ast.Raise):
        raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
        return isinstance(raised, ast.Name) and raised.id == "SystemExit"
    call = node.value if isinstance(node, ast.Expr) else node
    if not isinstance(call, ast.Call):
        return False
    return call_name(call) in _ENDS


def _is_suppress(call: ast.expr) -> bool:
    return isinstance(call, ast.Call) and call_name(call) in _SUPPRESSES
