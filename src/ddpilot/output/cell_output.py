# SPDX-License-Identifier: Apache-2.0
"""Output of one cell: split into lines, merged if equal on several ranks, and shown in order.

`PartialLines` shows lines that have no newline yet, such as those of `print(".", end="", flush=True)` in a loop.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict, deque
from collections.abc import Sequence

from ddpilot.output.lines import Line, LineMerger, Lines, LineSplitter, PendingLine, Progress
from ddpilot.output.rich_output import RichOutput
from ddpilot.output.writer import TextScreen

_AFTER_S = 0.12
"""Seconds to wait for a newline: on a busy machine, complete lines of `print` also arrive in pieces."""

_MAX_CHARS = 100
"""Maximum length: a line that is redrawn in place has to fit into the window."""

Source = tuple[int, str, bool]
"""Rank, stream, and True if the output bypassed Python."""


class PartialLines:
    """Draws the unfinished line of the lowest rank that has one. Times are seconds of the monotonic clock."""

    def __init__(self, screen: TextScreen) -> None:
        self._screen = screen
        self._waiting: dict[Source, tuple[str, float]] = {}  # text, and the time at which to draw it
        self._drawn: tuple[Source, str] | None = None

    def update(self, source: Source, text: str, now_s: float) -> None:
        """Set the unfinished line of a source to `text`; "" if the line has ended."""
        if text:
            _, due_s = self._waiting.get(source, ("", now_s + _AFTER_S))
            self._waiting[source] = text, due_s
            return
        self._waiting.pop(source, None)
        if self._drawn is not None and self._drawn[0] == source:
            self.erase()

    def erase(self) -> None:
        """Remove the line that is drawn: a progress bar or the complete line replaces it."""
        if self._drawn is not None:
            self._screen.unfinished(self._drawn[0][1], "")
            self._drawn = None

    def draw(self, now_s: float) -> bool:
        """Draw the line if it is due. Return True if anything changed."""
        wanted = self._wanted()
        if wanted is None or wanted == self._drawn or self._waiting[wanted[0]][1] > now_s:
            return False
        source, text = self._drawn = wanted
        self._waiting[source] = text, now_s + _AFTER_S
        self._screen.unfinished(source[1], text, source[0])
        return True

    def next_due_s(self) -> float | None:
        """Return when to call `draw` next; None if nothing is pending."""
        wanted = self._wanted()
        return None if wanted is None or wanted == self._drawn else self._waiting[wanted[0]][1]

    def _wanted(self) -> tuple[Source, str] | None:
        source = min(self._waiting, default=None)
        return None if source is None else (source, self._waiting[source][0])


_BAR_S = 0.05
"""Minimum seconds between two redraws of a progress bar; some loops redraw theirs thousands of times per second."""


_LOWER_BAR_S = 0.5
"""Seconds by which the first bar of a rank other than the lowest is delayed, as the lowest rank may be about to draw
one."""

_FLOOD_BYTES = 1 << 18
"""Show pending output, and count it for the limit, after at most this many bytes, even if `show` is not called."""

_ADDRESS = re.compile(r" at 0x[0-9a-f]{6,16}\b")
"""Address of an object in a rank's memory, which differs between ranks and is replaced."""


