# SPDX-License-Identifier: Apache-2.0
"""What the user's source says around a line that runs."""

from __future__ import annotations

import ast
import inspect
import linecache
import re
import textwrap
from collections.abc import Iterator
from types import FrameType

_MAX_SOURCE = 200_000
_MAX_FRAMES = 6
_LR = re.compile(r"(^|_)lr(_|$)|learning_rate", re.IGNORECASE)
_Loop = ast.For | ast.While
_MEANS = ("sum", "mean", "fmean", "average")


def parse_function(frame: FrameType) -> tuple[ast.AST, int]:
    """The function, or the file, that `frame` is in, and its first line; nothing where there is no source."""
    try:
        lines, first = inspect.getsourcelines(frame)
        text = textwrap.dedent("".join(lines))
        if len(text) <= _MAX_SOURCE:
            return ast.parse(text), max(first, 1)
    except (OSError, SyntaxError, TypeError, IndexError):
        pass
    return ast.Module([], []), 1


def is_accumulating(frame: FrameType) -> bool:
    """Whether the innermost loop around `frame` counts micro-batches: a ``range`` with the optimizer's step after it,
    or a step on a condition in a loop that has a remainder (``%``). One over tasks, or terms of a loss, does neither.
    """
    outer: FrameType | None = frame
    for _ in range(_MAX_FRAMES):
        if outer is None:
            return False
        if (loop := _loop_around(outer)) is not None:
            steps_on_condition = any(isinstance(node, ast.If) and _has_step(node) for node in ast.walk(loop))
            if _has_step(loop):
                return steps_on_condition and any(isinstance(node, ast.Mod) for node in ast.walk(loop))
            return isinstance(loop, ast.For) and _is_range(loop.iter)
        outer = outer.f_back
    return False


def divides_learning_rate(frame: FrameType) -> bool:
    """Whether a learning rate is divided somewhere in the file of `frame`."""
    text = "".join(linecache.getlines(frame.f_code.co_filename))
    try:
        tree = ast.parse(text) if len(text) <= _MAX_SOURCE else ast.Module([], [])
    except SyntaxError:  # a cell with magics in it
        tree = ast.Module([], [])
    return any(_has_division(value) for value in _learning_rates(tree))


def is_averaged(frame: FrameType, function: str, position: int, keyword: str) -> bool:
    """Whether the list that `function` is given on the line of `frame` is summed, or its mean is taken, as it is.

    Without weights, that is: ``sum(them)``, ``mean(them)``, ``tensor(them).mean()``, or with ``one["name"] for one in
    them`` instead. The list is the argument at `position`, or called `keyword`.
    """
    tree, first = parse_function(frame)
    line = frame.f_lineno - first + 1
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    asked = [call for call in calls if _name_of(call) == function and call.lineno <= line <= (call.end_lineno or 0)]
    names: set[str] = set()
    for call in asked:
        given = [*call.args[position : position + 1], *(each.value for each in call.keywords if each.arg == keyword)]
        plain = [one.body if isinstance(one, ast.IfExp) else one for one in given]
        names |= {one.id for one in plain if isinstance(one, ast.Name)}
    return any(_name_of(call) in _MEANS and _first_name(call) in names for call in calls)


def _name_of(call: ast.Call) -> str:
    return str(getattr(call.func, "attr", "") or getattr(call.func, "id", ""))


def _first_name(call: ast.Call) -> str:
    """What ``f(name)``, or ``g(name).f()``, is asked of; empty for anything else."""
    if not call.args and isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Call):
        call = call.func.value
    if not call.args:
        return ""
    first = call.args[0]
    if isinstance(first, ast.GeneratorExp | ast.ListComp) and _is_part_of_each(first):
        first = first.generators[0].iter
    return str(getattr(first, "id", ""))


def _is_part_of_each(them: ast.GeneratorExp | ast.ListComp) -> bool:
    """Whether `them` are ``one["name"] for one in ...``, all and with nothing else done to them."""
    each, part = them.generators[0], them.elt
    is_plain = len(them.generators) == 1 and not each.ifs and isinstance(each.target, ast.Name)
    is_part = isinstance(part, ast.Subscript | ast.Attribute) and isinstance(part.value, ast.Name)
    return is_plain and is_part and part.value.id == each.target.id  # type: ignore[attr-defined]


def _loop_around(frame: FrameType) -> _Loop | None:
    tree, first = parse_function(frame)
    line = frame.f_lineno - first + 1
    loops = [node for node in ast.walk(tree) if isinstance(node, _Loop) and _is_in_body(node, line)]
    return max(loops, key=lambda loop: loop.lineno, default=None)


def _is_in_body(loop: _Loop, line: int) -> bool:
    return loop.body[0].lineno <= line <= (loop.body[-1].end_lineno or 0)


def _has_step(node: ast.AST) -> bool:
    calls = (each.func for each in ast.walk(node) if isinstance(each, ast.Call))
    return any(isinstance(function, ast.Attribute) and function.attr == "step" for function in calls)


def _is_range(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("range", "trange")


def _learning_rates(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword):
            if _LR.search(node.arg or ""):
                yield node.value
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(map(_is_learning_rate, targets)):
                yield node


def _is_learning_rate(node: ast.expr) -> bool:
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        return bool(_LR.search(str(node.slice.value)))
    return bool(_LR.search(getattr(node, "id", "") or getattr(node, "attr", "")))


def _has_division(node: ast.AST) -> bool:
    return any(isinstance(each, ast.Div) for each in ast.walk(node))
