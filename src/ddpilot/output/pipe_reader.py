# SPDX-License-Identifier: Apache-2.0
"""Read the output pipes of all ranks of a launch, show their lines, and keep each rank's last lines."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping, Sequence
from typing import BinaryIO

from ddpilot.output.lines import Line, LineMerger, Lines, LineSplitter, Progress, texts_of
from ddpilot.output.writer import LabelledWriter
from ddpilot.user_files import name_cells

_CHUNK_BYTES = 1 << 16
_MAX_PIPE_BYTES = 1 << 20
_MAX_LAST_LINES = 200
_CELL = "ipykernel_"
"""Part of every file name under which a notebook's kernel compiles cells."""
_HIDDEN_BYTES = 1 << 14
"""Bytes of each 64 KiB of hidden output that are split into lines, for error reports; splitting is the main cost."""


class PipeReader:
    """Reads the ranks' stdout and stderr pipes, identified by (rank, "stdout" or "stderr").

    `ranks`: number of ranks, or the ranks if they do not start at 0; progress bars of the lowest one are shown.
    `copies`: files that also get every byte of a stream.
    """

    def __init__(
        self,
        ranks: int | Sequence[int],
        display: LabelledWriter,
        copies: Mapping[tuple[int, str], BinaryIO] | None = None,
    ) -> None:
        numbers = range(ranks) if isinstance(ranks, int) else ranks
        self.display = display
        self._copies = copies or {}
        self.num_bytes = 0
        """Bytes read so far from all pipes."""
        self._bars_rank = min(numbers)
        self._merger = LineMerger(len(numbers))
        self._splitters: dict[tuple[int, str], LineSplitter] = {}
        self._last_lines = {rank: deque[str](maxlen=_MAX_LAST_LINES) for rank in numbers}

    def last_lines(self, rank: int) -> tuple[str, ...]:
        """The last 200 lines that `rank` printed, stdout and stderr in the order of arrival."""
        return tuple(self._last_lines[rank])

    def read(self, fd: int, rank: int, stream: str, now_s: float) -> bool:
        """Read at most 64 KiB from a readable pipe. Returns False at its end."""
        data = os.read(fd, _CHUNK_BYTES)
        self.feed(rank, stream, data, now_s)
        return bool(data)

    def feed(self, rank: int, stream: str, data: bytes, now_s: float) -> None:
        """Add what a rank wrote to a stream; b"" if the stream has ended."""
        self.num_bytes += len(data)
        if (rank, stream) in self._copies:
            self._copies[rank, stream].write(data)
        splitter = self._splitters.setdefault((rank, stream), LineSplitter())
        if self.display.hides(rank):
            self.display.count_hidden(rank, len(data))
            pieces = splitter.feed(data[-_HIDDEN_BYTES:]) if data else splitter.close()
            self._last_lines[rank].extend(texts_of(pieces))
        else:
            self._take(rank, stream, splitter.feed(data) if data else splitter.close(), now_s)

    def finish(self, rank: int, now_s: float) -> None:
        """Add the unfinished lines of a rank that exited."""
        for stream in [stream for each, stream in self._splitters if each == rank]:
            self.feed(rank, stream, b"", now_s)

    def drain(self, fd: int, rank: int, stream: str, now_s: float) -> None:
        """Read what is in the pipe of a rank that exited, at most 1 MiB; processes it left may write forever."""
        os.set_blocking(fd, False)
        try:
            for _ in range(_MAX_PIPE_BYTES // _CHUNK_BYTES):
                if not self.read(fd, rank, stream, now_s):
                    return
        except BlockingIOError:
            self._take(rank, stream, self._splitters.get((rank, stream), LineSplitter()).close(), now_s)

    def _take(self, rank: int, stream: str, pieces: Sequence[Lines | Line | Progress], now_s: float) -> None:
        last_lines = self._last_lines[rank]
        for piece in pieces:
            if isinstance(piece, Lines):
                last_lines.extend(piece.texts[-_MAX_LAST_LINES:])
                texts = (name_cells(text) if _CELL in text else text for text in piece.texts)
                self._merger.add_lines(rank, stream, texts, now_s)
            elif isinstance(piece, Line):
                last_lines.append(piece.text)
                if not piece.is_progress:
                    self._merger.add(rank, stream, name_cells(piece.text), now_s)
                elif rank == self._bars_rank:
                    self.show(now_s)
                    self.display.end_progress(stream, piece.text, rank)
            elif rank == self._bars_rank:
                self.show(now_s)
                self.display.progress(stream, piece.text, rank)

    def show(self, now_s: float) -> None:
        """Show the lines that have waited long enough for the same line of other ranks."""
        self.display.lines(self._merger.ready(now_s))

    def next_due_s(self) -> float | None:
        """When `show` must be called next; None if no line is waiting."""
        return self._merger.next_due_s()

    def close(self) -> None:
        """Show all waiting lines and close the display."""
        self.display.lines(self._merger.flush())
        self.display.close()
