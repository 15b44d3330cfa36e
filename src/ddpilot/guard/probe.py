# SPDX-License-Identifier: Apache-2.0
"""What a probe is, and what it is given: a place to note things, and protection of training from its own errors."""

from __future__ import annotations

import functools
import linecache
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NamedTuple, Protocol

from ddpilot.record.journal import JournalWriter
from ddpilot.record.sites import SiteFinder, describe_site

Hook = Callable[..., Any]


class Probe(Protocol):
    """Sees one kind of thing; made without arguments. It never issues a collective, nor changes a number."""

    name: str
    """What it looks at, in words, for the line that says that it is off."""

    def install(self, notes: Notes) -> Callable[[], None]:
        """Begin to look, and return what ends that. Torch is there; a process group may not be yet."""


class Notes:
    """What one probe of `rank` notes into `journal`. An error in its functions turns it off, says so once, and no more.

    `finder` finds the user's line, `tell` shows a line, `compiled` is the compiled part of recording, if there is one.
    """

    def __init__(
        self,
        name: str,
        journal: JournalWriter,
        *,
        rank: int,
        finder: SiteFinder,
        tell: Callable[[str], None],
        compiled: Any = None,
    ) -> None:
        self.name = name
        self.rank = rank
        self.compiled = compiled
        self.is_off = False
        self.write_step = journal.write_step
        """Add an entry about an ordinary step, of which there are far more than of others."""
        self._journal = journal
        self._finder = finder
        self._tell = tell

    def write(self, kind: str, **values: Any) -> None:
        """Add an entry to the journal."""
        self._journal.write(kind, values)

    def user_frame(self) -> FrameType | None:
        """The innermost frame of the caller's stack that is the user's, else a library's; None where there is none."""
        return self._finder.walk(sys._getframe(1))[0]

    def site(self, frame: FrameType | None = None, line: int | None = None) -> dict[str, Any]:
        """The user's line from `frame` (default: the caller's) outwards, as `Place` takes it; empty where none is.

        `line`: another line of the same file.
        """
        fact = describe_site(self._finder.walk(frame or sys._getframe(1)))
        if line is not None and frame is not None:
            fact |= {"line": line, "text": linecache.getline(frame.f_code.co_filename, line).strip()[:200]}
        return {key: fact[key] for key in ("file", "line", "function", "text") if key in fact}

    def safely(self, function: Hook) -> Hook:
        """`function`, of which an error turns this probe off; it does nothing any more then and returns None."""

        from torch._C._dynamo.eval_frame import set_eval_frame as set_compiler

        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            if self.is_off:
                return None
            # Within a compiled function torch's compiler would look into whatever is called from here.
            compiler = set_compiler(None)
            try:
                return function(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 - said once, and never in the way of training
                self.switch_off(error)
                return None
            finally:
                set_compiler(compiler)

        keep_dynamo_out(guarded)
        return guarded

    def switch_off(self, error: Exception) -> None:
        """Look no more, since `error` came up: said in one line and noted."""
        self.is_off = True
        text = f"{type(error).__name__}: {error}"
        try:
            self._tell(f"guard no longer looks at {self.name}: {text}")
            self._journal.write("fault", {"probe": self.name, "text": text[:500]})
        except Exception:  # noqa: BLE001, S110 - nobody is left to tell
            pass

    def around(
        self,
        owner: Any,
        name: str,
        *,
        before: Hook | None = None,
        after: Hook | None = None,
        raised: Hook | None = None,
        aliases: Sequence[Any] = (),
    ) -> Callable[[], None]:
        """Call `before` with the arguments of each `owner.name(...)`, and `after` with what `before` returned, then
        whether it returned, what it returned, and the arguments; `raised` in its place where only an error matters.
        Returns what undoes it. `aliases`: what else has it under this name, such as the module that a pickle of the
        function looks in.
        """
        present = getattr(owner, name)
        wrapping: _Wrapping | None = getattr(present, "_ddpilot_wrapping", None)
        if wrapping is None or wrapping.wrapper is not present or wrapping.owner is not owner:
            wrapping = _Wrapping(owner, name)
        return wrapping.add(_Hooks(self, before, after, after or raised), aliases)


class _Hooks(NamedTuple):
    """What one probe does around a function."""

    notes: Notes
    before: Hook | None
    returned: Hook | None
    raised: Hook | None


class _Wrapping:
    """The one wrapper of `owner.name`, whatever number of probes looks at it: each more would cost every call.

    Probes look as if each had wrapped the function once more: the newest comes first before it, and last after it.
    """

    def __init__(self, owner: Any, name: str) -> None:
        self.owner = owner
        self._name = name
        self._original = getattr(owner, name)
        self._places: list[Any] = []
        self._hooks: tuple[_Hooks, ...] = ()
        self.wrapper = self._make()

    def add(self, hooks: _Hooks, aliases: Sequence[Any]) -> Callable[[], None]:
        """Call `hooks` too; returns what ends that."""
        self._hooks = (hooks, *self._hooks)
        for one in (self.owner, *aliases):
            if getattr(one, self._name, None) is self._original:
                setattr(one, self._name, self.wrapper)
                self._places.append(one)

        def undo() -> None:
            self._hooks = tuple(each for each in self._hooks if each is not hooks)
            while not self._hooks and self._places:
                one = self._places.pop()
                if getattr(one, self._name, None) is self.wrapper:  # somebody may have wrapped it once more
                    setattr(one, self._name, self._original)

        return undo

    def _make(self) -> Any:
        from torch._C._dynamo.eval_frame import set_eval_frame as set_compiler

        original = self._original

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            hooks = self._hooks
            tickets: list[Any] = []
            # Within a compiled function torch's compiler would look into whatever is called from here.
            compiler = set_compiler(None)
            try:
                for notes, before, _, _ in hooks:
                    ticket = None
                    if before is not None and not notes.is_off:
                        try:
                            ticket = before(*args, **kwargs)
                        except Exception as error:  # noqa: BLE001 - said once, and never in the way of training
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
    """Let torch's compiler neither compile `function` nor look into it."""
    import torch

    function._torchdynamo_disable = True
    eval_frame: Any = torch._C._dynamo.eval_frame
    if hasattr(eval_frame, "set_code_exec_strategy"):
        action = eval_frame._FrameAction
        eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(action.SKIP, action.DEFAULT))
    else:  # torch 2.6 and 2.7
        eval_frame.skip_code(function.__code__)
