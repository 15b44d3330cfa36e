# SPDX-License-Identifier: Apache-2.0
"""What the views for a terminal and for a notebook have in common: reading messages, one output per cell."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from ddpilot.errors import LaunchError, RankError
from ddpilot.session.shown.output import CellOutput
from ddpilot.session.shown.rich import Rich, read_rich
from ddpilot.session.shown.screen import Screen
from ddpilot.session.view import RankMessage, SendToRank


class ScreenView(ABC):
    """A view that shows each cell on a `Screen` of its own. What comes between cells has one too, made when needed."""

    def __init__(self) -> None:
        self._output: CellOutput | None = None
        self._ranks: tuple[int, ...] = ()
        self.advise: Callable[[RankError | LaunchError], None] = lambda error: None
        """Called with every error before it is shown; may give it a `fix`."""

    @abstractmethod
    def make_screen(self) -> Screen:
        """The screen for a cell that starts now."""

    @abstractmethod
    def ask(self, rank: int, prompt: str, password: bool) -> str:
        """What the person answers."""

    def bind(self, send: SendToRank) -> None:  # noqa: B027  # a view without widgets has nothing to send
        """Take the way back to the ranks' widgets."""

    def read(self, message: RankMessage) -> Rich:
        """The display in a message."""
        return read_rich(message)

    def take_comm(self, message: RankMessage) -> None:  # noqa: B027
        """A rank's widget said something."""

    def begin(self, ranks: Sequence[int]) -> None:
        """A cell starts on these ranks."""
        self.end()
        self._ranks = tuple(ranks)
        self._output = CellOutput(self._ranks, self.make_screen())

    def message(self, message: RankMessage, now_s: float) -> None:
        """Take what a rank published."""
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
                output.show_all()  # a front end cannot show what is closed already
            self.take_comm(message)

    def raw(self, rank: int, stream: str, data: bytes, now_s: float) -> None:
        """Take what a rank's process wrote past Python."""
        self._current().text(rank, stream, data, now_s, past_python=True)

    def show(self, now_s: float) -> None:
        """Show what has waited long enough."""
        if self._output is not None:
            self._output.show(now_s)

    def next_due_s(self) -> float | None:
        """When `show` has something to do next."""
        return None if self._output is None else self._output.next_due_s()

    def error(self, error: RankError | LaunchError) -> None:
        """Show the first failure, behind what was printed before it."""
        self.flush()
        self.advise(error)
        self.write_error("\n".join(error._render_traceback_()) + "\n")  # IPython's name for the text with colours

    @abstractmethod
    def write_error(self, text: str) -> None:
        """Write the text of an error; it may have ANSI colours."""

    def note(self, text: str) -> None:
        """Say something of ddpilot's own."""
        output = self._current()
        output.show_all()
        output.screen.note(text)
        output.screen.flush()

    def flush(self) -> None:
        """Show everything that waits, unfinished lines too: an error or a question comes behind them."""
        self._current().finish_lines(time.monotonic())

    def end(self) -> None:
        """The cell is over."""
        output, self._output = self._output, None
        if output is not None:
            output.close(time.monotonic())

    def _current(self) -> CellOutput:
        if self._output is None:
            self._output = CellOutput(self._ranks, self.make_screen())
        return self._output
