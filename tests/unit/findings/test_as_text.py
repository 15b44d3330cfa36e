# SPDX-License-Identifier: Apache-2.0
"""The text of a report, compared as a whole."""

from __future__ import annotations

import re

import pytest

from ddpilot.findings.as_text import render_text
from ddpilot.findings.finding import Finding
from tests.unit.findings.samples import DESYNC, HOSTILE, SMALL_BATCH

WIDE = """\
desync  DDP201  collective #214 of the default group differs between ranks
  ranks 0,2,3  all_reduce, DDP gradient bucket 0   train.py:88  loss.backward()
  rank 1       barrier                             train.py:91  dist.barrier()
  in common until #213: broadcast of DDP buffers, train.py:85
  why: the barrier at train.py:91 is inside `if rank == 1:` (train.py:90); the others went on to backward
  fix: move it out of the branch, so that every rank calls it
  see: https://pytorch.org/docs/stable/distributed.html

small_batch  DDP305  warning: BatchNorm sees 2 samples per rank
  ranks 0-3  model.py:12  self.bn = nn.BatchNorm2d(8)
  fix: convert it with SyncBatchNorm"""

NARROW = """\
small_batch  DDP305  warning: BatchNorm
    sees 2 samples per rank
  ranks 0-3  model.py:12  self.bn =
      nn.BatchNorm2d(8)
  fix: convert it with SyncBatchNorm"""


def test_render_text_is_the_report_when_there_is_room() -> None:
    """Head, ranks and place, evidence in its own columns, why, fix, where to read; blocks apart by an empty line."""
    assert render_text([DESYNC, SMALL_BATCH]) == WIDE


def test_render_text_wraps_when_told_a_width() -> None:
    """What continues a line is indented by four more."""
    assert render_text([SMALL_BATCH], width=40) == NARROW


@pytest.mark.parametrize("width", [1, 40, 60, 79, 200])
def test_render_text_keeps_to_the_width_and_loses_no_word(width: int) -> None:
    """Only a single word that is longer than the width may stick out; a width below 40 counts as 40."""
    text = render_text([DESYNC, SMALL_BATCH], width=width)
    assert text.split() == WIDE.split()
    assert all(len(line) <= max(width, 40) or len(line.split()) <= 2 for line in text.splitlines())


def test_render_text_says_so_when_there_is_nothing() -> None:
    """An empty report is a result, not an empty screen."""
    assert render_text([]) == "no findings"


def test_render_text_colors_change_nothing_but_the_color() -> None:
    """Without its escape sequences the coloured text is the plain one; the severity decides the colour."""
    colored = render_text([DESYNC, SMALL_BATCH], color=True)
    assert colored.startswith("\x1b[1;31mdesync\x1b[0m  DDP201")
    assert "\x1b[1;33msmall_batch\x1b[0m" in colored
    assert re.sub(r"\x1b\[[0-9;]*m", "", colored) == WIDE


def test_render_text_lets_no_terminal_command_through() -> None:
    """A clear-screen sequence in a finding is shown, not obeyed; a second line of evidence is indented."""
    text = render_text([HOSTILE])
    assert "\x1b" not in text
    assert "a & b\\x1b[2J" in text
    assert "\n  two\n      lines\n" in text


def test_render_text_keeps_4096_ranks_on_one_line() -> None:
    """Every second rank of 4,096 still fits the width of a terminal."""
    finding = Finding(code="X1", name="many", severity="info", ranks=tuple(range(0, 4096, 2)))
    lines = render_text([finding]).splitlines()
    assert len(lines) == 2
    assert len(lines[1]) < 80
    assert lines[1].endswith("4094 (2048 in all)")


def test_render_text_does_not_repeat_the_ranks_of_the_summary_in_a_row_of_their_own() -> None:
    """There is no place to say with them."""
    finding = Finding(code="DDP209", name="rank-died", severity="error", summary="rank 1 died of SIGSEGV", ranks=(1,))
    assert render_text([finding]) == "rank-died  DDP209  rank 1 died of SIGSEGV"
    assert "rank 11 died" in render_text(
        [Finding(code="D", name="n", severity="error", summary="rank 11 died", ranks=(1,))]
    )
    assert "\n  rank 1" in render_text(
        [Finding(code="D", name="n", severity="error", summary="rank 11 died", ranks=(1,))]
    )
