# SPDX-License-Identifier: Apache-2.0
"""What is kept of a rank's output for its error."""

from __future__ import annotations

import os

import pytest

from ddpilot.launching.elastic.output_thread import OutputThread
from ddpilot.output.writer import LabelledWriter


@pytest.mark.parametrize(
    ("written", "kept"),
    [(b"one\n\n\x1b[0m\x1b[K\n", ("one",)), (b"\x1b[0m\n \0\n", ()), (b"\n\x1b[31mred\n", ("", "\x1b[31mred"))],
)
def test_screen_keeps_last_lines_up_to_the_last_that_shows_anything(written: bytes, kept: tuple[str, ...]) -> None:
    """Lines that only reset the terminal's colours are not part of a rank's last output."""
    with OutputThread(LabelledWriter("labelled", None)) as screen:
        path = screen.begin_attempt([1], {(1, "stdout"): None}, None)[1, "stdout"]
        os.write(int(path.rpartition("/")[2]), written)
        assert screen.last_lines(1) == kept
