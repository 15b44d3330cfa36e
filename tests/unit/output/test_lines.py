# SPDX-License-Identifier: Apache-2.0
"""Bytes into lines and bars."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from hypothesis import given, settings
from hypothesis import strategies as st

from ddpilot.output.lines import (
    WINDOW_S,
    Line,
    LineMerger,
    Lines,
    LineSplitter,
    PendingLine,
    Progress,
    TailBuffer,
    texts_of,
)
from tests.unit.executed_lines import count_executed_lines


def cut(*pieces: bytes) -> list[Line | Progress]:
    """Everything that a splitter finds in `pieces`, its end included, line by line."""
    splitter = LineSplitter()
    found: list[Line | Progress] = []
    for each in [found for piece in pieces for found in splitter.feed(piece)] + splitter.close():
        found += map(Line, each.texts) if isinstance(each, Lines) else [each]
    return found


@given(text=st.text(alphabet="aä \t🙂x", max_size=60), ends=st.lists(st.integers(0, 100), max_size=5))
@settings(deadline=None, max_examples=50)
def test_line_splitter_gives_the_lines_wherever_the_bytes_are_cut(text: str, ends: list[int]) -> None:
    """Pieces that cut a line, or a character, in two make no difference."""
    data = (text + "\nlast\n").encode()
    marks = sorted({min(end, len(data)) for end in ends} | {0, len(data)})
    pieces = [data[start:end] for start, end in itertools.pairwise(marks)]
    assert cut(*pieces) == [Line(text), Line("last")]


def test_line_splitter_gives_a_last_line_without_end() -> None:
    """What was printed last arrives although no newline followed."""
    assert cut(b"one\ntwo") == [Line("one"), Line("two")]
    assert cut(b"one\n\n") == [Line("one"), Line("")]


def test_line_splitter_replaces_bytes_that_are_not_utf8() -> None:
    """Nothing raises, and the readable part is kept."""
    assert cut(b"a\xff\xfeb\n") == [Line("a\ufffd\ufffdb")]


def test_line_splitter_takes_carriage_returns_for_a_bar() -> None:
    """Each redraw is progress, the last one before the newline is the finished bar."""
    assert cut(b"\r 10%", b"\r 50%", b"\r100%\n", b"done\n") == [
        Progress(" 10%"),
        Progress(" 50%"),
        Line("100%", is_progress=True),
        Line("done"),
    ]


def test_line_splitter_takes_windows_line_ends_for_lines() -> None:
    """A carriage return right before the newline redraws nothing."""
    assert cut(b"one\r\ntwo\r\n") == [Line("one"), Line("two")]


def test_line_splitter_drops_the_cursor_moves_of_nested_bars() -> None:
    """Two bars of one rank would otherwise break the lines of the others."""
    assert cut(b"\n\r inner 3%\x1b[A") == [Progress(" inner 3%"), Line(" inner 3%", is_progress=True)]
    assert cut(b"kept\n\x1b[A\n") == [Line("kept")]


def test_line_splitter_cuts_a_very_long_line_and_loses_nothing_of_it() -> None:
    """Memory stays bounded for 1 MB without a newline, and every byte arrives."""
    splitter = LineSplitter()
    found: list[str] = []
    for _ in range(16):
        found += texts_of(splitter.feed(b"x" * 65536))
        assert len(splitter._pending) <= 64 * 1024
    found += texts_of(splitter.close())
    assert "".join(found) == "x" * (16 * 65536)


def test_line_splitter_stays_small_under_an_endless_bar() -> None:
    """A bar that never ends with a newline is not collected."""
    splitter = LineSplitter()
    for _ in range(50):
        splitter.feed(b"\r" + b"#" * 70_000)
        assert len(splitter._pending) <= 64 * 1024 + 1


@given(st.lists(st.binary(max_size=8).map(lambda raw: raw.replace(b"\r", b"").replace(b"\x1b", b"")), max_size=20))
@settings(deadline=None)
def test_line_splitter_decodes_lines_of_one_chunk_as_each_alone(raws: list[bytes]) -> None:
    """Bytes that are no UTF-8 never reach over the end of their line."""
    lines = [raw.replace(b"\n", b"") for raw in raws]
    found = texts_of(LineSplitter().feed(b"".join(line + b"\n" for line in lines)))
    assert list(found) == [line.decode(errors="replace") for line in lines]


def test_tails_keep_the_last_lines_of_each_rank() -> None:
    """Both streams, by rank; bounded, also for one huge chunk."""
    tails = TailBuffer()
    tails.feed(0, "stdout", b"one\ntw")
    tails.feed(0, "stderr", b"error\n")
    tails.feed(0, "stdout", b"o\n")
    tails.feed(1, "stdout", b"".join(b"%d\n" % number for number in range(100_000)))
    assert tails.last_lines(0) == ("one", "error", "two")
    assert tails.last_lines(1)[-1] == "99999"
    assert len(tails.last_lines(1)) <= 200
    assert tails.last_lines(2) == ()


def test_tails_of_a_rank_that_starts_anew_are_empty() -> None:
    """Its last incarnation's words are not its own."""
    tails = TailBuffer()
    tails.feed(0, "stdout", b"before\nepoch 3: 40%")
    tails.forget(0)
    assert tails.last_lines(0) == ()
    tails.feed(0, "stdout", b"Traceback\n")
    assert tails.last_lines(0) == ("Traceback",)


