# SPDX-License-Identifier: Apache-2.0
"""Find how a loop can end: at its end, because its data is exhausted, or because a rank leaves it early."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ddpilot.source.control_flow import (
    Spot,
    call_name,
    is_end_of_data,
    is_exit,
    line_of,
    may_differ,
    walk,
    with_condition,
)
from ddpilot.source.parsed_file import Source

_PASS_ON = ("enumerate", "tqdm", "trange", "iter", "map")


@dataclass(frozen=True, slots=True)
class Exits:
    """Where loops may be left before their end. Either field may be empty."""

    decided: tuple[Spot, ...] = ()
    """Exits for a reason that may differ between ranks."""
    of_data: tuple[Spot, ...] = ()
    """Exits because the data is exhausted."""


def find_exits(source: Source, loops: Sequence[ast.AST], *, has_ended: bool) -> Exits:
    """Return where `loops`, outermost first, may be left. `has_ended`: the exit may also have ended the program.

    For an endless loop, exits whose conditions look the same on all ranks are included: nothing else can have ended it.
    """
    never_ends = is_endless(source, loops[0])
    found = [
        each
        for loop in loops[: 1 if never_ends else None]
        for each in (*_early_exits(source, loop, has_ended=has_ended), *_own_ends(source, loop))
    ]
    of_data = tuple(spot for spot, is_of_data in found if is_of_data)
    decided = [spot for spot, is_of_data in found if not is_of_data]
    if never_ends and not (decided or of_data):
        decided = [spot for spot, _ in _early_exits(source, loops[0], has_ended=has_ended, also_same=True)]
    return Exits(tuple(decided), of_data)


def is_endless(source: Source, loop: ast.AST) -> bool:
    """Return True if a loop ends only when it is left: `while True`, `for i in count()`, an endless generator."""
    if isinstance(loop, ast.While):
        return isinstance(loop.test, ast.Constant) and bool(loop.test.value)
    return isinstance(loop, (ast.For, ast.AsyncFor)) and _never_ends(source, loop.iter)


def _never_ends(source: Source, value: ast.expr) -> bool:
    if not isinstance(value, ast.Call):
        return False
    name = call_name(value)
    if name in _PASS_ON:
        return bool(value.args) and _never_ends(source, value.args[-1 if name == "map" else 0])
    if name in ("count", "cycle") or (name == "repeat" and len(value.args) + len(value.keywords) == 1):
        return True
    makers = source.functions_called(name)
    return bool(makers) and all(_yields_forever(maker) for maker in makers)


def _yields_forever(maker: ast.FunctionDef) -> bool:
    for loop in maker.body:
        if isinstance(loop, ast.While) and isinstance(loop.test, ast.Constant) and loop.test.value:
            inner = [node for node, _ in walk(loop, [], nested=False)]
            leaves = any(isinstance(node, (ast.Break, ast.Return)) for node in inner)
            return not leaves and any(isinstance(node, (ast.Yield, ast.YieldFrom)) for node in inner)
    return False


def _early_exits(
    source: Source, loop: ast.AST, *, has_ended: bool, also_same: bool = False
) -> Iterator[tuple[Spot, bool]]:
    """Yield statements that leave the loop and may differ between ranks, with True for those at the end of data."""
    at_stop = _handlers_of_stop(loop)
    for node, tests in walk(loop, [], nested=False):
        if not (isinstance(node, (ast.Break, ast.Return)) or (has_ended and _ends_well(node))):
            continue
        handler = next((each for each in at_stop if each.lineno <= line_of(node) <= (each.end_lineno or 0)), None)
        if handler is not None:
            yield Spot(handler.lineno, source.text(handler.lineno)), True
        elif also_same or may_differ(source, tests):
            depends = any(map(source.depends_on_rank, tests))
            is_of_data = not depends and bool(tests) and _asks_for_next(source, tests[-1])
            yield Spot(line_of(node), with_condition(source, node, tests), depends), is_of_data


def _own_ends(source: Source, loop: ast.AST) -> Iterator[tuple[Spot, bool]]:
    """Yield the condition of a `while` loop if it may end the loop at a different iteration on each rank."""
    if isinstance(loop, ast.While) and not source.is_the_same_everywhere(loop.test):
        depends = source.depends_on_rank(loop.test)
        yield Spot(loop.lineno, source.text(loop.lineno), depends), not depends and _asks_for_next(source, loop.test)


def _handlers_of_stop(node: ast.AST) -> list[ast.ExceptHandler]:
    return [each for each in ast.walk(node) if isinstance(each, ast.ExceptHandler) and is_end_of_data(each)]


def _asks_for_next(source: Source, test: ast.expr) -> bool:
    """True if the condition depends on the result of `next(iterator, default)`."""
    names = [node for node in ast.walk(test) if isinstance(node, (ast.Name, ast.Attribute))]
    values = [test, *(value for name in names for value in source.values_of(name))]
    calls = [node for value in values for node in ast.walk(value) if isinstance(node, ast.Call)]
    return any(call_name(call) in ("next", "anext") and len(call.args) > 1 for call in calls)


def _ends_well(node: ast.AST) -> bool:
    """True if the statement may end the program with exit status 0."""
    if not is_exit(node):
        return False
    raised = node.exc if isinstance(node, ast.Raise) else node
    call = raised.value if isinstance(raised, ast.Expr) else raised
    given = call.args[0] if isinstance(call, ast.Call) and call.args else None
    return not isinstance(given, ast.JoinedStr) and not (isinstance(given, ast.Constant) and given.value)
