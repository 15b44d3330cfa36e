# SPDX-License-Identifier: Apache-2.0
"""A cell's output in order: lines cut and collapsed, bars, objects, floods."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

import pytest

from ddpilot.output.cell_output import CellOutput
from ddpilot.output.rich_output import RichOutput
from ddpilot.output.writer import TextScreen


class ListScreen(TextScreen):
    """A screen that keeps what it is shown. `limit_bytes`: per rank."""

    def __init__(self, limit_bytes: int = 10**9) -> None:
        super().__init__("labelled", limit_bytes)
        self.shown: list[tuple[object, ...]] = []
        self.hidden: dict[int, int] = {}
        self._sizes: dict[int, int] = {}

    def hides(self, rank: int) -> bool:
        """Whether the limit is reached."""
        return self.limit_bytes is not None and self._sizes.get(rank, 0) > self.limit_bytes

    def hides_rich(self, rank: int) -> bool:
        """Never."""
        return rank < 0

    def count_hidden(self, rank: int, num_bytes: int) -> None:
        """Keep the sum."""
        self.hidden[rank] = self.hidden.get(rank, 0) + num_bytes

    def line(self, ranks: Sequence[int], stream: str, text: str) -> None:
        """Keep the line."""
        for rank in ranks:
            self._sizes[rank] = self._sizes.get(rank, 0) + len(text) + 1
        self.shown.append((sorted(ranks), stream, text))

    def progress(self, stream: str, text: str, rank: int = 0) -> None:
        """Keep the bar."""
        self.shown.append(("bar", stream, rank, text))

    def end_progress(self, stream: str, text: str, rank: int = 0) -> None:
        """Keep the bar's end."""
        self.shown.append(("bar's end", stream, rank, text))

    def unfinished(self, stream: str, text: str, rank: int = 0) -> None:
        """Keep the line."""
        self.shown.append(("unfinished", stream, rank, text) if text else ("unfinished", stream, "gone"))

    def rich(self, items: Mapping[int, RichOutput]) -> None:
        """Keep the ranks and the text."""
        self.shown.append(("rich", list(items), next(iter(items.values())).text))

    def update(self, items: Mapping[int, RichOutput]) -> None:
        """Keep the ranks and the text."""
        self.shown.append(("update", list(items), next(iter(items.values())).text))

    def clear(self, ranks: Sequence[int], wait: bool) -> None:
        """Keep the order."""
        self.shown.append(("clear", list(ranks), wait))

    def note(self, text: str) -> None:
        """Keep the note."""
        self.shown.append(("note", text))

    def flush(self) -> None:
        """Keep that there was a flush, once in a row."""
        if not self.shown or self.shown[-1] != ("flush",):
            self.shown.append(("flush",))

    def close(self) -> None:
        """Keep the end."""
        self.shown.append(("closed",))

    def without_flushes(self) -> list[tuple[object, ...]]:
        """Everything else."""
        return [each for each in self.shown if each != ("flush",)]


def rich(text: str, fingerprint: str = "") -> RichOutput:
    """An object that looks like `text`."""
    return RichOutput({"text/plain": text, "text/html": text}, fingerprint=fingerprint or text)


def test_output_shows_what_ranks_print_alike_once_and_hands_it_on() -> None:
    """Both ranks' line is one and is flushed at once; one rank's waits for its window."""
    screen = ListScreen()
    output = CellOutput([0, 1], screen)
    for rank in (1, 0):
        output.text(rank, "stdout", f"both\nI am {rank}\n".encode(), 0.0)
    output.show(0.0)
    assert screen.shown == [([0, 1], "stdout", "both"), ("flush",)]
    assert output.next_due_s() == 0.05
    output.show(0.05)
    assert screen.shown[2:] == [([0], "stdout", "I am 0"), ([1], "stdout", "I am 1"), ("flush",)]
    assert output.next_due_s() is None


def test_output_of_some_ranks_does_not_wait_for_the_others() -> None:
    """A line of the only rank that runs the cell is shown at once."""
    screen = ListScreen()
    output = CellOutput([2], screen)
    output.text(2, "stdout", b"mine\n", 0.0)
    output.show(0.0)
    assert screen.shown == [([2], "stdout", "mine"), ("flush",)]


