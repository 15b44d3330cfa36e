# SPDX-License-Identifier: Apache-2.0
"""The board as text, compared as a whole."""

from __future__ import annotations

from ddpilot.session.status_board import render_board_text
from tests.unit.session.board.samples import BUSY, DEAD, HOSTILE, IDLE, NOW_S, ON_GPU, WAITING


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
    """With a GPU there are its columns, and a line that says why 100 % is no sign of progress."""
    board = """\
2 ranks: 1 busy, 1 idle
rank   pid    CPU  memory    GPU  GPU memory  state
   0  4711  100 %  2.2 GB  100 %     41.3 GB  in cell 7 for 12 s (began all_gather at fit.py:8 8 s ago; it may be over)
   1  4712    0 %   45 MB      -           -  idle
A GPU at 100 % is no sign of progress: NCCL keeps it spinning while a rank waits for others in a collective."""
    assert render_board_text([ON_GPU, IDLE], NOW_S) == board


def test_render_board_text_keeps_a_rank_on_its_line() -> None:
    """Line ends and terminal commands in a rank's last words do not reach the terminal."""
    last = render_board_text([HOSTILE], NOW_S).splitlines()[-1]
    assert last.endswith(r'dead: <script>alert(1)</script> & "quoted" \x1b[31m next line')
