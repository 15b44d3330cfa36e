# SPDX-License-Identifier: Apache-2.0
"""`ScreenView`: base class of the views for terminals and notebooks; dispatches messages to one output per cell."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from ddpilot.errors import LaunchError, RankError
from ddpilot.output.cell_output import CellOutput
from ddpilot.output.rich_output import Rich, read_rich
from ddpilot.output.screen import Screen
from ddpilot.output.view import RankMessage, SendToRank


class ScreenView(ABC):
    """A view that shows each cell on a new `Screen`. Output between cells gets a screen of its own when needed."""

    def __init__(self) -> None:
        self._output: CellOutput | None = None
        self._ranks: tuple[int, ...] = ()
        self.advise: Callable[[RankError | LaunchError], None] = lambda error: None
        """Called with every error before it is shown; may set its `fix`."""

    @abstractmethod
    def make_screen(self) -> Screen:
        """Return the screen for a new cell."""

    @abstractmethod
    def ask(self, rank: int, prompt: str, password: bool) -> str:
        """Return the user's answer."""

    def bind(self, send: SendToRank) -> None:  # noqa: B027  # a view without widgets has nothing to send
        """Set the function that sends messages to the ranks' widgets."""

    def read(self, message: RankMessage) -> Rich:
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
        """Handle an iopub message of a rank."""
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
        """Handle bytes that a rank's process wrote bypassing Python."""
        self._current().text(rank, stream, data, now_s, past_python=True)

    def show(self, now_s: float) -> None:
        """Show output that has waited long enough."""
        if self._output is not None:
            self._output.show(now_s)

    def next_due_s(self) -> float | None:
        """Return when to call `show` next; None if nothing is pending."""
        return None if self._output is None else self._output.next_due_s()

    def error(self, error: RankError | LaunchError) -> None:
        """Show the first failure, after all output printed before it."""
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
        """The cell is over."""
        output, self._output = self._output, None
        if output is not None:
            output.close(time.monotonic())

    def _current(self) -> CellOutput:
        if self._output is None:
            self._output = CellOutput(self._ranks, self.make_screen())
        return self._output