def test_output_keeps_objects_between_the_lines_around_them() -> None:
    """A figure comes behind what its rank printed before it, and each rank's own data come along."""
    screen = ListScreen()
    output = CellOutput([0, 1], screen)
    for rank in (0, 1):
        output.text(rank, "stdout", b"before\n", 0.0)
        output.rich(rank, rich("same"), 0.0)
        output.rich(rank, rich(f"figure of {rank}"), 0.0)
        output.text(rank, "stdout", b"after\n", 0.0)
    output.close(0.0)
    assert screen.without_flushes() == [
        ([0, 1], "stdout", "before"),
        ("rich", [0, 1], "same"),
        ("rich", [0], "figure of 0"),
        ("rich", [1], "figure of 1"),
        ([0, 1], "stdout", "after"),
        ("closed",),
    ]


def test_output_keeps_the_lines_of_a_result_together() -> None:
    """Tensors that share a line are two tensors."""
    screen = ListScreen()
    output = CellOutput([0, 1], screen)
    output.result(0, "tensor([1,\n  2])", 0.0)
    output.result(1, "tensor([1,\n  3])", 0.0)
    output.close(0.0)
    assert [shown[2] for shown in screen.without_flushes()[:-1]] == ["tensor([1,", "  2])", "tensor([1,", "  3])"]


def test_output_leaves_addresses_out_of_results() -> None:
    """An object's address differs on every rank and is of no use here."""
    screen = ListScreen()
    output = CellOutput([0, 1], screen)
    output.result(0, "<Line at 0x7f09a81b7050>", 0.0)
    output.result(1, "<Line at 0x7f09a8227350>", 0.0)
    output.show(0.0)
    assert screen.shown[0] == ([0, 1], "stdout", "<Line at 0x…>")


def test_output_shows_the_bar_of_the_lowest_rank_alone_and_not_too_often() -> None:
    """Of a bar that redraws itself a thousand times a second one in 50 ms is drawn, and its end."""
    screen = ListScreen()
    output = CellOutput([1, 2], screen)
    for step in range(100):
        for rank in (1, 2):
            output.text(rank, "stderr", f"\r{step}%".encode(), step / 1000)
        output.show(step / 1000)
    output.text(1, "stderr", b"\r100%\n", 0.1)
    output.close(0.1)
    assert screen.without_flushes() == [
        ("bar", "stderr", 1, "50%"),
        ("bar's end", "stderr", 1, "100%"),
        ("closed",),
    ]


def test_output_shows_unfinished_lines_when_the_cell_ends() -> None:
    """`print(..., end="")` is not lost, on whichever way it came."""
    screen = ListScreen()
    output = CellOutput([0], screen)
    output.text(0, "stdout", b"from Python", 0.0)
    output.text(0, "stdout", b"from C++", 0.0, past_python=True)
    output.close(0.0)
    assert screen.without_flushes() == [([0], "stdout", "from Python"), ([0], "stdout", "from C++"), ("closed",)]


def test_output_keeps_clearing_in_order() -> None:
    """`clear_output` of all ranks comes once, where they called it."""
    screen = ListScreen()
    output = CellOutput([0, 1], screen)
    for rank in (0, 1):
        output.text(rank, "stdout", b"old\n", 0.0)
        output.clear(rank, True, 0.0)
        output.rich(rank, rich("new"), 0.0, is_update=True)
    output.show(0.0)
    assert screen.without_flushes() == [
        ([0, 1], "stdout", "old"),
        ("clear", [0, 1], True),
        ("update", [0, 1], "new"),
    ]


def test_output_counts_a_flood_while_nobody_calls_show() -> None:
    """10 MB that come at once are shown up to the limit, in whole lines, and the rest is counted."""
    screen = ListScreen(limit_bytes=500_000)
    output = CellOutput([0], screen)
    for _ in range(160):
        output.text(0, "stdout", b"x" * 65_535 + b"\n", 0.0)
    output.close(0.0)
    shown = sum(len(str(entry[2])) + 1 for entry in screen.shown if entry[0] == [0])
    assert 400_000 < shown <= 500_001  # the end of the last line is ours
    assert shown - 1 + screen.hidden[0] == 160 * 65_536


