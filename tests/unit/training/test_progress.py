# SPDX-License-Identifier: Apache-2.0
"""How far an epoch is: a bar where somebody watches, lines in a log, nothing on other ranks."""

from __future__ import annotations

import io
import sys
import threading

import pytest
import torch

from ddpilot.training.progress import LINE_INTERVAL_S, Lines, Progress, is_watched
from tests.unit.executed_lines import count_executed_lines


class Terminal(io.StringIO):
    """Somebody sees what is written here."""

    def isatty(self) -> bool:
        return True


def run(progress: Progress, num: int, first: int = 0) -> None:
    """Batches of the second epoch of three, from number `first` on."""
    with progress.epoch(1, 3, first, range(num)):
        for number in range(first, num):
            progress.note_loss(torch.tensor(1.0 / (number + 1), requires_grad=True))
            progress.advance()


def draw_at_once(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal on stderr, on which bars are drawn at once."""
    monkeypatch.setattr("ddpilot.training.progress._BAR_DELAY_S", 0.0)
    monkeypatch.setattr(sys, "stderr", found := Terminal())
    return found


def test_progress_draws_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """With epoch, position, loss and what the loop's owner adds; an epoch that goes on begins where it was left."""
    terminal = draw_at_once(monkeypatch)
    before = threading.active_count()
    progress = Progress(None, is_rank_zero=True)
    progress.show(acc=0.51234567, name="x")
    progress.show(name=None, lr=1e-3)
    run(progress, 8, first=6)
    last = terminal.getvalue().split("\r")[-1]
    assert last.startswith("epoch 1 (2/3): 100%")
    assert " 8/8 " in last
    assert "loss 0.125, acc 0.5123, lr 0.001" in last
    assert " batches/s" in last
    assert " 6/8 " in terminal.getvalue()
    assert threading.active_count() == before


def test_progress_counts_the_updates_of_a_training_with_max_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the batches, of which a stream may have any number."""
    terminal = draw_at_once(monkeypatch)
    progress = Progress(None, is_rank_zero=True)
    with progress.epoch(1, None, 0, iter(()), (500, 502)):
        for number in range(4):
            progress.advance(is_update=number % 2 == 1)
    last = terminal.getvalue().split("\r")[-1]
    assert last.startswith("epoch 1: 100%")
    assert " 502/502 " in last
    assert " updates/s" in last


def test_progress_shows_nothing_of_an_epoch_that_is_over_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bars of half a second would only flicker."""
    monkeypatch.setattr(sys, "stderr", found := Terminal())
    run(Progress(None, is_rank_zero=True), 3)
    assert found.getvalue() == ""


@pytest.mark.parametrize(("is_shown", "is_rank_zero"), [(False, True), (True, False), (None, False)])
def test_progress_shows_nothing_where_it_is_not_wanted(
    monkeypatch: pytest.MonkeyPatch, is_shown: bool | None, is_rank_zero: bool
) -> None:
    """Not on other ranks, and not where it is turned off."""
    terminal = draw_at_once(monkeypatch)
    progress = Progress(is_shown, is_rank_zero=is_rank_zero)
    progress.show(acc=1.0)
    run(progress, 3)
    assert (terminal.getvalue(), progress.is_shown) == ("", False)


def test_progress_prints_above_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bar is wiped, and drawn again below."""
    terminal = draw_at_once(monkeypatch)
    progress = Progress(True, is_rank_zero=True)
    with progress.epoch(0, None, 0, range(2)):
        with progress.aside():
            terminal.write("said\n")
        progress.advance()
    assert terminal.getvalue().index("said\n") > 0
    wiped, drawn = terminal.getvalue().split("said\n")
    assert wiped.endswith("\r")
    assert "epoch 0:   0%" in drawn


def test_lines_are_written_every_half_minute(capsys: pytest.CaptureFixture[str]) -> None:
    """None before, so that short runs leave a log alone; with the rate of what was done here, and what is left."""
    now_s = 100.0
    lines = Lines("epoch 1/2", 100, 40, lambda: now_s)
    assert [lines.update() for _ in range(9)] == [False] * 9
    now_s += LINE_INTERVAL_S
    assert lines.update()
    lines.set_postfix_str("loss 0.5")
    now_s += LINE_INTERVAL_S
    assert [lines.update(), lines.update()] == [True, False]
    assert capsys.readouterr().err.splitlines() == [
        "epoch 1/2: batch 50 of 100, 0.333 batches/s, 02:30 left",
        "epoch 1/2: batch 51 of 100, 0.183 batches/s, 04:27 left, loss 0.5",
    ]


def test_progress_is_lines_where_nobody_watches(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unless the parent of this rank said that somebody does."""
    monkeypatch.delenv("DDPILOT_WATCHED", raising=False)
    assert not is_watched()
    run(Progress(None, is_rank_zero=True), 2)
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("DDPILOT_WATCHED", "1")
    assert is_watched()


def test_progress_costs_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few lines for a batch; a bar that is drawn every time costs hundreds."""
    draw_at_once(monkeypatch)
    progress = Progress(True, is_rank_zero=True)
    loss = torch.ones(())

    def train() -> None:
        with progress.epoch(0, 1, 0, range(2000)):
            for _ in range(2000):
                progress.note_loss(loss)
                progress.advance()

    assert count_executed_lines(train) / 2000 < 20
