# SPDX-License-Identifier: Apache-2.0
"""Write ranks' lines to the parent's stdout and stderr, labelled; one rank's progress bar below them."""

from __future__ import annotations

import functools
import io
import sys
from collections.abc import Container, Iterable, Sequence
from typing import TextIO

from ddpilot.findings.words import render_ranks
from ddpilot.launching.options import Output
from ddpilot.launching.output.collapse import Waiting

_NOTEBOOK_LIMIT_BYTES = 1_000_000


class _Nowhere(io.TextIOBase):
    """Takes the place of a stream that the parent closed: Python sets `sys.stdout` to None then."""

    def write(self, text: str) -> int:
        return len(text)


class Display:
    """Where ranks' output is shown. Streams are the parent's `sys.stdout` and `sys.stderr` as they are now."""

    def __init__(self, mode: Output, limit_bytes: int | None) -> None:
        self._mode = mode
        self.shown_ranks: Container[int] | None = None
        """The only ranks whose output is shown; None: as `mode` says."""
        self._streams: dict[str, TextIO | _Nowhere] = {
            "stdout": sys.stdout or _Nowhere(),
            "stderr": sys.stderr or _Nowhere(),
        }
        self._limit_bytes = limit_bytes if limit_bytes is not None else _default_limit_bytes()
        self._shown_bytes: dict[int, int] = {}
        self._hidden_bytes: dict[int, int] = {}
        self._bar: tuple[str, str] | None = None  # stream, text

    @property
    def limit_bytes(self) -> int | None:
        """How much of what each rank prints is shown; None for all of it."""
        return self._limit_bytes

    def hides(self, rank: int) -> bool:
        """Whether nothing more of `rank` will be shown, so that its output need not be cut into lines."""
        is_over = self._limit_bytes is not None and self._shown_bytes.get(rank, 0) > self._limit_bytes
        return is_over or not self._is_wanted(rank)

    def count_hidden(self, rank: int, num_bytes: int) -> None:
        """Remember that `num_bytes` of `rank` were not shown because of the limit."""
        if self._is_wanted(rank):
            self._hidden_bytes[rank] = self._hidden_bytes.get(rank, 0) + num_bytes

    def _is_wanted(self, rank: int) -> bool:
        if self.shown_ranks is not None and rank not in self.shown_ranks:
            return False
        return self._mode == "labelled" or (self._mode == "rank_zero" and rank == 0)

    def line(self, ranks: Sequence[int], stream: str, text: str) -> None:
        """Show one line of `ranks`."""
        self._write(stream, self._labelled(ranks, text))

    def lines(self, entries: Iterable[Waiting]) -> None:
        """Show lines, those of one stream that follow each other by one write."""
        stream = ""
        texts: list[str] = []
        for entry in entries:
            if entry.stream != stream and texts:
                self._write(stream, "".join(texts))
                texts = []
            stream = entry.stream
            texts.append(self._labelled(entry.ranks, entry.text))
        if texts:
            self._write(stream, "".join(texts))

    def _labelled(self, ranks: Sequence[int], text: str) -> str:
        if self._limit_bytes is not None:
            for rank in ranks:
                self._shown_bytes[rank] = self._shown_bytes.get(rank, 0) + len(text) + 1
        return f"{_label(tuple(ranks))}{text}\n" if self._mode == "labelled" else f"{text}\n"

    def progress(self, stream: str, text: str, rank: int = 0) -> None:
        """Redraw the bar of the one rank whose bars are shown."""
        self._erase_bar()
        shown = f"[rank {rank}] {text}" if self._mode == "labelled" else text
        self._bar = (stream, shown)
        self._streams[stream].write(f"\r{shown}")
        self._streams[stream].flush()

    def end_progress(self, stream: str, text: str, rank: int = 0) -> None:
        """Leave a finished bar standing."""
        self.progress(stream, text, rank)
        self._bar = None
        self._streams[stream].write("\n")

    def note(self, text: str) -> None:
        """Say something of ddpilot's own, on stderr, whatever the mode."""
        self._write("stderr", f"ddpilot: {text}\n")

    def flush(self) -> None:
        """Hand everything written so far on."""
        for stream in self._streams.values():
            stream.flush()

    def close(self) -> None:
        """End the bar's line and say what was not shown."""
        if self._bar is not None:
            self._streams[self._bar[0]].write("\n")
            self._bar = None
        for rank, num_bytes in sorted(self._hidden_bytes.items()):
            self.note(
                f"{num_bytes / 1e6:.1f} MB more output of rank {rank} not shown "
                f"(limit {self._limit_bytes} bytes per rank, `output_limit_bytes=`)"
            )
        self.flush()

    def _write(self, stream: str, text: str) -> None:
        bar = self._bar
        self._erase_bar()
        self._streams[stream].write(text)
        if bar is not None:
            self._bar = bar
            self._streams[bar[0]].write(f"\r{bar[1]}")

    def _erase_bar(self) -> None:
        if self._bar is not None:
            stream, shown = self._bar
            self._streams[stream].write("\r" + " " * len(shown) + "\r")
            self._bar = None


@functools.lru_cache(maxsize=1024)
def _label(ranks: tuple[int, ...]) -> str:
    return f"[{render_ranks(ranks)}] "


def _default_limit_bytes() -> int | None:
    in_notebook = type(sys.stdout).__module__.partition(".")[0] == "ipykernel"
    return _NOTEBOOK_LIMIT_BYTES if in_notebook else None
