# SPDX-License-Identifier: Apache-2.0
"""The last lines of each rank are kept for errors, whatever else is done with the output."""

from __future__ import annotations

from ddpilot.output.tails import Tails


def test_tails_keep_the_last_lines_of_each_rank() -> None:
    """Both streams, by rank; bounded, also for one huge chunk."""
    tails = Tails()
    tails.feed(0, "stdout", b"one\ntw")
    tails.feed(0, "stderr", b"error\n")
    tails.feed(0, "stdout", b"o\n")
    tails.feed(1, "stdout", b"".join(b"%d\n" % number for number in range(100_000)))
    assert tails.last_lines(0) == ("one", "error", "two")
    assert tails.last_lines(1)[-1] == "99999"
    assert len(tails.last_lines(1)) <= 200
    assert tails.last_lines(2) == ()


def test_tails_of_a_rank_that_starts_anew_are_empty() -> None:
    """Its last incarnation's words are not its own."""
    tails = Tails()
    tails.feed(0, "stdout", b"before\nepoch 3: 40%")
    tails.forget(0)
    assert tails.last_lines(0) == ()
    tails.feed(0, "stdout", b"Traceback\n")
    assert tails.last_lines(0) == ("Traceback",)
