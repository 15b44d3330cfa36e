# SPDX-License-Identifier: Apache-2.0
"""Find the line that calls a model past its DDP wrapper, in the source or by hooks on the next such call."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

from torch import is_grad_enabled, nn
from torch.nn.parallel import DistributedDataParallel

from ddpilot.guard.probe import Notes
from ddpilot.guard.probes.caller_source import parse_function, resolve
from ddpilot.record.call_sites import local_variables

_MAX_LINES = 64
_MAX_LOOKS = 256


class BypassCalls:
    """Finds the line of such calls of one model; costs nothing before the first backward that bypasses DDP.

    If the function that calls backward contains no such call, the call was in another function, which has returned.
    Hooks on the model's modules then find the next call, and are removed after it.
    """

    def __init__(self, notes: Notes) -> None:
        self._notes = notes
        self._lines: dict[tuple[CodeType, int], int | None] = {}
        self._site: dict[str, Any] = {}
        self._handles: list[Any] = []
        self._has_waited = False
        self._num_looks = 0

    def find(self, ddp: Any) -> dict[str, Any]:
        """Return the user's line for the backward that is running: the line of the call, or else of the backward."""
        frame = self._notes.user_frame()
        line = self._find_line(frame, ddp) if frame is not None else None
        if line is not None:
            return self._notes.site(frame, line)
        if not self._has_waited:
            self._has_waited = True
            self._wait(ddp.module)
        return self._site or self._notes.site(frame)

    def _find_line(self, frame: FrameType, ddp: Any) -> int | None:
        key = frame.f_code, frame.f_lineno
        if key not in self._lines:  # reading the source takes milliseconds, and this may run in every step
            if len(self._lines) >= _MAX_LINES:
                return None
            self._lines[key] = find_bypass_line(frame, ddp)
        return self._lines[key]

    def _wait(self, inner: nn.Module) -> None:
        parts = list(inner.modules())
        if any(_is_compiled(part) for part in parts):
            return  # the hook would cause a recompilation
        called = self._notes.safely(self._called)
        self._handles = [part.register_forward_pre_hook(called) for part in (inner, *inner.children())]
        self._inside = frozenset(map(id, parts))

    def _called(self, _: nn.Module, __: Any) -> None:
        self._num_looks += 1
        if is_grad_enabled() and not self._site and (frame := self._find_caller(sys._getframe(1))) is not None:
            self._site = self._notes.site(frame)
        if self._site or self._num_looks == _MAX_LOOKS:
            for handle in self._handles:
                handle.remove()

    def _find_caller(self, frame: FrameType | None) -> FrameType | None:
        """Return the frame that called into the model from `frame`'s stack; None if DDP called it."""
        caller = None
        while frame is not None:
            owner = local_variables(frame).get("self")
            if isinstance(owner, DistributedDataParallel):
                return None
            if id(owner) in self._inside:
                caller = frame.f_back
            frame = frame.f_back
        return caller


def _is_compiled(module: nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def find_bypass_line(frame: FrameType, ddp: Any) -> int | None:
    """Return the line in the function of `frame` that calls a module inside `ddp`, or a method that its class defines.

    The last one up to the current line of `frame`, else the first one after it; None if there is none.
    """
    lines = sorted(_calls(frame, ddp))
    before = [line for line in lines if line <= frame.f_lineno]
    return before[-1] if before else lines[0] if lines else None


def _calls(frame: FrameType, ddp: Any) -> Iterator[int]:
    tree, first = parse_function(frame)
    names = {**frame.f_globals, **local_variables(frame)}
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
    """Evaluate without running code; a call with only the wrapper as argument, such as `unwrap(model)`, is its module.

    None if that is not possible.
    """
    if isinstance(node, ast.Call) and len(node.args) == 1 and resolve(names, ast.unparse(node.args[0])) is ddp:
        return ddp.module
    return resolve(names, ast.unparse(node))
