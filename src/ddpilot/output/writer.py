# SPDX-License-Identifier: Apache-2.0
"""Write ranks' lines, labelled, to the parent's stdout and stderr, with one rank's progress bar below them."""

from __future__ import annotations

import functools
import io
import sys
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal, TextIO

from ddpilot.findings.text import render_ranks
from ddpilot.output.lines import PendingLine
from ddpilot.output.rich_output import RichOutput

Output = Literal["labelled", "rank_zero", "silent"]

_NOTEBOOK_LIMIT_BYTES = 1_000_000


class _Nowhere(io.TextIOBase):
    """Replaces a stream that the parent closed: Python then sets `sys.stdout` to None."""

    def write(self, text: str) -> int:
        return len(text)


class LabelledWriter:
    """Displays ranks' output on the parent's `sys.stdout` and `sys.stderr` as they are at construction."""

    def __init__(self, mode: Output, limit_bytes: int | None) -> None:
        self._mode = mode
        self.shown_ranks: Container[int] | None = None
        """Ranks whose output is shown; None: determined by `mode`."""
        self._streams: dict[str, TextIO | _Nowhere] = {
            "stdout": sys.stdout or _Nowhere(),
            "stderr": sys.stderr or _Nowhere(),
        }
        self.limit_bytes = limit_bytes if limit_bytes is not None else _default_limit_bytes()
        """Bytes of each rank's output that are shown; None for no limit."""
        self._shown_bytes: dict[int, int] = {}
        self._hidden_bytes: dict[int, int] = {}
        self._bar: tuple[str, str] | None = None  # stream, text

    def hides(self, rank: int) -> bool:
        """True if no more output of `rank` will be shown, so that it need not be split into lines."""
        is_over = self.limit_bytes is not None and self._shown_bytes.get(rank, 0) > self.limit_bytes
        return is_over or not self._is_wanted(rank)

    def count_hidden(self, rank: int, num_bytes: int) -> None:
        """Count `num_bytes` of `rank` as not shown because of the limit."""
        if self._is_wanted(rank):
            self._hidden_bytes[rank] = self._hidden_bytes.get(rank, 0) + num_bytes

    def _is_wanted(self, rank: int) -> bool:
        if self.shown_ranks is not None and rank not in self.shown_ranks:
            return False
        return self._mode == "labelled" or (self._mode == "rank_zero" and rank == 0)

    def line(self, ranks: Sequence[int], stream: str, text: str) -> None:
        """Show one line, labelled with `ranks`."""
        if self.limit_bytes is not None:
            self._count_shown(ranks, text)
        self._write(stream, f"{self._label(ranks)}{text}\n")

    def lines(self, entries: Iterable[PendingLine]) -> None:
        """Show lines, with one write for consecutive lines of the same stream."""
        stream, label = "", ""
        ranks: list[int] = []
        texts: list[str] = []
        for entry in entries:
            if entry.stream != stream and texts:
                self._write(stream, "".join(texts))
                texts = []
            stream = entry.stream
            if entry.ranks != ranks:
                ranks = entry.ranks
                label = self._label(ranks)
            texts.append(f"{label}{entry.text}\n")
            if self.limit_bytes is not None:
                self._count_shown(ranks, entry.text)
        if texts:
            self._write(stream, "".join(texts))

    def _label(self, ranks: Sequence[int]) -> str:
        return _label(tuple(ranks)) if self._mode == "labelled" else ""

    def _count_shown(self, ranks: Sequence[int], text: str) -> None:
        for rank in ranks:
            self._shown_bytes[rank] = self._shown_bytes.get(rank, 0) + len(text) + 1

    def progress(self, stream: str, text: str, rank: int = 0) -> None:
        """Redraw the progress bar; only one rank's bars are shown."""
        self._erase_bar()
        shown = f"[rank {rank}] {text}" if self._mode == "labelled" else text
        self._bar = (stream, shown)
        self._streams[stream].write(f"\r{shown}")
        self._streams[stream].flush()

    def end_progress(self, stream: str, text: str, rank: int = 0) -> None:
        """Draw a finished progress bar and move to the next line."""
        self.progress(stream, text, rank)
        self._bar = None
        self._streams[stream].write("\n")

    def note(self, text: str) -> None:
        """Show a notice of ddpilot on stderr, in every mode."""
        self._write("stderr", f"ddpilot: {text}\n")

    def flush(self) -> None:
        """Flush both streams."""
        for stream in self._streams.values():
            stream.flush()

    def close(self) -> None:
        """Finish the line of the progress bar and report how much output was not shown."""
        if self._bar is not None:
            self._streams[self._bar[0]].write("\n")
            self._bar = None
        for rank, num_bytes in sorted(self._hidden_bytes.items()):
            self.note(
                f"{num_bytes / 1e6:.1f} MB more output of rank {rank} not shown "
                f"(limit {self.limit_bytes} bytes per rank, `output_limit_bytes=`)"
            )
        self.flush()

    @contextmanager
    def above_bar(self) -> Iterator[None]:
        """Erase the progress bar, and draw it again below what is shown meanwhile: once, however much that is."""
        bar = self._bar
        self._erase_bar()
        yield
        if bar is not None and self._bar is None:
            self._bar = bar
            self._streams[bar[0]].write(f"\r{bar[1]}")

    def _write(self, stream: str, text: str) -> None:
        with self.above_bar():
            self._streams[stream].write(text)

    def _erase_bar(self) -> None:
        if self._bar is not None:
            stream, shown = self._bar
            self._streams[stream].write("\r" + " " * len(shown) + "\r")
            self._bar = None


class TextScreen(LabelledWriter):
    """Displays the output of one cell as text: a rich display is shown as its plain text.

    `items` are displays that look the same, by rank.
    """

    def hides_rich(self, rank: int) -> bool:
        """True if no rich displays of `rank` are shown."""
        return self.hides(rank)

    def unfinished(self, stream: str, text: str, rank: int = 0) -> None:
        """Show a line without a newline below all others, until `rank` continues it; "" removes it.

        It is drawn in place of a progress bar, unless the stream is a file.
        """
        out = self._streams[stream]
        if text and (out.isatty() or type(out).__module__.startswith("ipykernel")):
            self.progress(stream, text, rank)
        elif not text:
            self._erase_bar()

    def rich(self, items: Mapping[int, RichOutput]) -> None:
        """Show a rich display."""
        text = next(iter(items.values())).text
        for line in text.split("\n") if text else ():
            self.line(list(items), "stdout", line)

    def update(self, items: Mapping[int, RichOutput]) -> None:
        """Replace the content of the displays with the same display id.

        As text, the new content is shown again, unless it is only a placeholder such as "<Figure ...>".
        """
        if not next(iter(items.values())).text.startswith("<"):
            self.rich(items)

    def clear(self, ranks: Sequence[int], wait: bool) -> None:
        """Remove the output of `ranks`; with `wait`, when they show something new. Text cannot be removed."""


@functools.lru_cache(maxsize=1024)
def _label(ranks: tuple[int, ...]) -> str:
    return f"[{render_ranks(ranks)}] "


def _default_limit_bytes() -> int | None:
    in_notebook = type(sys.stdout).__module__.partition(".")[0] == "ipykernel"
    return _NOTEBOOK_LIMIT_BYTES if in_notebook else None
