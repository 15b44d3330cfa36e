# SPDX-License-Identifier: Apache-2.0
"""What the board calls what a rank does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ddpilot.session.board.phrases import describe, format_bytes, format_duration, format_percent, summarize
from ddpilot.session.status import CollectiveStatus, RankStatus
from tests.unit.session.board.samples import BUSY, DEAD, IDLE, NOW_S, ON_GPU, WAITING

PENDING = CollectiveStatus(op="all_reduce", since_s=NOW_S - 4.9, site="Cell In[7]:3", seq=12)


@pytest.mark.parametrize(
    ("status", "phrase"),
    [
        (IDLE, ("idle", "idle", "")),
        (
            replace(IDLE, collective=PENDING),
            ("idle", "idle", "all_reduce at Cell In[7]:3 is not over after 4 s"),
        ),
        (BUSY, ("busy", "in cell 7 for 5 min 5 s", "")),
        (replace(BUSY, cell=None), ("busy", "busy for 5 min 5 s", "")),
        (
            WAITING,
            ("waiting", "waiting in all_reduce for 4 s at Cell In[7]:3", "collective 12, in cell 7 for 12 s"),
        ),
        (
            replace(WAITING, collective=CollectiveStatus(op="recv", since_s=NOW_S - 61, group="pairs")),
            ("waiting", "waiting in recv of group pairs for 1 min 1 s", "in cell 7 for 12 s"),
        ),
        (DEAD, ("dead", "dead: was killed by SIGKILL (signal 9)", "")),
        (replace(DEAD, reason=""), ("dead", "dead: the reason is not known", "")),
    ],
)
def test_describe_says_what_a_rank_does(status: RankStatus, phrase: tuple[str, str, str]) -> None:
    """Every state has its words, with how long it has lasted; a collective has the user's line."""
    assert describe(status, NOW_S) == phrase


def test_describe_calls_nobody_waiting_when_a_collective_is_short() -> None:
    """A training loop is in one collective or another nearly always; only one that lasts a second is a wait."""
    just_begun = replace(WAITING, collective=replace(PENDING, since_s=NOW_S - 0.99))
    assert describe(just_begun, NOW_S) == ("busy", "in cell 7 for 12 s", "")
    assert describe(just_begun, NOW_S + 0.01).mood == "waiting"


def test_describe_leaves_open_what_the_backend_does_not_tell() -> None:
    """NCCL's collectives may be over without being seen to be, so that the rank is not said to wait."""
    began = "began all_gather at fit.py:8 8 s ago; it may be over"
    assert describe(ON_GPU, NOW_S) == ("busy", "in cell 7 for 12 s", began)


def test_summarize_counts_the_worst_first() -> None:
    """Dead ranks come before those that wait, and those before the others."""
    statuses = [IDLE, WAITING, BUSY, DEAD, replace(IDLE, rank=4)]
    assert summarize(statuses, NOW_S) == "5 ranks: 1 dead, 1 waiting, 1 busy, 2 idle"
    assert summarize([IDLE], NOW_S) == "1 rank: 1 idle"
    assert summarize([], NOW_S) == "0 ranks"


@pytest.mark.parametrize(
    ("duration_s", "text"),
    [
        (-0.5, "0 s"),
        (0.99, "0 s"),
        (59.9, "59 s"),
        (60, "1 min"),
        (125, "2 min 5 s"),
        (3599, "59 min 59 s"),
        (3600, "1 h"),
        (11_400, "3 h 10 min"),
        (86_400, "1 d"),
        (187_300, "2 d 4 h"),
    ],
)
def test_format_duration_has_two_units_at_most(duration_s: float, text: str) -> None:
    """Seconds up to a minute, then the two largest units that are not zero."""
    assert format_duration(duration_s) == text


def test_format_bytes_and_percent_say_when_nothing_is_known() -> None:
    """Powers of 1000, never "1000 MB"; a dash for None, which is not the same as nothing used."""
    assert [format_bytes(n) for n in (None, 0, 45_400_000, 999_400_000, 999_600_000, 41_300_000_000)] == [
        *("-", "0 MB", "45 MB", "999 MB", "1.0 GB", "41.3 GB")
    ]
    assert [format_percent(n) for n in (None, 0.0, 99.6)] == ["-", "0 %", "100 %"]
