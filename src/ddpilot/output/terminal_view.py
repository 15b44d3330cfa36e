# SPDX-License-Identifier: Apache-2.0
"""`TextView`: shows the output of ranks in a terminal or script, as text with labels."""

from __future__ import annotations

import getpass
import os
import re
import sys

from ddpilot.output.cell_output import BaseView
from ddpilot.output.screen import Screen, TextScreen
from ddpilot.output.writer import Output

_COLOR = re.compile(r"\x1b\[[0-9;]*m")


class TextView(BaseView):
    """Writes to `sys.stdout` and `sys.stderr`. `mode` and `limit_bytes`: a session's `output` and `output_limit_bytes`.

    The limit applies per rank and cell; None: 1 MB in a notebook, else no limit.
    """

    def __init__(self, mode: Output = "labelled", limit_bytes: int | None = None) -> None:
        super().__init__()
        self._mode: Output = mode
        self._limit_bytes = limit_bytes

    def make_screen(self) -> Screen:
        return TextScreen(self._mode, self._limit_bytes)

    def write_error(self, text: str) -> None:
        """Write to stderr, with colours if it is a terminal."""
        stream = sys.stderr
        if stream is not None:
            has_colors = stream.isatty() and not os.environ.get("NO_COLOR")
            stream.write(text if has_colors else _COLOR.sub("", text))
            stream.flush()

    def ask(self, rank: int, prompt: str, password: bool) -> str:
        """Ask in the terminal, with the rank as a prefix."""
        self.flush()
        question = f"[rank {rank}] {prompt}"
        return getpass.getpass(question) if password else input(question)
