# SPDX-License-Identifier: Apache-2.0
"""Sentences about ranks, lines and collectives."""

from __future__ import annotations

import pytest

from ddpilot.record.flight_ring.log import CallSite, Collective
from ddpilot.source.parsed_file import Sources
from ddpilot.user_files import CodeLine
from ddpilot.watch.explain.missed_collective import CollectiveSide, find_cause
from ddpilot.watch.explain.text import merge_rows, ranks_do, render_call

GUARDED = "def train(rank):\n    if rank == 0:\n        work()\n"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("leaves its group", "ranks 0,1 leave their group"),
        ("is running: its Python line changes", "ranks 0,1 are running: their Python line changes"),
        ("raised ValueError: its shape", "ranks 0,1 raised ValueError: its shape"),
        ("all_reduce of its.weight", "ranks 0,1 all_reduce of its.weight"),
    ],
)
def test_several_ranks_have_a_verb_and_a_pronoun_in_the_plural(words: str, told: str) -> None:
    """An error's own words and names of parameters stay as they are."""
    assert ranks_do((0, 1), words) == told
    assert merge_rows([(0, words, ""), (1, words, "")])[0][:2] == ("ranks 0,1", told.removeprefix("ranks 0,1 "))


def test_a_line_without_a_collective_is_named_by_itself() -> None:
    """Rank 0 is behind a condition, and in no collective."""
    here = CollectiveSide(ranks=(0,), chain=(CodeLine("train.py", 3, "train", "work()"),))
    cause = find_cause(here, CollectiveSide(ranks=(1,), chain=()), Sources({"train.py": GUARDED}))
    assert cause is not None
    assert cause.why.startswith("train.py:3 is inside `if rank == 0:` (train.py:2)")


def test_a_collective_of_ddpilots_own_is_told_without_a_line() -> None:
    """Nothing in the program calls it."""
    entry = Collective(index=1, op="all_gather", operator="", group=None, seq=1, line=CallSite(via="enter"))
    assert render_call(entry) == "all_gather, which no line of the program calls"