def shown(collapser: LineMerger, now_s: float | None = None) -> list[tuple[list[int], str]]:
    """(ranks, text) of what is ready at `now_s`, or of everything."""
    entries = collapser.flush() if now_s is None else collapser.ready(now_s)
    return [(entry.ranks, entry.text) for entry in entries]


def test_collapser_shows_a_line_of_all_ranks_once_and_at_once() -> None:
    """A line that is complete need not wait."""
    collapser = LineMerger(3)
    for rank in (2, 0, 1):
        collapser.add(rank, "stdout", "epoch 1", 0.0)
    assert shown(collapser, 0.0) == [([2, 0, 1], "epoch 1")]


def test_collapser_waits_for_the_other_ranks_no_longer_than_its_window() -> None:
    """A line of one rank alone is due `WINDOW_S` after it came."""
    collapser = LineMerger(2)
    assert collapser.next_due_s() is None
    collapser.add(0, "stdout", "only me", 1.0)
    assert collapser.next_due_s() == 1.0 + WINDOW_S
    assert shown(collapser, 1.0 + WINDOW_S * 0.9) == []
    assert shown(collapser, 1.0 + WINDOW_S) == [([0], "only me")]


def test_collapser_keeps_stdout_and_stderr_apart() -> None:
    """The same text on two streams is two lines."""
    collapser = LineMerger(2)
    collapser.add(0, "stdout", "x", 0.0)
    collapser.add(1, "stderr", "x", 0.0)
    assert shown(collapser) == [([0], "x"), ([1], "x")]


def test_collapser_shows_each_repeat_of_a_rank() -> None:
    """A rank that prints the same line twice is seen to do so."""
    collapser = LineMerger(2)
    for rank in (0, 0, 1):
        collapser.add(rank, "stdout", "again", 0.0)
    assert shown(collapser) == [([0, 1], "again"), ([0], "again")]


def test_collapser_shows_a_common_line_once_below_lines_that_differ() -> None:
    """Common lines are merged even if one rank prints all its lines before the next rank starts."""
    collapser = LineMerger(2)
    for rank in (0, 1):
        for text in (f"I am {rank}", "common", f"loss {rank}", "done"):
            collapser.add(rank, "stdout", text, 0.0)
    assert shown(collapser) == [
        *(([0], "I am 0"), ([1], "I am 1"), ([0, 1], "common")),
        *(([0], "loss 0"), ([1], "loss 1"), ([0, 1], "done")),
    ]


