# SPDX-License-Identifier: Apache-2.0
"""Interface of probes: wrap functions in hooks, and write notes into the journal.

An error in a probe never reaches training. Does not import torch.
"""

from __future__ import annotations

import contextlib
import functools
import linecache
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from types import CodeType, FrameType
from typing import Any, NamedTuple, Protocol

from ddpilot.guard.notes import FaultNote, Site
from ddpilot.record.call_sites import SiteFinder, describe_site
from ddpilot.record.journal import JournalWriter

WRAPPER_FILE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "<importlib._bootstrap>")
"""File name in the code of wrappers. Python skips the frames of its import system, which it recognizes by
"importlib" and "_bootstrap" in their file name, when it looks for the line that a warning with a `stacklevel` above
1 refers to; `logging` does so since 3.11. Thus torch's warnings name the user's line, as without guard."""

Hook = Callable[..., Any]


class Hooks(NamedTuple):
    """The hooks of one probe around a function, as `Notes.around` describes them."""

    notes: Notes
    before: Hook | None
    returned: Hook | None
    raised: Hook | None
    after: Hook | None


class FunctionWrapper:
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
                for one in hooks:
                    ticket = None
                    if one.before is not None and not one.notes.is_off:
                        try:
                            ticket = one.before(*args, **kwargs)
                        except Exception as error:  # noqa: BLE001 - reported once, and must never stop training
                            one.notes.switch_off(error)
                    tickets.append(ticket)
            finally:
                set_compiler(compiler)
            results: tuple[Any, ...] = ()
            try:
                results = (original(*args, **kwargs),)
            finally:
                compiler = set_compiler(None)
                try:
                    for one in reversed(hooks):
                        ticket = tickets.pop()
                        for hook, given in ((one.returned if results else one.raised, results), (one.after, ())):
                            if hook is not None and not one.notes.is_off:
                                try:
                                    hook(ticket, *given, *args, **kwargs)
                                except Exception as error:  # noqa: BLE001 - as above
                                    one.notes.switch_off(error)
                finally:
                    set_compiler(compiler)
            return results[0]

        wrapper.__code__ = wrapper.__code__.replace(co_filename=WRAPPER_FILE)  # type: ignore[attr-defined]
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


class Probe(Protocol):
    """Observes one aspect of training; created without arguments. Never issues a collective nor changes a value."""

    name: str
    """Observed subject, for the message that reports that it is off."""

    def install(self, notes: Notes) -> list[Callable[[], None]]:
        """Start observing, and return functions that stop it, to be called from the last to the first.

        torch is imported; process groups may not exist yet.
        """


class Notes:
    """Writes what one probe of `rank` notes into `journal`. An error in a hook is reported once and disables it.

    `finder` finds the user's line, `report` prints a line.
    """

    def __init__(
        self,
        name: str,
        journal: JournalWriter,
        *,
        rank: int,
        finder: SiteFinder,
        report: Callable[[str], None],
    ) -> None:
        self.name = name
        self.rank = rank
        self.is_off = False
        self.write_step = journal.write_step
        """Add an entry for an ordinary step, far more frequent than other entries."""
        self._journal = journal
        self._finder = finder
        self._report = report

    def write(self, kind: str, note: Mapping[str, Any]) -> None:
        """Add a `note`, of the type that `NOTES` has for `kind`, to the journal."""
        self._journal.write(kind, note)

    def user_frame(self) -> FrameType | None:
        """Return the innermost frame of the user on the caller's stack, else a library's; None if there is neither."""
        return self._finder.walk(sys._getframe(1))[0]

    def user_call(self) -> tuple[FrameType | None, CodeType | None]:
        """Return `user_frame`, and the function that its line called."""
        return self._finder.walk(sys._getframe(1))[:2]

    def site(self, frame: FrameType | None = None, line: int | None = None) -> Site:
        """Return the user's line from `frame` (default: the caller's) outwards.

        `line`: a different line of the same file.
        """
        fact = describe_site(self._finder.walk(frame or sys._getframe(1)))
        if line is not None and frame is not None:
            fact |= {"line": line, "text": linecache.getline(frame.f_code.co_filename, line).strip()[:200]}
        return {key: fact[key] for key in ("file", "line", "function", "text") if key in fact}

    def safely(self, function: Hook) -> Hook:
        """Wrap `function` so that an error turns this probe off. Once it is off, the wrapper returns None."""

        from torch._C._dynamo.eval_frame import set_eval_frame as set_compiler

        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            if self.is_off:
                return None
            # Inside a compiled function, torch.compile would trace what is called from here.
            compiler = set_compiler(None)
            try:
                return function(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 - reported once, and must never stop training
                self.switch_off(error)
                return None
            finally:
                set_compiler(compiler)

        keep_dynamo_out(guarded)
        return guarded

    def switch_off(self, error: Exception) -> None:
        """Stop observing because of `error`, which is noted in the journal and reported in one line."""
        self.is_off = True
        text = f"{type(error).__name__}: {error}"
        with contextlib.suppress(OSError, ValueError):  # the journal is closed
            self.write("fault", FaultNote(probe=self.name, text=text[:500]))
        with contextlib.suppress(OSError, ValueError):  # stderr is closed
            self._report(f"guard no longer looks at {self.name}: {text}")

    def around(
        self,
        owner: Any,
        name: str,
        *,
        before: Hook | None = None,
        returned: Hook | None = None,
        raised: Hook | None = None,
        after: Hook | None = None,
        aliases: Sequence[Any] = (),
    ) -> Callable[[], None]:
        """Wrap `owner.name` in hooks. Returns a function that removes them.

        `before(*args, **kwargs)` runs first. Then, with what it returned as `ticket`, `returned(ticket, result, *args,
        **kwargs)` runs if the call returned, `raised(ticket, *args, **kwargs)` if it raised, and `after(ticket, *args,
        **kwargs)` in both cases. `aliases`: other objects with the same function under this name, such as the module
        that a pickle of the function refers to.
        """
        present = getattr(owner, name)
        wrapping: FunctionWrapper | None = getattr(present, "_ddpilot_wrapping", None)
        if wrapping is None or wrapping.wrapper is not present or wrapping.owner is not owner:
            wrapping = FunctionWrapper(owner, name)
        return wrapping.add(Hooks(self, before, returned, raised, after), aliases)
