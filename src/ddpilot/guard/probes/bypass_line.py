# SPDX-License-Identifier: Apache-2.0
"""Find in the user's source the line that calls a model past its DDP wrapper."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from types import FrameType
from typing import Any

from torch import nn

from ddpilot.guard.probes.caller_source import parse_function


def find_bypass_line(frame: FrameType, ddp: Any) -> int | None:
    """Return the line in the function of `frame` that calls a module inside `ddp`, or a method that its class defines.

    The last one up to the current line of `frame`, else the first one after it; None if there is none.
    """
    lines = sorted(_calls(frame, ddp))
    before = [line for line in lines if line <= frame.f_lineno]
    return before[-1] if before else lines[0] if lines else None


def _calls(frame: FrameType, ddp: Any) -> Iterator[int]:
    tree, first = parse_function(frame)
    names = {**frame.f_globals, **frame.f_locals}
    inside = {id(module) for module in ddp.module.modules()}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _is_call_of(node.func, names, ddp, inside):
            yield node.lineno + first - 1


def _is_call_of(function: ast.expr, names: dict[str, Any], ddp: Any, inside: set[int]) -> bool:
    if id(_owner(function, names, ddp)) in inside:
        return True
    if not isinstance(function, ast.Attribute):
        return False
    owner = _owner(function.value, names, ddp)
    is_own = function.attr == "forward" or not hasattr(nn.Module, function.attr)
    return id(owner) in inside and is_own and callable(inspect.getattr_static(owner, function.attr, None))


def _owner(node: ast.expr, names: dict[str, Any], ddp: Any) -> Any:
    """Evaluate like `_value`; a call with only the wrapper as argument, such as `unwrap(model)`, is its module."""
    if isinstance(node, ast.Call) and len(node.args) == 1 and _value(node.args[0], names) is ddp:
        return ddp.module
    return _value(node, names)


def _value(node: ast.expr, names: dict[str, Any]) -> Any:
    """Evaluate a name or a chain of attributes without running code; None if that is not possible."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = _value(node.value, names)
        held = getattr(owner, "__dict__", {})
        return (held.get("_modules") or {}).get(node.attr) or held.get(node.attr)
    return None
