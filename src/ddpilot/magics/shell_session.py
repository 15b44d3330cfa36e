# SPDX-License-Identifier: Apache-2.0
"""`ShellSession`: the session of an IPython shell, and whether plain cells run on its ranks."""

from __future__ import annotations

import contextlib
import functools
import io
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from ddpilot.errors import LaunchError, LaunchInterrupted, RankError, WatchError
from ddpilot.findings.text import render_ranks
from ddpilot.magics.parser import MagicUsageError, describe_options
from ddpilot.output.view import TextView, View
from ddpilot.session.kernels.states import START_OVER
from ddpilot.session.options import SessionOptions
from ddpilot.session.session import Session


class Board(Protocol):
    """A display that is being updated."""

    def close(self) -> None:
        """Stop updating it."""


class ShellSession:
    """State shared by the magics of one shell."""

    def __init__(self, shell: Any) -> None:
        self.shell = shell
        self.is_auto = False
        self._session: Session | None = None
        self._num_local = 0
        self._board: Board | None = None
        self.advise: Callable[[RankError | LaunchError], None] = lambda error: None
        """Passed to the views of sessions: called with every error of ranks before it is shown."""

    @property
    def session(self) -> Session | None:
        """The session, or None if none is running."""
        if self._session is not None and not self._session.is_running:
            self._session = None
        return self._session

    def require(self, did: str, ranks: Sequence[int] | None = None, typed: str = "") -> Session:
        """Return the session. Raises MagicUsageError if none is running, or if it does not have one of `ranks`.

        `typed`: the words in front of ranks on the line, such as "--ranks".
        """
        session = self.session
        if session is None:
            raise MagicUsageError(did, found="no ranks are running", fix="Type `%ddp start -n 2` first, for two ranks")
        last = session.world_size - 1
        if missing := [rank for rank in ranks or () if rank > last]:
            found = f"`{typed} {missing[0]}`, and the ranks are 0 to {last}"
            raise MagicUsageError(did, found=found, fix=f"Give ranks that exist, as in `{typed} {last}`")
        return session

    def start(self, arguments: dict[str, Any]) -> Session:
        """Start a session, or keep one with the same options.

        Raises MagicUsageError if one with other options is running.
        """
        options, running = SessionOptions(**arguments), self.session
        if running is not None:
            was, line = describe_options(running.options), describe_options(options)
            if running.options != options:
                raise MagicUsageError(
                    f"`{line}`",
                    found=f"{count_ranks(running)} already running, started by `{was}`",
                    fix=f"Keep them, or type `%ddp stop` (their variables are lost) and then `{line}`",
                )
            dead = sorted({*range(running.world_size)} - {*running.pids()})
            if not running.can_restart:
                self.report(f"{count_ranks(running)} died with the rank server; {START_OVER}")
                return running
            hint = f"; {render_ranks(dead)} died: `%ddp restart {' '.join(map(str, dead))}`" if dead else ""
            self.report(f"{count_ranks(running)} already running, with their variables{hint}")
            return running
        began_s = time.monotonic()
        try:
            self._session = Session(**arguments, view=self._make_view(options))
        except LaunchInterrupted:
            raise
        except KeyboardInterrupt:  # while modules were being imported: the traceback is of no use
            raise LaunchInterrupted("starting the ranks was interrupted: no rank is running") from None
        self.report(f"{count_ranks(self._session)} ready in {time.monotonic() - began_s:.1f} s")
        return self._session

    def stop(self) -> None:
        """Stop the ranks, if any are running, and switch auto off."""
        session, self._session = self.session, None
        was_auto, self.is_auto = self.is_auto, False
        if session is None:
            self.report("no ranks are running")
            return
        try:
            session.stop()
        finally:
            self.set_board(None)
        self.report(f"stopped {count_ranks(session)}" + ("; auto is off" if was_auto else ""))

    def set_board(self, board: Board | None) -> bool:
        """Replace the status board that is being updated; the previous one is closed. Return True if there was one."""
        before, self._board = self._board, board
        if before is not None:
            before.close()
        return before is not None

    def report(self, text: str) -> None:
        """Print a message of ddpilot."""
        self.write(f"ddpilot: {text}\n")

    def write(self, text: str) -> None:
        """Write to the notebook."""
        sys.stdout.write(text)

    @contextlib.contextmanager
    def local(self) -> Iterator[None]:
        """Context manager in which plain cells are not sent to the ranks."""
        self._num_local += 1
        try:
            yield
        finally:
            self._num_local -= 1

    @property
    def takes_cells(self) -> bool:
        """True if a plain cell that is run now goes to the ranks."""
        return self.is_auto and not self._num_local and not self._is_silent()

    @property
    def is_terminal(self) -> bool:
        """True if the shell does not belong to a kernel, and so not to a notebook."""
        return getattr(self.shell, "kernel", None) is None

    def _is_silent(self) -> bool:
        """True if the front end is running code of its own, such as for a list of variables, and not a user's cell."""
        parent: dict[str, Any] = getattr(self.shell, "get_parent", dict)()
        return bool(parent.get("content", {}).get("silent"))

    def _make_view(self, options: SessionOptions) -> View:
        view: View
        if self.is_terminal:
            view = TextView(options.output, options.output_limit_bytes)
        else:
            from ddpilot.output.notebook_view import NotebookView  # needs packages that come with kernels

            view = NotebookView(self.shell, options.output, options.output_limit_bytes)
        view.advise = self.advise
        return view


@contextlib.contextmanager
def briefly() -> Iterator[None]:
    """Shorten an error of a rank to one line in IPython's traceback, as the view has already shown the whole error."""
    try:
        yield
    except (RankError, WatchError) as error:
        where = "in the captured output" if isinstance(sys.stderr, io.StringIO) else "above"
        line = f"{type(error).__name__}: {error.found} (the full error is {where})"
        vars(error)["_render_traceback_"] = functools.partial(list, (line,))
        raise


def count_ranks(session: Session) -> str:
    """Return the number of ranks as text: "1 rank", "4 ranks" and so on."""
    return f"{session.world_size} rank{'s' * (session.world_size != 1)}"
