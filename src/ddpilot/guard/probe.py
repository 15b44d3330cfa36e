# SPDX-License-Identifier: Apache-2.0
"""What a probe is, and what it is given: a place to note things, and protection of training from its own errors."""

from __future__ import annotations

import functools
import linecache
import sys
from collections.abc import Callable, Sequence
from types import CodeType, FrameType
from typing import Any, Protocol

from ddpilot.guard.importlib_bootstrap_like import Hook, Hooks, Wrapping, keep_dynamo_out
from ddpilot.record.journal import JournalWriter
from ddpilot.record.sites import SiteFinder, describe_site


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

    def user_call(self) -> tuple[FrameType | None, CodeType | None]:
        """As `user_frame`, and the function that its line called."""
        return self._finder.walk(sys._getframe(1))[:2]

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
        wrapping: Wrapping | None = getattr(present, "_ddpilot_wrapping", None)
        if wrapping is None or wrapping.wrapper is not present or wrapping.owner is not owner:
            wrapping = Wrapping(owner, name)
        return wrapping.add(Hooks(self, before, after, after or raised), aliases)