def test_collapser_keeps_no_line_behind_those_of_a_rank_that_goes_on_printing() -> None:
    """A rank that is behind prints above what waits; that is shown after its window all the same."""
    collapser = LineMerger(2)
    for number in range(100):
        collapser.add(0, "stdout", f"mine {number}", 0.0)
    assert shown(collapser, 0.0) == []
    collapser.add(1, "stdout", "other", WINDOW_S)
    assert len(shown(collapser, WINDOW_S)) == 101


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from("abc"))))
@settings(deadline=None)
def test_collapser_keeps_the_order_of_every_rank(lines: list[tuple[int, str]]) -> None:
    """Whatever three ranks print, each rank's lines come out complete and in its order."""
    collapser = LineMerger(3)
    for rank, text in lines:
        collapser.add(rank, "stdout", text, 0.0)
    entries = shown(collapser)
    for rank in range(3):
        assert [text for ranks, text in entries if rank in ranks] == [text for who, text in lines if who == rank]
    assert all(len(set(ranks)) == len(ranks) for ranks, _ in entries)


def test_collapser_holds_a_bounded_number_of_lines() -> None:
    """A flood of one rank is shown before its window is over."""
    collapser = LineMerger(2)
    for number in range(5000):
        collapser.add(0, "stdout", str(number), 0.0)
    assert len(shown(collapser, 0.0)) == 3000


def test_collapser_takes_a_line_printed_thousands_of_times_in_a_blink() -> None:
    """The search for the same line does not start from the first one: each costs as much as the one before."""

    def print_equal_lines(num_lines: int) -> None:
        collapser = LineMerger(2)
        for _ in range(num_lines):
            collapser.add(0, "stdout", "x", 0.0)
        assert len(shown(collapser)) == num_lines

    few, many = (count_executed_lines(lambda num=num: print_equal_lines(num)) for num in (500, 5000))  # type: ignore[misc]
    assert many < 10.5 * few


def test_collapser_takes_a_chunk_of_lines_in_one_pass() -> None:
    """Lines that differ from rank to rank cost the launcher a small number of steps each."""
    collapser = LineMerger(2)
    chunks = [[f"rank {rank} step {step}" for step in range(500)] for rank in range(2)]

    def merge() -> None:
        num_shown = 0
        for _ in range(5):
            for rank, chunk in enumerate(chunks):
                collapser.add_lines(rank, "stdout", chunk, 0.0)
                num_shown += len(collapser.ready(0.0))
        assert num_shown + len(collapser.flush()) == 5000

    assert count_executed_lines(merge) / 5000 < 40


class PlainCollapser:
    """What `LineMerger` is to do, without any of its indexes."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.waiting: list[PendingLine] = []
        self.last: dict[int, tuple[int, int]] = {}

    def add(self, rank: int, stream: str, text: str, now_s: float) -> None:
        """Join the first equal line below the rank's last one, or begin a line."""
        last = self.last.get(rank, (0, -1))
        same = [each for each in self.waiting if (each.stream, each.text) == (stream, text) and each.place > last]
        if not same:
            same = [PendingLine(stream, text, now_s, (last[0] + 1, rank), [])]
            self.waiting += same
        entry = min(same, key=lambda each: each.place)
        entry.ranks.append(rank)
        self.last[rank] = entry.place

    def ready(self, now_s: float) -> Iterator[PendingLine]:
        """The first line for as long as it is complete, or any line has waited for the window."""
        while self.waiting:
            first = min(self.waiting, key=lambda each: each.place)
            oldest_s = min(each.since_s for each in self.waiting)
            if len(first.ranks) < self.num_ranks and now_s < oldest_s + WINDOW_S:
                return
            self.waiting.remove(first)
            yield first


@given(
    st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["stdout", "stderr"]), st.sampled_from("abc"), st.booleans()))
)
@settings(deadline=None)
def test_collapser_shows_what_a_plain_search_would(lines: list[tuple[int, str, str, bool]]) -> None:
    """Ranks, text and order are the same, wherever lines are shown in between."""
    ours, plain = LineMerger(3), PlainCollapser(3)
    for number, (rank, stream, text, is_shown) in enumerate(lines):
        now_s = number * WINDOW_S / 4
        shown = []
        for each in (ours, plain):
            each.add(rank, stream, text, now_s)
            shown.append([(entry.ranks, entry.stream, entry.text) for entry in each.ready(now_s)] if is_shown else [])
        assert shown[0] == shown[1]
    later_s = len(lines) + 1.0
    assert [(each.ranks, each.text) for each in ours.ready(later_s)] == [
        (each.ranks, each.text) for each in plain.ready(later_s)
    ]
    assert ours.next_due_s() is None