def test_output_shows_a_line_while_it_grows() -> None:
    """Dots without a newline are seen as they come, not too often; the line is shown once more when it has ended."""
    screen = ListScreen()
    output = CellOutput([0, 1], screen)
    for step, due_s in enumerate((0.12, 0.24, 0.44)):
        for rank in (1, 0):
            output.text(rank, "stdout", b".", step * 0.2)
        assert output.next_due_s() == pytest.approx(due_s)
        output.show(step * 0.2 + 0.12)
        assert output.next_due_s() is None
    for rank in (1, 0):
        output.text(rank, "stdout", b"!\n", 0.6)
    output.show(0.6)
    output.close(0.6)
    assert screen.without_flushes() == [
        *(("unfinished", "stdout", 0, "." * num) for num in (1, 2, 3)),
        ("unfinished", "stdout", "gone"),
        ([0, 1], "stdout", "...!"),
        ("closed",),
    ]


def test_output_shows_a_bar_that_only_a_higher_rank_draws() -> None:
    """Half a second later, or at the cell's end; a lower rank's bar takes its place."""
    screen = ListScreen()
    output = CellOutput([0, 1, 2], screen)
    for step in range(7):
        output.text(1, "stderr", f"\r{step}0%".encode(), step / 10)
        output.text(2, "stderr", b"\r2", step / 10)
        output.show(step / 10)
    output.text(0, "stderr", b"\r0", 0.8)
    output.text(1, "stderr", b"\r100%\n", 0.8)
    output.show(0.9)
    output.close(1.0)
    bars = [("bar", "stderr", 1, "50%"), ("bar", "stderr", 1, "60%"), ("bar", "stderr", 0, "0")]
    assert screen.without_flushes()[:3] == bars
    short = ListScreen()
    output = CellOutput([0, 1], short)
    output.text(1, "stderr", b"\r50%\r100%\n", 0.0)
    output.show(0.1)
    output.close(0.2)
    assert short.without_flushes() == [("bar's end", "stderr", 1, "100%"), ("closed",)]


@pytest.mark.parametrize("below", [b"50 %", b"\r50 %"])
def test_output_draws_what_is_below_a_flood_once_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, below: bytes
) -> None:
    """1,000 lines above an unfinished line, or a bar, cost the notebook their own characters, not three times that."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    output = CellOutput([0, 1], TextScreen("labelled", None))
    output.text(0, "stdout", below, 0.0)
    output.show(0.2)
    output.text(1, "stdout", b"a line\n" * 1000, 0.2)
    output.show(0.3)
    shown = capsys.readouterr().out
    assert shown.count("[rank 1] a line\n") == 1000
    assert shown.count("[rank 0] 50 %") == 2
    assert shown.endswith("\r[rank 0] 50 %")


def test_output_draws_no_unfinished_line_over_a_bar() -> None:
    """The bar has the place, until it is through."""
    screen = ListScreen()
    output = CellOutput([0, 1], screen)
    output.text(1, "stdout", b"a", 0.0)
    output.text(0, "stderr", b"\r50%", 0.1)
    output.show(0.2)
    output.text(0, "stderr", b"\r100%\n", 0.3)
    output.show(0.4)
    output.close(0.5)
    assert screen.without_flushes() == [
        ("bar", "stderr", 0, "50%"),
        ("bar's end", "stderr", 0, "100%"),
        ("unfinished", "stdout", 1, "a"),
        ("unfinished", "stdout", "gone"),
        ([1], "stdout", "a"),
        ("closed",),
    ]


def test_output_shows_the_end_of_an_unfinished_line_that_is_long() -> None:
    """One that is longer than the window could not be drawn over itself."""
    screen = ListScreen()
    output = CellOutput([0], screen)
    output.text(0, "stdout", b"x" * 1000 + b"y", 0.0)
    output.show(1.0)
    assert screen.without_flushes() == [("unfinished", "stdout", 0, "x" * 99 + "y")]
