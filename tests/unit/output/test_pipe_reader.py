# SPDX-License-Identifier: Apache-2.0
"""Pipes to lines on the screen."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from ddpilot.output.pipe_reader import PipeReader
from ddpilot.output.writer import LabelledWriter, Output


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """(reader, writer) of a pipe; whichever is still open is closed."""
    reader, writer = os.pipe()
    yield reader, writer
    for fd in (reader, writer):
        try:
            os.close(fd)
        except OSError:
            continue  # the test closed it


def pump_of(world_size: int = 2, mode: Output = "labelled", limit_bytes: int | None = None) -> PipeReader:
    """A reader for ranks that shows everything by default."""
    return PipeReader(world_size, LabelledWriter(mode, limit_bytes))


def test_output_pump_shows_lines_and_keeps_the_last_ones(
    pipe: tuple[int, int], capsys: pytest.CaptureFixture[str]
) -> None:
    """What a rank wrote appears labelled, and is at hand for an error."""
    pump = pump_of()
    os.write(pipe[1], b"one\ntwo\nthr")
    assert pump.read(pipe[0], 1, "stdout", 0.0)
    os.close(pipe[1])
    assert not pump.read(pipe[0], 1, "stdout", 0.0)
    pump.close()
    assert capsys.readouterr().out == "[rank 1] one\n[rank 1] two\n[rank 1] thr\n"
    assert pump.last_lines(1) == ("one", "two", "thr")
    assert pump.last_lines(0) == ()


def test_output_pump_shows_bars_of_rank_zero_alone(pipe: tuple[int, int], capsys: pytest.CaptureFixture[str]) -> None:
    """The other ranks' bars are dropped, but their last state is kept for an error."""
    pump = pump_of()
    for rank in (1, 0):
        os.write(pipe[1], b"\r 50%\r100%\n")
        pump.read(pipe[0], rank, "stderr", 0.0)
    pump.close()
    assert capsys.readouterr().err == "\r[rank 0] 100%\n"
    assert pump.last_lines(1) == ("100%",)


def test_output_pump_keeps_last_lines_of_what_it_hides(
    pipe: tuple[int, int], capsys: pytest.CaptureFixture[str]
) -> None:
    """A silent launch still has the lines for an error, and shows none."""
    pump = pump_of(mode="silent")
    os.write(pipe[1], b"secret\nreason\n")
    pump.read(pipe[0], 0, "stdout", 0.0)
    pump.close()
    assert capsys.readouterr().out == ""
    assert pump.last_lines(0) == ("secret", "reason")


def test_output_pump_counts_what_is_over_the_limit(pipe: tuple[int, int], capsys: pytest.CaptureFixture[str]) -> None:
    """Output over the limit is not shown, and a notice gives its size."""
    pump = pump_of(limit_bytes=100)
    for _ in range(3):
        os.write(pipe[1], b"x" * 999 + b"\n")
        pump.read(pipe[0], 0, "stdout", 0.0)
        pump.show(1.0)
    pump.close()
    shown = capsys.readouterr()
    assert shown.out.count("x") == 999
    assert "0.0 MB more output of rank 0 not shown" in shown.err


def test_output_pump_drains_a_pipe_that_a_left_over_process_holds_open(
    pipe: tuple[int, int], capsys: pytest.CaptureFixture[str]
) -> None:
    """The other end is still open: draining takes what is there and does not wait."""
    pump = pump_of()
    os.write(pipe[1], b"last words")
    pump.drain(pipe[0], 0, "stdout", 0.0)
    pump.close()
    assert capsys.readouterr().out == "[rank 0] last words\n"


def test_output_pump_stops_draining_a_pipe_that_is_written_for_ever(pipe: tuple[int, int]) -> None:
    """A process that a rank left behind, and that prints without end, does not hold the launch."""
    pump = pump_of(mode="silent")

    def write_for_ever() -> None:
        try:
            while True:
                os.write(pipe[1], b"y" * 65536)
        except OSError:
            return

    writer = threading.Thread(target=write_for_ever)
    writer.start()
    pump.drain(pipe[0], 0, "stdout", 0.0)
    os.close(pipe[0])  # the writer gets EPIPE
    writer.join(5)
    assert not writer.is_alive()
