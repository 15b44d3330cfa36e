# SPDX-License-Identifier: Apache-2.0
"""Output of ranks in a terminal."""

from __future__ import annotations

import io
import sys

import pytest

from ddpilot.errors import RankError
from ddpilot.output.view import TextView, View
from tests.unit.output.samples import changed, closed, displayed, html, opened, printed


def failure() -> RankError:
    """An error with a coloured traceback."""
    return RankError(
        "running `Cell In[3]` on 2 ranks",
        found="rank 1 raised ValueError: no",
        rank=1,
        host="node",
        rank_traceback="\x1b[31mred\x1b[0m",
    )


def test_text_view_labels_lines_results_and_the_text_of_objects(capsys: pytest.CaptureFixture[str]) -> None:
    """stdout, stderr, a result and a table, each once for the ranks that show the same."""
    view: View = TextView()
    view.begin([0, 1])
    for rank in (0, 1):
        view.message(printed(rank, "out\n"), 0.0)
        view.message(printed(rank, "err\n", "stderr"), 0.0)
        view.message(displayed(rank, {"text/plain": "2"}, kind="execute_result"), 0.0)
        view.message(displayed(rank, {"text/plain": f"   a\n0  {rank}", "text/html": f"<b>{rank}</b>"}), 0.0)
        view.raw(rank, "stdout", b"C++\n", 0.0)
    view.end()
    out, err = capsys.readouterr()
    assert out == (
        "[ranks 0,1] out\n[ranks 0,1] 2\n[rank 0]    a\n[rank 0] 0  0\n[rank 1]    a\n[rank 1] 0  1\n[ranks 0,1] C++\n"
    )
    assert err == "[ranks 0,1] err\n"


def test_text_view_shows_what_comes_between_cells(capsys: pytest.CaptureFixture[str]) -> None:
    """A thread that a cell has left behind is heard."""
    view = TextView()
    view.begin([0, 1])
    view.end()
    view.message(printed(1, "late\n"), 5.0)
    assert view.next_due_s() == 5.05
    view.show(5.05)
    assert capsys.readouterr().out == "[rank 1] late\n"


def test_text_view_shows_an_error_behind_what_was_printed_before(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unfinished lines come first; colours only where they are seen."""
    view = TextView()
    view.begin([0, 1])
    view.message(printed(1, "step 3"), 0.0)
    view.error(failure())
    out, err = capsys.readouterr()
    assert out == "[rank 1] step 3\n"
    assert err == "RankError: rank 1 raised ValueError: no (running `Cell In[3]` on 2 ranks on node)\n\nred\n"
    terminal = io.StringIO()
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    view.error(failure())
    assert "\x1b[31mred" in terminal.getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    view.error(failure())
    assert terminal.getvalue().endswith("\n\nred\n")


def test_text_view_updates_show_new_text_and_nothing_of_mere_objects(capsys: pytest.CaptureFixture[str]) -> None:
    """A display without text for a terminal shows nothing when it changes."""
    view = TextView()
    view.begin([0])
    view.message(displayed(0, {"text/plain": "10%"}, "bar"), 0.0)
    view.message(displayed(0, {"text/plain": "20%"}, "bar", "update_display_data"), 0.0)
    view.message(html(0, "30%", "bar", "update_display_data"), 0.0)
    view.end()
    assert capsys.readouterr().out == "[rank 0] 10%\n[rank 0] 20%\n"


def test_text_view_passes_over_widgets_and_clearing(capsys: pytest.CaptureFixture[str]) -> None:
    """What a terminal cannot do does no harm; its text stays."""
    view = TextView()
    view.bind(lambda rank, kind, content, metadata, buffers: None)
    view.begin([0])
    view.message(printed(0, "stays\n"), 0.0)
    for message in (opened(0, "a", value=1), changed(0, "a", value=2), closed(0, "a")):
        view.message(message, 0.0)
    view.end()
    assert capsys.readouterr().out == "[rank 0] stays\n"


def test_text_view_asks_with_the_rank_in_front(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was printed before the question is shown before it."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("Ada\n"))
    view = TextView()
    view.begin([0, 1])
    view.message(printed(1, "Who are you?"), 0.0)
    assert view.ask(1, "Name: ", False) == "Ada"
    assert capsys.readouterr().out == "[rank 1] Who are you?\n[rank 1] Name: "


def test_text_view_notes_come_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    """ddpilot's own lines follow the ranks' earlier ones and have its label."""
    view = TextView("rank_zero")
    view.begin([0, 1])
    view.message(printed(0, "before\n", "stderr"), 0.0)
    view.message(printed(1, "unseen\n", "stderr"), 0.0)
    view.note("interrupting ranks 0,1")
    assert capsys.readouterr().err == "before\nddpilot: interrupting ranks 0,1\n"
