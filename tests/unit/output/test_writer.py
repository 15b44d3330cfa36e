# SPDX-License-Identifier: Apache-2.0
"""Labels, limits and the bar on the parent's streams."""

from __future__ import annotations

import io
import sys

import pytest

from ddpilot.output.writer import LabelledWriter


class _KernelStream(io.StringIO):
    """Looks like the stdout of a notebook's kernel."""


_KernelStream.__module__ = "ipykernel.iostream"


def test_display_labels_lines_with_their_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    """stdout goes to stdout, stderr to stderr, the ranks in front."""
    display = LabelledWriter("labelled", None)
    display.line([1], "stdout", "loss 0.5")
    display.line([3, 0, 1, 2], "stderr", "warning")
    display.close()
    assert capsys.readouterr() == ("[rank 1] loss 0.5\n", "[ranks 0-3] warning\n")


def test_display_shows_rank_zero_alone_and_unlabelled_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    """`output="rank_zero"` reads like a program of one process."""
    display = LabelledWriter("rank_zero", None)
    assert not display.hides(0)
    assert display.hides(1)
    display.line([0], "stdout", "loss 0.5")
    display.count_hidden(1, 10_000_000)
    display.close()
    assert capsys.readouterr() == ("loss 0.5\n", "")


def test_display_shows_nothing_but_its_notes_when_silent(capsys: pytest.CaptureFixture[str]) -> None:
    """`output="silent"` hides every rank and reports no hidden bytes."""
    display = LabelledWriter("silent", 10)
    assert display.hides(0)
    assert display.hides(1)
    display.count_hidden(0, 500)
    display.note("something happened")
    display.close()
    assert capsys.readouterr() == ("", "ddpilot: something happened\n")


def test_display_says_how_much_it_hid_over_the_limit(capsys: pytest.CaptureFixture[str]) -> None:
    """Each rank has its own limit; the note names the rank, the bytes and the option."""
    display = LabelledWriter("labelled", 10)
    display.line([0], "stdout", "x" * 20)
    assert display.hides(0)
    assert not display.hides(1)
    display.count_hidden(0, 2_500_000)
    display.close()
    note = "ddpilot: 2.5 MB more output of rank 0 not shown (limit 10 bytes per rank, `output_limit_bytes=`)\n"
    assert capsys.readouterr().err == note


def test_display_limits_output_in_a_notebook_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """1 MB per rank in a kernel, no limit in a terminal."""
    assert not _hides_after(2_000_000)
    monkeypatch.setattr(sys, "stdout", _KernelStream())
    assert not _hides_after(900_000)
    assert _hides_after(1_100_000)


def _hides_after(num_bytes: int) -> bool:
    display = LabelledWriter("labelled", None)
    display.line([0], "stdout", "x" * num_bytes)
    return display.hides(0)


def test_display_draws_the_bar_below_the_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """A line that comes while a bar stands erases it, is written, and the bar is drawn again."""
    display = LabelledWriter("labelled", None)
    display.progress("stdout", "50%")
    display.line([1], "stdout", "hello")
    display.end_progress("stdout", "100%")
    display.close()
    erased = "\r" + " " * len("[rank 0] 50%") + "\r"
    expected = f"\r[rank 0] 50%{erased}[rank 1] hello\n\r[rank 0] 50%{erased}\r[rank 0] 100%\n"
    assert capsys.readouterr().out == expected


def test_display_ends_the_line_of_an_unfinished_bar(capsys: pytest.CaptureFixture[str]) -> None:
    """The prompt does not land behind a bar of a launch that failed."""
    display = LabelledWriter("rank_zero", None)
    display.progress("stderr", "50%")
    display.close()
    assert capsys.readouterr().err == "\r50%\n"
