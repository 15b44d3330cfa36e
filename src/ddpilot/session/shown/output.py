# SPDX-License-Identifier: Apache-2.0
"""One cell's output on its way to a screen: cut into lines, what several ranks show alike collapsed, in order."""

from __future__ import annotations

import re
from collections import Counter, defaultdict, deque
from collections.abc import Sequence

from ddpilot.launching.output.collapse import Collapser, Waiting
from ddpilot.launching.output.lines import Line, Progress
from ddpilot.session.shown.rich import Rich
from ddpilot.session.shown.screen import Screen
from ddpilot.session.shown.unfinished import OpenLineSplitter, UnfinishedLines

_BAR_S = 0.05
"""A bar is redrawn so often at most: some loops redraw theirs thousands of times in a second."""


_LOWER_BAR_S = 0.5
"""A rank that is not the lowest draws its first bar so late: the lowest one's may be about to come."""

_FLOOD_BYTES = 1 << 18
"""A flood is shown, and so counted for the limit, in such pieces, also where nobody finds the time to call `show`."""

_ADDRESS = re.compile(r" at 0x[0-9a-f]{6,16}\b")
"""Where a rank has an object in its memory: of no use here, and never the same on two ranks."""


class CellOutput:
    """Takes what `ranks` say while one cell runs. Times are seconds of the monotonic clock."""

    def __init__(self, ranks: Sequence[int], screen: Screen) -> None:
        self.screen = screen
        self._lead = min(ranks, default=0)  # whose bars are shown, if it draws any
        self._first_bar_s: dict[int, float] = {}  # by rank: when it drew its first bar
        self._unshown_bars: dict[int, tuple[str, str]] = {}  # by rank: stream and text of the last one
        self._collapser = Collapser(max(1, len(ranks)))
        self._splitters: dict[tuple[int, str, bool], OpenLineSplitter] = defaultdict(OpenLineSplitter)
        self._unfinished = UnfinishedLines(screen)
        self._rich: dict[int, deque[Rich]] = defaultdict(deque)  # by rank, in the order in which they wait
        self._bar: tuple[str, str, int] | None = None  # stream, text, rank; not drawn yet
        self._has_bar = False  # one that is not through yet
        self._drawn_s = 0.0
        self._is_new = False
        self._num_unshown_bytes = 0
        self._taken_bytes: Counter[int] = Counter()

    def text(self, rank: int, stream: str, data: bytes, now_s: float, *, past_python: bool = False) -> None:
        """Bytes that a rank printed. Python's own and those of other code are cut into lines apart."""
        if self.screen.hides(rank):
            self.screen.count_hidden(rank, len(data))
            return
        data = self._cut(rank, data)
        source = rank, stream, past_python
        for piece in self._splitters[source].feed(data):
            self._take(rank, stream, piece, now_s)
        self._unfinished.update(source, self._splitters[source].unfinished, now_s)
        self._num_unshown_bytes += len(data)
        if self._num_unshown_bytes > _FLOOD_BYTES:
            self._emit_ready(now_s)

    def _cut(self, rank: int, data: bytes) -> bytes:
        """What of `data` is within the limit, counted as it comes: a flood waits for its like, all of it at once.

        A bar that redraws itself does not count, since little of it is shown.
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
        """Text that stays together: collapsed as a whole or not at all."""
        if self.screen.hides(rank):
            self.screen.count_hidden(rank, len(text))
        else:
            self._collapser.add(rank, "result", _ADDRESS.sub(" at 0x…", text), now_s)

    def rich(self, rank: int, rich: Rich, now_s: float, *, is_update: bool = False) -> None:
        """An object, or what takes the place of an earlier one."""
        if not self.screen.hides_rich(rank):
            self._rich[rank].append(rich)
            self._collapser.add(rank, "update" if is_update else "rich", rich.fingerprint, now_s)

    def clear(self, rank: int, wait: bool, now_s: float) -> None:
        """`clear_output` on a rank."""
        if not self.screen.hides_rich(rank):
            self._collapser.add(rank, "clear", "wait" if wait else "", now_s)

    def show(self, now_s: float) -> None:
        """Show what has waited long enough."""
        self._emit_ready(now_s)
        if self._bar is not None and now_s >= self._drawn_s + _BAR_S:
            self._draw(now_s)
        if not self._has_bar:
            self._is_new = self._unfinished.draw(now_s) or self._is_new
        if self._is_new:
            self.screen.flush()
            self._is_new = False

    def show_all(self) -> None:
        """Show everything that waits, in order."""
        for entry in self._collapser.flush():
            self._emit(entry)
        if self._bar is not None:
            self._draw(self._drawn_s)
        self.screen.flush()

    def next_due_s(self) -> float | None:
        """When `show` has something to do."""
        dues = [self._collapser.next_due_s(), None if self._has_bar else self._unfinished.next_due_s()]
        if self._bar is not None:
            dues.append(self._drawn_s + _BAR_S)
        return min((due for due in dues if due is not None), default=None)

    def finish_lines(self, now_s: float) -> None:
        """Show everything, unfinished lines too."""
        for source, splitter in sorted(self._splitters.items()):
            for piece in splitter.close():
                self._take(*source[:2], piece, now_s)
            self._unfinished.update(source, "", now_s)
        self.show_all()

    def close(self, now_s: float) -> None:
        """The cell is over."""
        self.finish_lines(now_s)
        rank = min(self._first_bar_s, default=self._lead)
        if rank in self._unshown_bars:  # it was over before it was clear that no lower rank draws one
            self.screen.end_progress(*self._unshown_bars[rank], rank)
        self.screen.close()

    def _take(self, rank: int, stream: str, piece: Line | Progress, now_s: float) -> None:
        if isinstance(piece, Line) and not piece.is_progress:
            self._collapser.add(rank, stream, piece.text, now_s)
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
                self._unfinished.erase()  # there is one where the bar was never drawn over itself
                self.screen.end_progress(stream, piece.text, rank)
                self._has_bar = False
                self.screen.flush()

    def _draws_bars(self, rank: int, now_s: float) -> bool:
        """True if bars of `rank` are shown: the lowest rank that draws any, a higher one if the lowest draws none."""
        first_s = self._first_bar_s.setdefault(rank, now_s)
        is_lowest = rank == min(self._first_bar_s)
        return is_lowest and (rank == self._lead or now_s >= first_s + _LOWER_BAR_S)

    def _emit_ready(self, now_s: float) -> None:
        self._num_unshown_bytes = 0
        for entry in self._collapser.ready(now_s):
            self._emit(entry)

    def _draw(self, now_s: float) -> None:
        if self._bar is not None:
            self._is_new = True
            self.screen.progress(*self._bar)
            self._bar, self._drawn_s = None, now_s

    def _emit(self, entry: Waiting) -> None:
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
