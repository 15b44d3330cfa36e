# SPDX-License-Identifier: Apache-2.0
"""`View`: shows the output of a session's ranks, cell by cell; `TextView` in a terminal or script."""

from __future__ import annotations

import getpass
import os
import re
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from ddpilot.errors import LaunchError, RankError
from ddpilot.output.cell_output import CellOutput
from ddpilot.output.rich_output import RankMessage, RichOutput, read_rich
from ddpilot.output.writer import Output, TextScreen

SendToRank = Callable[[int, str, dict[str, Any], dict[str, Any], list[bytes]], None]
"""Sends a comm message from the front end to a rank: ``send(rank, kind, content, metadata, buffers)``."""

_COLOR = re.compile(r"\x1b\[[0-9;]*m")


class View(ABC):
    """Displays the output of a session's ranks: each cell on a new screen, output between cells on one of its own.

    It is called from one thread at a time: the cell's while one runs, else the session's. Times are seconds of the
    monotonic clock. `mode` and `limit_bytes`: a session's `output` and `output_limit_bytes`.
    """

    def __init__(self, mode: Output = "labelled", limit_bytes: int | None = None) -> None:
        self._mode: Output = mode
        self._limit_bytes = limit_bytes
        self._output: CellOutput | None = None
        self._ranks: tuple[int, ...] = ()
        self.advise: Callable[[RankError | LaunchError], None] = lambda error: None
        """Called with every error before it is shown; may set its `fix`."""

    @abstractmethod
    def make_screen(self) -> TextScreen:
        """Return the screen for a new cell."""

    def ask(self, rank: int, prompt: str, password: bool) -> str:
        """Return the user's answer to `input` or `getpass` on a rank. Raises EOFError if the user cannot be asked."""
        self.flush()
        question = f"[rank {rank}] {prompt}"
        return getpass.getpass(question) if password else input(question)

    def bind(self, send: SendToRank) -> None:  # noqa: B027  # a view without widgets has nothing to send
        """Set the function that sends messages to the ranks' widgets; called once, before any other method."""

    def read(self, message: RankMessage) -> RichOutput:
        """Return the display in a message."""
        return read_rich(message)

    def take_comm(self, message: RankMessage) -> None:  # noqa: B027
        """Handle a comm message of a rank's widget."""

    def begin(self, ranks: Sequence[int]) -> None:
        """A cell starts on `ranks`."""
        self.end()
        self._ranks = tuple(ranks)
        self._output = CellOutput(self._ranks, self.make_screen())

    def message(self, message: RankMessage, now_s: float) -> None:
        """A rank published a message."""
        output, rank, content = self._current(), message.rank, message.content
        if message.kind == "stream":
            output.text(rank, content["name"], content["text"].encode("utf-8", "replace"), now_s)
        elif message.kind == "clear_output":
            output.clear(rank, bool(content.get("wait")), now_s)
        elif message.kind in ("display_data", "execute_result", "update_display_data"):
            rich = self.read(message)
            if message.kind == "update_display_data":
                output.rich(rank, rich, now_s, is_update=True)
            elif rich.is_plain:
                output.result(rank, rich.text, now_s)
            else:
                output.rich(rank, rich, now_s)
        elif message.kind.startswith("comm_"):
            if message.kind == "comm_close":
                output.show_all()  # a front end cannot show a widget that is already closed
            self.take_comm(message)

    def raw(self, rank: int, stream: str, data: bytes, now_s: float) -> None:
        """A rank's process wrote bytes that bypassed Python; `stream` is "stdout" or "stderr"."""
        self._current().text(rank, stream, data, now_s, past_python=True)

    def show(self, now_s: float) -> None:
        """Show pending output that has waited long enough to be merged with equal output of other ranks."""
        if self._output is not None:
            self._output.show(now_s)

    def next_due_s(self) -> float | None:
        """Return when to call `show` next; None if no output is pending."""
        return None if self._output is None else self._output.next_due_s()

    def error(self, error: RankError | LaunchError) -> None:
        """Show the first failure in time; called as soon as it is known, before the group is rebuilt."""
        self.flush()
        self.advise(error)
        self.write_error("\n".join(error._render_traceback_()) + "\n")  # IPython's protocol for a coloured traceback

    @abstractmethod
    def write_error(self, text: str) -> None:
        """Write the text of an error, which may contain ANSI colours."""

    def note(self, text: str) -> None:
        """Show a message of ddpilot itself."""
        output = self._current()
        output.show_all()
        output.screen.note(text)
        output.screen.flush()

    def flush(self) -> None:
        """Show all pending output, including unfinished lines, so that an error or question appears below it."""
        self._current().finish_lines(time.monotonic())

    def end(self) -> None:
        """The cell is over: show all pending output."""
        output, self._output = self._output, None
        if output is not None:
            output.close(time.monotonic())

    def _current(self) -> CellOutput:
        if self._output is None:
            self._output = CellOutput(self._ranks, self.make_screen())
        return self._output


class TextView(View):
    """Shows text with labels in a terminal or script, on `sys.stdout` and `sys.stderr`.

    The limit applies per rank and cell; None: 1 MB in a notebook, else no limit.
    """

    def make_screen(self) -> TextScreen:
        return TextScreen(self._mode, self._limit_bytes)

    def write_error(self, text: str) -> None:
        """Write to stderr, with colours if it is a terminal."""
        stream = sys.stderr
        if stream is not None:
            has_colors = stream.isatty() and not os.environ.get("NO_COLOR")
            stream.write(text if has_colors else _COLOR.sub("", text))
            stream.flush()
