# SPDX-License-Identifier: Apache-2.0
"""Where a cell's output ends up once it is cut, collapsed and compared: the part that differs between front ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from ddpilot.launching.output.display import Display
from ddpilot.session.shown.rich import Rich


class Screen(Protocol):
    """Shows the output of one cell. `items` are displays that look the same, by rank."""

    @property
    def limit_bytes(self) -> int | None:
        """How much of what each rank prints is shown; None for all of it."""

    def hides(self, rank: int) -> bool:
        """Whether nothing more that `rank` prints will be shown."""

    def hides_rich(self, rank: int) -> bool:
        """Whether no rich object of `rank` is shown."""

    def count_hidden(self, rank: int, num_bytes: int) -> None:
        """Remember that so much of `rank` was not shown."""

    def line(self, ranks: Sequence[int], stream: str, text: str) -> None:
        """Show a line."""

    def progress(self, stream: str, text: str, rank: int = 0) -> None:
        """Redraw the one progress bar."""

    def end_progress(self, stream: str, text: str, rank: int = 0) -> None:
        """Leave the bar standing."""

    def unfinished(self, stream: str, text: str, rank: int = 0) -> None:
        """Show a line that has no end yet, below all others, until `rank` goes on with it; "" to take it away."""

    def rich(self, items: Mapping[int, Rich]) -> None:
        """Show an object."""

    def update(self, items: Mapping[int, Rich]) -> None:
        """Show something else in place of what has the same display id."""

    def clear(self, ranks: Sequence[int], wait: bool) -> None:
        """Take away what `ranks` have shown; with `wait`, when they show something next."""

    def note(self, text: str) -> None:
        """Say something of ddpilot's own."""

    def flush(self) -> None:
        """Hand everything shown so far on to the front end."""

    def close(self) -> None:
        """The cell is over."""


class TextScreen(Display):
    """Text alone, on the parent's stdout and stderr: an object is shown as what `print` would make of it."""

    def hides_rich(self, rank: int) -> bool:
        """Whether the mode leaves this rank out."""
        return self.hides(rank)

    def unfinished(self, stream: str, text: str, rank: int = 0) -> None:
        """Draw the line where a bar would be, unless that is a file; "" takes it away."""
        out = self._streams[stream]
        if text and (out.isatty() or type(out).__module__.startswith("ipykernel")):
            self.progress(stream, text, rank)
        elif not text:
            self._erase_bar()

    def rich(self, items: Mapping[int, Rich]) -> None:
        """Show the object's text."""
        text = next(iter(items.values())).text
        for line in text.split("\n") if text else ():
            self.line(list(items), "stdout", line)

    def update(self, items: Mapping[int, Rich]) -> None:
        """Show the new text, unless it only says that there is an object."""
        if not next(iter(items.values())).text.startswith("<"):
            self.rich(items)

    def clear(self, ranks: Sequence[int], wait: bool) -> None:
        """Leave everything: what a terminal has shown stays."""
