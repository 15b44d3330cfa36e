# SPDX-License-Identifier: Apache-2.0
"""Find in the user's source where a model was called past its DDP wrapper."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from types import FrameType
from typing import Any

from torch import nn

from ddpilot.guard.probes.source import parse_function


def find_bypass_line(frame: FrameType, inside: set[int]) -> int | None:
    """The line in the function of `frame` that calls a module of `inside` (by id), or a method of one's own class.

    The last one before the line where `frame` is, else the first after it; None where there is none.
    """
    lines = sorted(_calls(frame, inside))
    before = [line for line in lines if line <= frame.f_lineno]
    return before[-1] if before else lines[0] if lines else None


def _calls(frame: FrameType, inside: set[int]) -> Iterator[int]:
    tree, first = parse_function(frame)
    names = {**frame.f_globals, **frame.f_locals}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _is_call_of(node.func, names, inside):
            yield node.lineno + first - 1


def _is_call_of(function: ast.expr, names: dict[str, Any], inside: set[int]) -> bool:
    if id(_value(function, names)) in inside:
        return True
    if not isinstance(function, ast.Attribute):
        return False
    owner = _value(function.value, names)
    is_own = function.attr == "forward" or not hasattr(nn.Module, function.attr)
    return id(owner) in inside and is_own and callable(inspect.getattr_static(owner, function.attr, None))


def _value(node: ast.expr, names: dict[str, Any]) -> Any:
    """What a name or a chain of attributes stands for, as far as no code has to run to tell."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = _value(node.value, names)
        held = getattr(owner, "__dict__", {})
        return (held.get("_modules") or {}).get(node.attr) or held.get(node.attr)
    return None
