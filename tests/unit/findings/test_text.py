# SPDX-License-Identifier: Apache-2.0
"""Lists of ranks on one line at any world size, and text without control sequences."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpilot.errors import DdpilotError
from ddpilot.findings.text import printable, render_ranks
from tests.unit.executed_lines import count_executed_lines


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([], "no rank"),
        ([1], "rank 1"),
        ([0, 1], "ranks 0,1"),
        ([0, 2, 3], "ranks 0,2,3"),
        ([0, 1, 2, 3], "ranks 0-3"),
        ([3, 1, 2, 0, 3], "ranks 0-3"),
        ([0, 1, 2, 5, 7, 8, 9], "ranks 0-2,5,7-9"),
        (range(4096), "ranks 0-4095"),
        ([r for r in range(4096) if r != 17], "ranks 0-16,18-4095"),
        (range(0, 4096, 2), "ranks 0,2,4,6,8,...,4086,4088,4090,4092,4094 (2048 in all)"),
    ],
)
def test_render_ranks_says_it_in_words(ranks: list[int], words: str) -> None:
    """Runs of three or more are joined, other ranks are listed, a long list is shortened in the middle."""
    assert render_ranks(ranks) == words


def unfold(words: str) -> set[int]:
    """The ranks that the text names."""
    named: set[int] = set()
    for low, high in re.findall(r"(\d+)(?:-(\d+))?", words.split(" (")[0]):
        named |= set(range(int(low), int(high or low) + 1))
    return named


@settings(derandomize=True, deadline=None, database=None)
@given(st.sets(st.integers(0, 4095), min_size=1, max_size=200), st.integers(32, 120))
def test_render_ranks_keeps_to_its_room_and_names_only_its_ranks(ranks: set[int], max_chars: int) -> None:
    """Complete if it fits; otherwise with the first and the last rank and the total number."""
    words = render_ranks(ranks, max_chars=max_chars)
    assert len(words) <= max_chars
    named = unfold(words)
    assert named <= ranks
    assert {min(ranks), max(ranks)} <= named
    if "..." in words:
        assert words.endswith(f" ({len(ranks)} in all)")
    else:
        assert named == ranks


def test_render_ranks_is_fast_when_there_are_many() -> None:
    """A worst list twice as long costs twice as much."""
    few, many = (count_executed_lines(lambda num=num: render_ranks(range(0, num, 2))) for num in (4096, 8192))  # type: ignore[misc]
    assert many < 2.2 * few
    assert len(render_ranks(range(0, 8192, 2))) <= 60


def test_render_ranks_refuses_negative_numbers() -> None:
    """A rank of -1 means "unknown" to a caller; it is not a rank."""
    with pytest.raises(DdpilotError, match="rank -1"):
        render_ranks([0, -1])


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain äöü 数", "plain äöü 数"),
        ("\x1b[31mred\x07", "\\x1b[31mred\\x07"),
        ("a\tb", "a   b"),
        ("one\r\ntwo\rthree", "one\ntwo\nthree"),
        ("right\u202eleft", "right\\u202eleft"),
        ("lone \ud800 surrogate", "lone \\ud800 surrogate"),
        ("", ""),
    ],
)
def test_printable_shows_control_characters_as_escapes(text: str, shown: str) -> None:
    """Text of a user's program must not command the terminal that shows the report."""
    assert printable(text) == shown