class CellOutput:
    """Takes the output of `ranks` during one cell. Times are seconds of the monotonic clock."""

    def __init__(self, ranks: Sequence[int], screen: TextScreen) -> None:
        self.screen = screen
        self._lead = min(ranks, default=0)  # the rank whose bars are shown, if it draws any
        self._first_bar_s: dict[int, float] = {}  # by rank: time of its first bar
        self._unshown_bars: dict[int, tuple[str, str]] = {}  # by rank: stream and text of its last bar
        self._merger = LineMerger(max(1, len(ranks)))
        self._splitters: dict[Source, LineSplitter] = defaultdict(LineSplitter)
        self._unfinished = PartialLines(screen)
        self._rich: dict[int, deque[RichOutput]] = defaultdict(deque)  # by rank, in order of arrival
        self._bar: tuple[str, str, int] | None = None  # stream, text, rank; not drawn yet
        self._has_bar = False  # True while a bar is unfinished
        self._drawn_s = 0.0
        self._is_new = False
        self._num_unshown_bytes = 0
        self._taken_bytes: Counter[int] = Counter()

    def text(self, rank: int, stream: str, data: bytes, now_s: float, *, past_python: bool = False) -> None:
        """Add bytes that a rank printed. Output that bypassed Python is split into lines separately."""
        if self.screen.hides(rank):
            self.screen.count_hidden(rank, len(data))
            return
        data = self._cut(rank, data)
        source = rank, stream, past_python
        for piece in self._splitters[source].feed(data):
            self._take(rank, stream, piece, now_s)
        self._unfinished.update(source, self._splitters[source].unfinished(_MAX_CHARS), now_s)
        self._num_unshown_bytes += len(data)
        if self._num_unshown_bytes > _FLOOD_BYTES:
            self._emit_ready(now_s)

    def _cut(self, rank: int, data: bytes) -> bytes:
        """Return the part of `data` within the limit. It is counted on arrival, as output may wait to be merged.

        Redraws of a progress bar do not count, as most of them are not shown.
        """
        limit = self.screen.limit_bytes
        if limit is None or b"\r" in data:
            return data
        room = max(0, limit - self._taken_bytes[rank])
        self._taken_bytes[rank] += len(data)
        if len(data) <= room:
            return data
        end = data.rfind(b"\n", 0, room) + 1 or room
        self.screen.count_hidden(rank, len(data) - end)
        return data[:end] if data[:end].endswith(b"\n") or not end else data[:end] + b"\n"

    def result(self, rank: int, text: str, now_s: float) -> None:
        """Add text that is merged with equal text of other ranks as a whole or not at all."""
        if self.screen.hides(rank):
            self.screen.count_hidden(rank, len(text))
        else:
            self._merger.add(rank, "result", _ADDRESS.sub(" at 0x…", text), now_s)

    def rich(self, rank: int, rich: RichOutput, now_s: float, *, is_update: bool = False) -> None:
        """Add a rich display, or with `is_update` the new content of an earlier one."""
        if not self.screen.hides_rich(rank):
            self._rich[rank].append(rich)
            self._merger.add(rank, "update" if is_update else "rich", rich.fingerprint, now_s)

    def clear(self, rank: int, wait: bool, now_s: float) -> None:
        """Handle `clear_output` of a rank."""
        if not self.screen.hides_rich(rank):
            self._merger.add(rank, "clear", "wait" if wait else "", now_s)

    def show(self, now_s: float) -> None:
        """Show output that has waited long enough."""
        self._emit_ready(now_s)
        if self._bar is not None and now_s >= self._drawn_s + _BAR_S:
            self._draw(now_s)
        if not self._has_bar:
            self._is_new = self._unfinished.draw(now_s) or self._is_new
        if self._is_new:
            self.screen.flush()
            self._is_new = False

    def show_all(self) -> None:
        """Show all pending output, in order."""
        self._emit_all(self._merger.flush())
        if self._bar is not None:
            self._draw(self._drawn_s)
        self.screen.flush()

    def next_due_s(self) -> float | None:
        """Return when to call `show` next; None if nothing is pending."""
        dues = [self._merger.next_due_s(), None if self._has_bar else self._unfinished.next_due_s()]
        if self._bar is not None:
            dues.append(self._drawn_s + _BAR_S)
        return min((due for due in dues if due is not None), default=None)

    def finish_lines(self, now_s: float) -> None:
        """Show all pending output, including unfinished lines."""
        for source, splitter in sorted(self._splitters.items()):
            for piece in splitter.close():
                self._take(*source[:2], piece, now_s)
            self._unfinished.update(source, "", now_s)
        self.show_all()

    def close(self, now_s: float) -> None:
        """The cell is over: show everything and close the screen."""
        self.finish_lines(now_s)
        rank = min(self._first_bar_s, default=self._lead)
        if rank in self._unshown_bars:  # the bar ended while a lower rank might still have drawn one
            self.screen.end_progress(*self._unshown_bars[rank], rank)
        self.screen.close()

    def _take(self, rank: int, stream: str, piece: Lines | Line | Progress, now_s: float) -> None:
        if isinstance(piece, Lines):
            self._merger.add_lines(rank, stream, piece.texts, now_s)
        elif isinstance(piece, Line) and not piece.is_progress:
            self._merger.add(rank, stream, piece.text, now_s)
        elif not self._draws_bars(rank, now_s):
            self._unshown_bars[rank] = stream, piece.text
        else:
            self._unshown_bars.pop(rank, None)
            if isinstance(piece, Progress):
                self._unfinished.erase()
                self._bar, self._has_bar = (stream, piece.text, rank), True
            else:
                self._bar = None
                self.show(now_s)
                self._unfinished.erase()  # left over if the bar was never redrawn
                self.screen.end_progress(stream, piece.text, rank)
                self._has_bar = False
                self.screen.flush()

    def _draws_bars(self, rank: int, now_s: float) -> bool:
        """True if bars of `rank` are shown: it is the lowest rank that draws any."""
        first_s = self._first_bar_s.setdefault(rank, now_s)
        is_lowest = rank == min(self._first_bar_s)
        return is_lowest and (rank == self._lead or now_s >= first_s + _LOWER_BAR_S)

    def _emit_ready(self, now_s: float) -> None:
        self._num_unshown_bytes = 0
        self._emit_all(self._merger.ready(now_s))

    def _emit_all(self, entries: Sequence[PendingLine]) -> None:
        if entries:
            with self.screen.above_bar():
                for entry in entries:
                    self._emit(entry)

    def _draw(self, now_s: float) -> None:
        if self._bar is not None:
            self._is_new = True
            self.screen.progress(*self._bar)
            self._bar, self._drawn_s = None, now_s

    def _emit(self, entry: PendingLine) -> None:
        self._is_new = True
        if entry.stream in ("rich", "update"):
            items = {rank: self._rich[rank].popleft() for rank in sorted(entry.ranks)}
            if entry.stream == "rich":
                self.screen.rich(items)
            else:
                self.screen.update(items)
        elif entry.stream == "clear":
            self.screen.clear(sorted(entry.ranks), entry.text == "wait")
        else:
            stream = "stdout" if entry.stream == "result" else entry.stream
            for line in entry.text.split("\n") if entry.stream == "result" else (entry.text,):
                self.screen.line(entry.ranks, stream, line)
