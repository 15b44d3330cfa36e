# SPDX-License-Identifier: Apache-2.0
"""Find statements where control flow may differ between ranks.

These are guards, early exits, suppressed errors, skipped iterations, ends of loops, and loops over sets.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ddpilot.source.parsed_file import Block, Source, name_of

_EXIT_CALLS = ("exit", "_exit", "quit", "abort")
_PARTS_OF_MODELS = frozenset({"parameters", "named_parameters", "modules", "named_modules", "buffers", "named_buffers"})


@dataclass(frozen=True, slots=True)
class DecisionPoint:
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


def _point(source: Source, node: ast.stmt | ast.ExceptHandler) -> DecisionPoint:
    return DecisionPoint(node.lineno, source.text(node.lineno))


def guards(source: Source, blocks: Sequence[Block], line: int) -> list[DecisionPoint]:
    """Return the conditions that decide whether `line` is reached, outermost first.

    These are the conditions of `blocks`, which are around the line, a condition within its statement, and conditions on
    the rank that return before it, except for those in a loop: see `find_exits`.
    """
    found = [point for block in blocks if (point := _condition(source, block)) is not None]
    found += _inline_condition(source, line)
    for statement in source.statements_before(line):
        if not isinstance(statement, ast.If) or statement.orelse or not isinstance(statement.body[-1], ast.Return):
            continue
        is_in_loop = any(block.is_loop for block in source.blocks(statement.lineno))
        if source.depends_on_rank(statement.test) and not is_in_loop:
            lines = range((statement.end_lineno or statement.lineno) + 1, line + 1)
            fixed = lines if source.is_fixed(statement.test) else range(0)
            found.append(DecisionPoint(statement.lineno, source.text(statement.lineno), True, True, fixed_lines=fixed))
    return found


def _condition(source: Source, block: Block) -> DecisionPoint | None:
    node = block.node
    if isinstance(node, ast.If):
        is_else = block.part == "orelse"
        depends = source.depends_on_rank(node.test)
        lines = _lines_of(node.orelse if is_else else node.body)
        fixed = lines if depends and source.is_fixed(node.test) else range(0)
        return DecisionPoint(node.lineno, source.text(node.lineno), depends, is_else, bool(node.orelse), fixed)
    if isinstance(node, ast.Match) and block.part.startswith("case "):
        case = node.cases[int(block.part.removeprefix("case "))]
        asked = [node.subject, *([case.guard] if case.guard is not None else [])]
        others = any(not isinstance(each.body[0], ast.Pass) for each in node.cases if each is not case)
        text = f"{source.text(node.lineno)} {source.text(case.pattern.lineno)}"
        return DecisionPoint(node.lineno, text, any(map(source.depends_on_rank, asked)), False, others)
    return None


def _inline_condition(source: Source, line: int) -> list[DecisionPoint]:
    """Return the condition on the rank in a statement such as `is_main and f()` or `x = f() if is_main else 0`."""
    value = getattr(source.statement(line), "value", None)
    if isinstance(value, ast.BoolOp) and any(map(_calls, value.values[1:])):
        test, is_else = value.values[0], isinstance(value.op, ast.Or)
    elif isinstance(value, ast.IfExp) and _calls(value.body) != _calls(value.orelse):
        test, is_else = value.test, _calls(value.orelse)
    else:
        return []
    if not source.depends_on_rank(test):
        return []
    fixed = _lines_of([value]) if source.is_fixed(test) else range(0)
    return [DecisionPoint(test.lineno, source.text(test.lineno), True, is_else, fixed_lines=fixed)]


def _lines_of(body: Sequence[ast.AST]) -> range:
    return range(line_of(body[0]), (getattr(body[-1], "end_lineno", 0) or 0) + 1)


def _calls(node: ast.AST) -> bool:
    return any(isinstance(each, ast.Call) for each in ast.walk(node))


def has_same_iterations(source: Source, loop: ast.AST) -> bool:
    """Return True if the loop is a `for` over a range that is the same on all ranks."""
    call = loop.iter if isinstance(loop, ast.For) else None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.func.id != "range":
        return False
    return all(source.is_same_on_all_ranks(value) for value in call.args)


def iterates_model(loop: ast.AST) -> bool:
    """Return True if the loop is a `for` over parameters, buffers or modules, whose number is the same on all ranks."""
    if not isinstance(loop, ast.For):
        return False
    calls = {name_of(node.func) for node in ast.walk(loop.iter) if isinstance(node, ast.Call)}
    return bool(calls & _PARTS_OF_MODELS) or _mentions(loop.iter, "param_groups")


def early_returns(source: Source, line: int) -> list[DecisionPoint]:
    """Return conditions that leave the function before `line` and may differ between ranks, nearest first."""
    return [
        DecisionPoint(statement.lineno, with_condition(source, statement.body[-1], [statement.test]))
        for statement in source.statements_before(line)
        if isinstance(statement, ast.If)
        and isinstance(statement.body[-1], ast.Return)
        and may_differ(source, [statement.test])
    ]


def handler_of(source: Source, blocks: Sequence[Block], line: int) -> DecisionPoint | None:
    """Return the `except` or `finally` among `blocks` whose `try` body contains `line`.

    Only an error leads there while other ranks are at `line`. None if there is none.
    """
    for block in blocks:
        if not isinstance(block.node, ast.Try) or block.part not in ("handlers", "finalbody"):
            continue
        if not (block.node.body[0].lineno <= line <= (block.node.body[-1].end_lineno or 0)):
            continue
        if block.part == "finalbody":
            return DecisionPoint(block.node.lineno, "finally:")
        inner = next((each.node for each in blocks if isinstance(each.node, ast.ExceptHandler)), None)
        return _point(source, inner) if inner is not None else None
    return None


def is_behind_yield(source: Source, line: int, function: str) -> bool:
    """Return True if `line` runs when a `with` ends: in an `__exit__`, or after the `yield` of a generator."""
    name = function.rpartition(".")[2]
    if name in ("__exit__", "__aexit__"):
        return True
    bodies = [one for one in source.functions_called(name) if one.lineno <= line <= (one.end_lineno or 0)]
    yields = [each.lineno for one in bodies for each in ast.walk(one) if isinstance(each, ast.Yield)]
    return bool(yields) and max(yields) < line


def no_sync_blocks(source: Source, blocks: Sequence[Block]) -> list[DecisionPoint]:
    """Return the `no_sync` blocks around a line that may apply in different iterations on different ranks."""
    return [
        _point(source, block.node)
        for block in blocks
        if isinstance(block.node, ast.With)
        and any(_mentions(item.context_expr, "no_sync") for item in block.node.items)
        and not all(source.is_same_on_all_ranks(item.context_expr) for item in block.node.items)
    ]


def _mentions(node: ast.AST, name: str) -> bool:
    return any(name_of(each) == name for each in ast.walk(node))


def continues(source: Source, loop: ast.AST, line: int) -> list[DecisionPoint]:
    """Return `continue` statements that may skip the rest of an iteration before `line`, on some ranks only."""
    return [
        DecisionPoint(node.lineno, with_condition(source, node, tests), any(map(source.depends_on_rank, tests)))
        for node, tests in walk_loop(loop)
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
    calls = {name_of(node.func) for node in ast.walk(head) if isinstance(node, ast.Call)}
    if "cycle" in calls or ("iter" in calls and head is statement):
        return True
    if not any(block.is_loop and _counts_nothing(block.node) for block in source.blocks(line)):
        return False
    leaves = (ast.Break, ast.Return, ast.Yield, ast.YieldFrom)
    inner = [statement, *(node for node, _ in walk_loop(statement))]
    return any(isinstance(node, leaves) or is_exit(node) for node in inner)


def _counts_nothing(loop: ast.AST) -> bool:
    if isinstance(loop, ast.While):
        return True
    calls = [node for node in ast.walk(getattr(loop, "iter", loop)) if isinstance(node, ast.Call)]
    return isinstance(loop, ast.For) and any(name_of(call.func) in ("count", "repeat") for call in calls)


def suppressing_handlers(
    source: Source, blocks: Sequence[Block], *, leaving: ast.AST | None = None
) -> list[DecisionPoint]:
    """Return handlers and `suppress` blocks around a line that continue after an error, innermost first.

    `leaving`: an endless loop; of the handlers inside it only those that leave it are included.
    """
    found = []
    for block in reversed(blocks):
        if isinstance(block.node, ast.Try) and block.part == "body":
            handlers = [each for each in block.node.handlers if not (_raises(each) or catches_data_end(each))]
            if leaving is not None and _contains(leaving, block.node):
                handlers = [each for each in handlers if _leaves_loop(each)]
            found += [_point(source, each) for each in handlers]
        is_outside = leaving is None or not _contains(leaving, block.node)
        if isinstance(block.node, ast.With) and is_outside:
            calls = [item.context_expr for item in block.node.items if isinstance(item.context_expr, ast.Call)]
            found += [_point(source, block.node)] if any(name_of(call.func) == "suppress" for call in calls) else []
    return found


def catches_data_end(handler: ast.ExceptHandler) -> bool:
    """Return True for `except StopIteration`: the end of an iterator, not an error."""
    return isinstance(handler.type, ast.Name) and handler.type.id in ("StopIteration", "StopAsyncIteration")


def _contains(outer: ast.AST, inner: ast.AST) -> bool:
    return line_of(outer) < line_of(inner) <= (getattr(outer, "end_lineno", 0) or 0)


def _leaves_loop(handler: ast.ExceptHandler) -> bool:
    return any(isinstance(node, (ast.Break, ast.Return)) for node, _ in walk_loop(handler))


def skipping_handlers(source: Source, loop: ast.AST, line: int) -> list[DecisionPoint]:
    """Return handlers before `line` in the loop that continue with its next iteration after an error."""
    return [
        _point(source, handler)
        for node, _ in walk_loop(loop)
        if isinstance(node, ast.Try) and (node.end_lineno or line) < line
        for handler in node.handlers
        if not catches_data_end(handler)
        if any(isinstance(each, ast.Continue) for each, _ in walk_loop(handler))
    ]


def walk_loop(
    node: ast.AST, tests: Sequence[ast.expr] = (), *, nested: bool = False
) -> Iterator[tuple[ast.AST, Sequence[ast.expr]]]:
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
            yield from walk_loop(child, around, nested=inner)


def may_differ(source: Source, tests: Sequence[ast.expr]) -> bool:
    """Return True if code under the conditions `tests` may not run alike on all ranks."""
    return not tests or any(not source.is_same_on_all_ranks(test) for test in tests)


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
    continues = any(isinstance(node, (ast.Continue, ast.Break, ast.Return)) for node in ast.walk(handler))
    return not continues and (isinstance(handler.body[-1], ast.Raise) or is_exit(handler.body[-1]))


def is_exit(node: ast.AST) -> bool:
    """Return True if `node` ends the program: `sys.exit()`, `raise SystemExit`."""
    if isinstance(node, ast.Raise):
        raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
        return isinstance(raised, ast.Name) and raised.id == "SystemExit"
    call = node.value if isinstance(node, ast.Expr) else node
    return isinstance(call, ast.Call) and name_of(call.func) in _EXIT_CALLS


_PASS_ON = ("enumerate", "tqdm", "trange", "iter", "map")


def find_exits(
    source: Source, loops: Sequence[ast.AST], *, has_ended: bool
) -> tuple[list[DecisionPoint], list[DecisionPoint]]:
    """Return where `loops`, outermost first, may be left for a reason that may differ between ranks, and at data's end.

    `has_ended`: the exit may also have ended the program. For an endless loop, exits whose conditions look the same on
    all ranks are included: nothing else can have ended it.
    """
    never_ends = is_endless(source, loops[0])
    found = [
        each
        for loop in loops[: 1 if never_ends else None]
        for each in (*_early_exits(source, loop, has_ended=has_ended), *_while_condition(source, loop))
    ]
    if never_ends and not found:
        found = [(point, False) for point, _ in _early_exits(source, loops[0], has_ended=has_ended, also_same=True)]
    early = [point for point, is_data_end in found if not is_data_end]
    return early, [point for point, is_data_end in found if is_data_end]


def is_endless(source: Source, loop: ast.AST) -> bool:
    """Return True if a loop ends only when it is left: `while True`, `for i in count()`, an endless generator."""
    if isinstance(loop, ast.While):
        return isinstance(loop.test, ast.Constant) and bool(loop.test.value)
    return isinstance(loop, (ast.For, ast.AsyncFor)) and _never_ends(source, loop.iter)


def _never_ends(source: Source, value: ast.expr) -> bool:
    if not isinstance(value, ast.Call):
        return False
    name = name_of(value.func)
    if name in _PASS_ON:
        return bool(value.args) and _never_ends(source, value.args[-1 if name == "map" else 0])
    if name in ("count", "cycle") or (name == "repeat" and len(value.args) + len(value.keywords) == 1):
        return True
    makers = source.functions_called(name)
    return bool(makers) and all(_yields_forever(maker) for maker in makers)


def _yields_forever(maker: ast.FunctionDef) -> bool:
    for loop in maker.body:
        if isinstance(loop, ast.While) and isinstance(loop.test, ast.Constant) and loop.test.value:
            inner = [node for node, _ in walk_loop(loop)]
            leaves = any(isinstance(node, (ast.Break, ast.Return)) for node in inner)
            return not leaves and any(isinstance(node, (ast.Yield, ast.YieldFrom)) for node in inner)
    return False


def _early_exits(
    source: Source, loop: ast.AST, *, has_ended: bool, also_same: bool = False
) -> Iterator[tuple[DecisionPoint, bool]]:
    """Yield statements that leave the loop and may differ between ranks, with True for those at the end of data."""
    handlers = [each for each in ast.walk(loop) if isinstance(each, ast.ExceptHandler) and catches_data_end(each)]
    for node, tests in walk_loop(loop):
        if not (isinstance(node, (ast.Break, ast.Return)) or (has_ended and _exits_with_0(node))):
            continue
        handler = next((each for each in handlers if each.lineno <= line_of(node) <= (each.end_lineno or 0)), None)
        if handler is not None:
            yield _point(source, handler), True
        elif also_same or may_differ(source, tests):
            depends = any(map(source.depends_on_rank, tests))
            is_data_end = not depends and bool(tests) and _depends_on_next(source, tests[-1])
            yield DecisionPoint(line_of(node), with_condition(source, node, tests), depends), is_data_end


def _while_condition(source: Source, loop: ast.AST) -> Iterator[tuple[DecisionPoint, bool]]:
    """Yield the condition of a `while` loop if it may end the loop at a different iteration on each rank."""
    if isinstance(loop, ast.While) and not source.is_same_on_all_ranks(loop.test):
        depends = source.depends_on_rank(loop.test)
        yield (
            DecisionPoint(loop.lineno, source.text(loop.lineno), depends),
            not depends and _depends_on_next(source, loop.test),
        )


def _depends_on_next(source: Source, test: ast.expr) -> bool:
    """True if the condition depends on the result of `next(iterator, default)`."""
    names = [node for node in ast.walk(test) if isinstance(node, (ast.Name, ast.Attribute))]
    values = [test, *(value for name in names for value in source.values_of(name))]
    calls = [node for value in values for node in ast.walk(value) if isinstance(node, ast.Call)]
    return any(name_of(call.func) in ("next", "anext") and len(call.args) > 1 for call in calls)


def _exits_with_0(node: ast.AST) -> bool:
    """True if the statement may end the program with exit status 0."""
    if not is_exit(node):
        return False
    raised = node.exc if isinstance(node, ast.Raise) else node
    call = raised.value if isinstance(raised, ast.Expr) else raised
    given = call.args[0] if isinstance(call, ast.Call) and call.args else None
    return not isinstance(given, ast.JoinedStr) and not (isinstance(given, ast.Constant) and given.value)


_SETS = ("set", "frozenset")
_KEEP_ORDER = ("list", "tuple", "iter", "enumerate", "zip", "map", "filter", "reversed", "dict", "fromkeys", "tqdm")
_OF_SETS = ("union", "intersection", "difference", "symmetric_difference")
_VIEWS = ("keys", "items", "values", "copy")
_DEPTH = 6
"""Maximum number of names and calls through which a set is followed."""


def find_unordered_loop(source: Source, line: int) -> int | None:
    """Return the line of the innermost loop around `line` that iterates in no defined order."""
    heads = (block.node for block in reversed(source.blocks(line)) if isinstance(block.node, ast.For))
    return next((head.lineno for head in heads if _has_no_order(source, head.iter, _DEPTH)), None)


def _has_no_order(source: Source, value: ast.expr, depth: int) -> bool:
    """True if `value` is a set, or takes its order from one."""
    if not depth:
        return False
    if isinstance(value, (ast.Set, ast.SetComp)):
        return True
    if isinstance(value, (ast.ListComp, ast.DictComp, ast.GeneratorExp)):
        return any(_has_no_order(source, each.iter, depth - 1) for each in value.generators)
    if isinstance(value, ast.BinOp):
        return any(_is_keys(side) or _has_no_order(source, side, depth - 1) for side in (value.left, value.right))
    if isinstance(value, ast.Call):
        return _gives_no_order(source, value, depth - 1)
    if isinstance(value, (ast.Name, ast.Attribute)):
        return any(_has_no_order(source, each, depth - 1) for each in source.values_of(value))
    return False


def _gives_no_order(source: Source, call: ast.Call, depth: int) -> bool:
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    name = name_of(call.func)
    if name in _SETS or (name in _OF_SETS and owner is not None):
        return True
    if name in _VIEWS and owner is not None:
        return _has_no_order(source, owner, depth)
    return name in _KEEP_ORDER and any(_has_no_order(source, each, depth) for each in call.args)


def _is_keys(value: ast.expr) -> bool:
    """True for ``d.keys()``: an operator on the keys of two dicts gives a set."""
    return isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr == "keys"
