# SPDX-License-Identifier: Apache-2.0
"""Split a stream of bytes into lines and progress-bar updates."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

_MAX_LINE_BYTES = 64 * 1024
_CURSOR_MOVES = re.compile(rb"\x1b\[\d*[A-HJK]")  # nested bars move the cursor, which would garble other ranks' lines


class Line(NamedTuple):
    """A complete line without its line break. `is_progress`: it is the last state of a progress bar."""

    text: str
    is_progress: bool = False


class Lines(NamedTuple):
    """Complete lines without their line breaks, none of which is the last state of a progress bar."""

    texts: list[str]


class Progress(NamedTuple):
    """Current text of a progress bar that redraws itself with carriage returns."""

    text: str


class LineSplitter:
    """Splits the bytes of one stream of one rank. Memory is bounded: a line over 64 KiB is split into pieces."""

    def __init__(self) -> None:
        self._pending = b""

    def feed(self, data: bytes) -> list[Lines | Line | Progress]:
        """The lines that `data` completes, and the current progress bar if it is unfinished."""
        without_moves = _CURSOR_MOVES.sub(b"", data)
        moved = len(without_moves) != len(data)
        complete, end, rest = (self._pending + without_moves).rpartition(b"\n")
        found: list[Lines | Line | Progress] = []
        if moved or b"\r" in complete:
            found += [_line(raw) for raw in complete.split(b"\n") if raw.strip() or not moved] if end else []
        elif end:
            found.append(Lines(complete.decode(errors="replace").split("\n")))
        while len(rest) > _MAX_LINE_BYTES and b"\r" not in rest:
            found.append(_line(rest[:_MAX_LINE_BYTES]))
            rest = rest[_MAX_LINE_BYTES:]
        if b"\r" in rest:
            shown = _last_segment(rest)
            if shown:
                found.append(Progress(shown.decode(errors="replace")))
            rest = (
                b"\r" + rest[rest.rindex(b"\r") + 1 :][-_MAX_LINE_BYTES:] if not rest.endswith(b"\r") else b"\r" + shown
            )
        self._pending = rest
        return found

    def close(self) -> list[Lines | Line | Progress]:
        """The last line, if it had no line break."""
        rest, self._pending = self._pending, b""
        return [_line(rest)] if rest.strip() else []


def texts_of(pieces: Iterable[Lines | Line | Progress]) -> Iterator[str]:
    """Yield the complete lines of `pieces`."""
    for piece in pieces:
        if isinstance(piece, Lines):
            yield from piece.texts
        elif isinstance(piece, Line):
            yield piece.text


def _line(raw: bytes) -> Line:
    body = raw.rstrip(b"\r")
    text = _last_segment(body) if b"\r" in body else body
    return Line(text.decode(errors="replace"), is_progress=b"\r" in body)


def _last_segment(raw: bytes) -> bytes:
    return next((segment for segment in reversed(raw.split(b"\r")) if segment.strip()), b"")
