# SPDX-License-Identifier: Apache-2.0
"""Wrappers around the torch functions that probes observe.

Python skips the frames of its own import system when it looks for the line that a warning with a `stacklevel` above 1
refers to; `logging` does so since 3.11. It recognizes them by "importlib" and "_bootstrap" in their file name. Hence
this module's name: torch's warnings name the user's line, as without guard. It has nothing else to do with imports.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

Hook = Callable[..., Any]


class Switch(Protocol):
    """The part of a probe that turns it off."""

    is_off: bool

    def switch_off(self, error: Exception) -> None:
        """Stop calling the probe's hooks because of `error`."""


class Hooks(NamedTuple):
    """The hooks of one probe around a function."""

    notes: Switch
    before: Hook | None
    returned: Hook | None
    raised: Hook | None


class Wrapping:
    """The only wrapper of `owner.name`, shared by all probes, as each further wrapper would cost time in every call.

    Hooks run as if each probe had wrapped the function in turn: the newest first before the call, and last after it.
    """

    def __init__(self, owner: Any, name: str) -> None:
        self.owner = owner
        self._name = name
        self._original = getattr(owner, name)
        self._places: list[Any] = []
        self._hooks: tuple[Hooks, ...] = ()
        self.wrapper = self._make()

    def add(self, hooks: Hooks, aliases: Sequence[Any]) -> Callable[[], None]:
        """Call `hooks` too. Returns a function that removes them."""
        self._hooks = (hooks, *self._hooks)
        for one in (self.owner, *aliases):
            if getattr(one, self._name, None) is self._original:
                setattr(one, self._name, self.wrapper)
                self._places.append(one)

        def undo() -> None:
            self._hooks = tuple(each for each in self._hooks if each is not hooks)
            while not self._hooks and self._places:
                one = self._places.pop()
                if getattr(one, self._name, None) is self.wrapper:  # other code may have wrapped it since
                    setattr(one, self._name, self._original)

        return undo

    def _make(self) -> Any:
        from torch._C._dynamo.eval_frame import set_eval_frame as set_compiler

        original = self._original

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            hooks = self._hooks
            tickets: list[Any] = []
            # Inside a compiled function, torch.compile would trace what is called from here.
            compiler = set_compiler(None)
            try:
                for notes, before, _, _ in hooks:
                    ticket = None
                    if before is not None and not notes.is_off:
                        try:
                            ticket = before(*args, **kwargs)
                        except Exception as error:  # noqa: BLE001 - reported once, and must never stop training
                            notes.switch_off(error)
                    tickets.append(ticket)
            finally:
                set_compiler(compiler)
            result, returned = None, False
            try:
                result = original(*args, **kwargs)
                returned = True
            finally:
                compiler = set_compiler(None)
                try:
                    for notes, _, after, raised in reversed(hooks):
                        ticket = tickets.pop()
                        if not returned:
                            after = raised
                        if after is not None and not notes.is_off:
                            try:
                                after(ticket, returned, result, *args, **kwargs)
                            except Exception as error:  # noqa: BLE001 - as above
                                notes.switch_off(error)
                finally:
                    set_compiler(compiler)
            return result

        keep_dynamo_out(wrapper)
        wrapper._ddpilot_wrapping = self  # type: ignore[attr-defined]
        return wrapper


def keep_dynamo_out(function: Any) -> None:
    """Let torch.compile neither compile nor trace `function`."""
    import torch

    function._torchdynamo_disable = True
    eval_frame: Any = torch._C._dynamo.eval_frame
    if hasattr(eval_frame, "set_code_exec_strategy"):
        action = eval_frame._FrameAction
        eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(action.SKIP, action.DEFAULT))
    else:  # torch 2.6 and 2.7
        eval_frame.skip_code(function.__code__)
