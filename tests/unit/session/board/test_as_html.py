# SPDX-License-Identifier: Apache-2.0
"""The board as HTML: well-formed, escaped, with a theme's colours."""

from __future__ import annotations

import re

from ddpilot.session.board.as_html import render_board_html
from tests.unit.findings.test_as_html import Reader
from tests.unit.session.board.samples import BUSY, DEAD, HOSTILE, IDLE, NOW_S, ON_GPU, WAITING

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
    """With a GPU there are its columns, and a line that says why 100 % is no sign of progress."""
    html = render_board_html([ON_GPU, IDLE], NOW_S)
    assert rows(html)[0] == ["rank", "state", "CPU", "memory", "GPU", "GPU memory", "pid"]
    assert rows(html)[1][2:] == ["100 %", "2.2 GB", "100 %", "41.3 GB", "4711"]
    assert "NCCL keeps it spinning" in Reader(html).shown
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
