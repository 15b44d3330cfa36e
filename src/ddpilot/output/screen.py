# SPDX-License-Identifier: Apache-2.0
"""`Screen`: interface for displaying a cell's merged output; `TextScreen` displays it as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from ddpilot.output.rich_output import RichOutput
from ddpilot.output.writer import LabelledWriter


class Screen(Protocol):
    """Displays the output of one cell. `items` are displays that look the same, by rank."""

    @property
    def limit_bytes(self) -> int | None:
        """Maximum bytes of each rank's output to show; None for no limit."""

    def hides(self, rank: int) -> bool:
        """True if no more output of `rank` will be shown."""

    def hides_rich(self, rank: int) -> bool:
        """True if no rich displays of `rank` are shown."""

    def count_hidden(self, rank: int, num_bytes: int) -> None:
        """Record that `num_bytes` of output of `rank` were not shown."""

    def line(self, ranks: Sequence[int], stream: str, text: str) -> None:
        """Show a line."""

    def progress(self, stream: str, text: str, rank: int = 0) -> None:
        """Redraw the progress bar."""

    def end_progress(self, stream: str, text: str, rank: int = 0) -> None:
        """Show the final state of the progress bar and keep it."""

    def unfinished(self, stream: str, text: str, rank: int = 0) -> None:
        """Show a line without a newline below all others, until `rank` continues it; "" removes it."""

    def rich(self, items: Mapping[int, RichOutput]) -> None:
        """Show a rich display."""

    def update(self, items: Mapping[int, RichOutput]) -> None:
        """Replace the content of the displays with the same display id."""

    def clear(self, ranks: Sequence[int], wait: bool) -> None:
        """Remove the output of `ranks`; with `wait`, when they show something new."""

    def note(self, text: str) -> None:
        """Show a message of ddpilot itself."""

    def flush(self) -> None:
        """Flush everything shown so far to the front end."""

    def close(self) -> None:
        """The cell is over."""


class TextScreen(LabelledWriter):
    """Text only, on the parent's stdout and stderr: a rich display is shown as its plain text."""

    def hides_rich(self, rank: int) -> bool:
        return self.hides(rank)

    def unfinished(self, stream: str, text: str, rank: int = 0) -> None:
        """Draw the line in place of a progress bar, unless the stream is a file; "" removes it."""
        out = self._streams[stream]
        if text and (out.isatty() or type(out).__module__.startswith("ipykernel")):
            self.progress(stream, text, rank)
        elif not text:
            self._erase_bar()

    def rich(self, items: Mapping[int, RichOutput]) -> None:
        text = next(iter(items.values())).text
        for line in text.split("\n") if text else ():
            self.line(list(items), "stdout", line)

    def update(self, items: Mapping[int, RichOutput]) -> None:
        """Show the new text, unless it is only a placeholder such as "<Figure ...>"."""
        if not next(iter(items.values())).text.startswith("<"):
            self.rich(items)

    def clear(self, ranks: Sequence[int], wait: bool) -> None:
        """Do nothing: terminal output cannot be removed."""
