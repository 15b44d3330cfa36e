# SPDX-License-Identifier: Apache-2.0
"""Read the source and the names of a function that is running: whether it reads gradients, or averages a result."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Mapping
from types import FrameType
from typing import Any

_MAX_SOURCE = 200_000
_MAX_FRAMES = 6
_Loop = ast.For | ast.While
_MEANS = ("sum", "mean", "fmean", "average")
_JOINING = ("stack", "cat", "concat", "tensor", "as_tensor", "array")
_SCALING = ("mul", "mul_", "div", "div_")


def parse_function(frame: FrameType) -> tuple[ast.AST, int]:
    """Parse the function, or the file, of `frame`. Returns tree and first line; an empty module without source."""
    try:
        lines, first = inspect.getsourcelines(frame)
        text = textwrap.dedent("".join(lines))
        if len(text) <= _MAX_SOURCE:
            return ast.parse(text), max(first, 1)
    except (OSError, SyntaxError, TypeError, IndexError):
        pass
    return ast.Module([], []), 1


def resolve(names: Mapping[str, Any], path: str) -> Any:
    """Resolve `path`, such as ``self.mask``, without calling anything; None if it does not exist."""
    first, *rest = path.split(".")
    value = names.get(first)
    for name in rest:
        held = getattr(value, "__dict__", {}) if value is not None else {}
        places = [held, *(held.get(kind) for kind in ("_parameters", "_buffers", "_modules"))]
        value = next((place[name] for place in places if isinstance(place, dict) and name in place), None)
    return value


def reads_gradients(frame: FrameType) -> bool:
    """True if the innermost loop around `frame`, or a function on the way from it to `frame`, reads a ``.grad``."""
    outer: FrameType | None = frame
    for _ in range(_MAX_FRAMES):
        if outer is None:
            return False
        loop = _loop_around(outer)
        tree = loop if loop is not None else parse_function(outer)[0]
        called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}  # such as autograd.grad(...)
        found = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == "grad")
        if any(isinstance(node.ctx, ast.Load) and id(node) not in called for node in found):
            return True
        if loop is not None:
            return False
        outer = outer.f_back
    return False


def is_averaged(frame: FrameType, function: str, position: int, keyword: str) -> bool:
    """True if the list passed to `function` on the line of `frame` is summed or averaged without weights.

    That is ``sum(them)``, ``mean(them)``, ``tensor(them).mean()``, or the same with ``one["name"] for one in them``.
    The list is the argument at `position`, or the keyword argument `keyword`.
    """
    tree, first = parse_function(frame)
    line = frame.f_lineno - first + 1
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    asked = [call for call in calls if _name_of(call) == function and call.lineno <= line <= (call.end_lineno or 0)]
    names: set[str] = set()
    for call in asked:
        given = _given(call, position, keyword)
        plain = [one.body if isinstance(one, ast.IfExp) else one for one in given]
        names |= {one.id for one in plain if isinstance(one, ast.Name)}
    assigned = [node for node in ast.walk(tree) if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)]
    for node in assigned:
        if _name_of(node.value) in _JOINING and _first_name(node.value) in names:  # type: ignore[arg-type]  # a call
            names |= {one.id for one in node.targets if isinstance(one, ast.Name)}
    return any(_name_of(call) in _MEANS and _first_name(call) in names for call in calls)


def is_scaled_later(frame: FrameType, function: str, keyword: str) -> bool:
    """True if the tensor passed to `function` on the line of `frame` is later multiplied or divided by a non-constant.

    This turns an average of sums into the mean over all samples. The tensor is the first argument, or the keyword
    argument `keyword`; a tensor that is a parameter of its function is followed to the callers.
    """
    outer: FrameType | None = frame
    for _ in range(_MAX_FRAMES):
        if outer is None:
            return False
        tree, first = parse_function(outer)
        line = outer.f_lineno - first + 1
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _name_of(node) == function]
        asked = [call for call in calls if call.lineno <= line <= (call.end_lineno or 0)]
        given = [one for call in asked for one in _given(call, 0, keyword)[:1]]
        them = {ast.unparse(one) for one in (*asked, *given)} | _assigned(tree, asked)
        if asked and _scales(tree, them, asked[0].lineno):
            return True
        code = outer.f_code
        parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        keyword = next((one.id for one in given if isinstance(one, ast.Name) and one.id in parameters), "")
        if not keyword:
            return False
        function, outer = code.co_name, outer.f_back
    return False


def _assigned(tree: ast.AST, calls: list[ast.Call]) -> set[str]:
    """Names and targets to which results of `calls`, or expressions that contain them, are assigned."""
    assigned = [node for node in ast.walk(tree) if isinstance(node, ast.Assign)]
    made = [node for node in assigned if any(each in calls for each in ast.walk(node.value))]
    return {ast.unparse(target) for node in made for target in node.targets}


def _scales(tree: ast.AST, them: set[str], since_line: int) -> bool:
    for node in ast.walk(tree):
        if getattr(node, "lineno", 0) < since_line:
            continue
        pairs: list[tuple[ast.expr, ast.expr | None]] = []
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Div):
            pairs = [(node.left, node.right), (node.right, node.left)]
        elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Mult | ast.Div):
            pairs = [(node.target, node.value)]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _SCALING:
            pairs = [(node.func.value, next(iter(node.args), None))]
        if any(_holds(one, them) and not isinstance(other, ast.Constant) for one, other in pairs):
            return True
    return False


def _holds(node: ast.AST, them: set[str]) -> bool:
    return any(isinstance(each, ast.expr) and ast.unparse(each) in them for each in ast.walk(node))


def _given(call: ast.Call, position: int, keyword: str) -> list[ast.expr]:
    """The argument of `call` at `position`, or the keyword argument `keyword`."""
    return [*call.args[position : position + 1], *(each.value for each in call.keywords if each.arg == keyword)]


def _name_of(call: ast.Call) -> str:
    return str(getattr(call.func, "attr", "") or getattr(call.func, "id", ""))


def _first_name(call: ast.Call) -> str:
    """The name in ``f(name)``, ``name.f()`` or ``g(name).f()``; empty for other calls."""
    if not call.args and isinstance(call.func, ast.Attribute):
        if not isinstance(call.func.value, ast.Call):
            return str(getattr(call.func.value, "id", ""))
        call = call.func.value
    if not call.args:
        return ""
    first = call.args[0]
    if isinstance(first, ast.GeneratorExp | ast.ListComp) and _is_part_of_each(first):
        first = first.generators[0].iter
    return str(getattr(first, "id", ""))


def _is_part_of_each(them: ast.GeneratorExp | ast.ListComp) -> bool:
    """True if `them` is ``one["name"] for one in ...``, without a condition or further operations."""
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
