# SPDX-License-Identifier: Apache-2.0
"""Bytes into lines and bars."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from ddpilot.output.lines import Line, Lines, LineSplitter, Progress, texts_of


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
