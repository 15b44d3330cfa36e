# SPDX-License-Identifier: Apache-2.0
"""The board as text, compared as a whole."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from ddpilot.session.status import CollectiveStatus, RankStatus
from ddpilot.session.status_board import (
    describe,
    format_bytes,
    format_duration,
    format_percent,
    render_board_html,
    render_board_text,
    summarize,
)
from tests.unit.findings.test_display import Reader
from tests.unit.session.samples import BUSY, DEAD, HOSTILE, IDLE, NOW_S, ON_GPU, WAITING


def test_render_board_text_has_a_line_per_rank() -> None:
    """Numbers are aligned, words stand last where they need no room kept; nothing is said of GPUs without one."""
    board = """\
4 ranks: 1 dead, 1 waiting, 1 busy, 1 idle
rank    pid    CPU  memory  state
   0   4711  100 %  212 MB  waiting in all_reduce for 4 s at Cell In[7]:3 (collective 12, in cell 7 for 12 s)
   1   4712    0 %   45 MB  idle
   2      -      -       -  dead: was killed by SIGKILL (signal 9)
   3  14713  189 %  1.4 GB  in cell 7 for 5 min 5 s"""
    assert render_board_text([WAITING, IDLE, DEAD, BUSY], NOW_S) == board


def test_render_board_text_explains_a_busy_gpu() -> None:
    """With a GPU there are its columns, and a line that explains why 100 % does not mean progress."""
    board = """\
2 ranks: 1 busy, 1 idle
rank   pid    CPU  memory    GPU  GPU memory  state
   0  4711  100 %  2.2 GB  100 %     41.3 GB  in cell 7 for 12 s (began all_gather at fit.py:8 8 s ago; it may be done)
   1  4712    0 %   45 MB      -           -  idle
A GPU at 100 % does not mean progress: NCCL kernels spin while a rank waits in a collective."""
    assert render_board_text([ON_GPU, IDLE], NOW_S) == board


def test_render_board_text_keeps_a_rank_on_its_line() -> None:
    """Line ends and terminal commands in a rank's last words do not reach the terminal."""
    last = render_board_text([HOSTILE], NOW_S).splitlines()[-1]
    assert last.endswith(r'dead: <script>alert(1)</script> & "quoted" \x1b[31m next line')


ALL = [WAITING, IDLE, DEAD, BUSY, HOSTILE]


def rows(html: str) -> list[list[str]]:
    """The text of every cell, row by row."""
    cells = (re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in re.findall(r"<tr.*?</tr>", html, re.DOTALL))
    return [[Reader(cell).shown for cell in row] for row in cells]


def test_render_board_html_has_a_row_per_rank() -> None:
    """The same words and numbers as in the text, under a summary; no columns for GPUs without one."""
    html = render_board_html([WAITING, IDLE, DEAD], NOW_S)
    waiting = "waiting in all_reduce for 4 s at Cell In[7]:3"
    assert rows(html) == [
        ["rank", "state", "CPU", "memory", "pid"],
        ["0", f"{waiting}collective 12, in cell 7 for 12 s", "100 %", "212 MB", "4711"],
        ["1", "idle", "0 %", "45 MB", "4712"],
        ["2", "dead: was killed by SIGKILL (signal 9)", "-", "-", "-"],
    ]
    assert Reader(html).shown.startswith("3 ranks: 1 dead, 1 waiting, 1 idle")


def test_render_board_html_explains_a_busy_gpu() -> None:
    """With a GPU there are its columns, and a line that explains why 100 % does not mean progress."""
    html = render_board_html([ON_GPU, IDLE], NOW_S)
    assert rows(html)[0] == ["rank", "state", "CPU", "memory", "GPU", "GPU memory", "pid"]
    assert rows(html)[1][2:] == ["100 %", "2.2 GB", "100 %", "41.3 GB", "4711"]
    assert "NCCL kernels spin" in Reader(html).shown
    assert "NCCL" not in render_board_html([IDLE], NOW_S)


def test_render_board_html_escapes_everything() -> None:
    """Markup in a rank's last words is shown as text; nothing is loaded, nothing runs."""
    html = render_board_html([HOSTILE], NOW_S)
    read = Reader(html)
    assert read.tags == {"div", "table", "thead", "tbody", "tr", "th", "td", "b", "span"}
    assert set(read.attributes) == {"class", "style"}
    assert '<script>alert(1)</script> & "quoted"' in read.shown
    assert "\x1b" not in html
    assert "url(" not in html


def test_render_board_html_takes_its_colours_from_the_theme() -> None:
    """Every colour is one of JupyterLab's variables with something to fall back on, or inherited."""
    html = render_board_html(ALL, NOW_S)
    colors = re.findall(r"(?:color|background|solid)[: ]([^;\"]+)", html)
    assert len(colors) > 10
    assert [
        color for color in colors if not re.fullmatch(r"inherit|transparent|var\(--jp-[\w-]+, [^)]+\)", color)
    ] == []


PENDING = CollectiveStatus(op="all_reduce", since_s=NOW_S - 4.9, site="Cell In[7]:3", seq=12)


@pytest.mark.parametrize(
    ("status", "phrase"),
    [
        (IDLE, ("idle", "idle", "")),
        (
            replace(IDLE, collective=PENDING),
            ("idle", "idle", "all_reduce at Cell In[7]:3 has not finished after 4 s"),
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


def test_describe_does_not_call_a_short_collective_waiting() -> None:
    """A training loop is in one collective or another nearly always; only one that lasts a second is a wait."""
    just_begun = replace(WAITING, collective=replace(PENDING, since_s=NOW_S - 0.99))
    assert describe(just_begun, NOW_S) == ("busy", "in cell 7 for 12 s", "")
    assert describe(just_begun, NOW_S + 0.01).mood == "waiting"


def test_describe_leaves_open_what_the_backend_does_not_report() -> None:
    """NCCL's collectives may have ended unobserved, so that the rank is not described as waiting."""
    began = "began all_gather at fit.py:8 8 s ago; it may be done"
    assert describe(ON_GPU, NOW_S) == ("busy", "in cell 7 for 12 s", began)


def test_summarize_counts_the_worst_first() -> None:
    """Dead ranks first, then waiting ones, then the rest."""
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
