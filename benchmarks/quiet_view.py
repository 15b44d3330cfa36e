# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: ARG002 - a view takes the arguments of the interface
"""A session's view that shows nothing, and knows what would have been shown and when."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NoReturn

from ddpilot import LaunchError, RankError
from ddpilot.output.rich_output import RankMessage
from ddpilot.output.view import View


class QuietView(View):
    """`errors` with the monotonic times at which they came, `shown_s`; `notes` and `text`: everything printed."""

    def __init__(self) -> None:
        super().__init__()
        self.forget()

    def forget(self) -> None:
        """Start anew."""
        self.errors: list[RankError | LaunchError] = []
        self.shown_s: list[float] = []
        self.notes: list[str] = []
        self.text = ""

    def make_screen(self) -> NoReturn:
        """Nothing is shown."""
        raise NotImplementedError

    def write_error(self, text: str) -> None:
        """Errors are kept as they are."""

    def begin(self, ranks: Sequence[int]) -> None:
        """Nothing to do."""

    def message(self, message: RankMessage, now_s: float) -> None:
        """Keep what is text."""
        if message.kind == "stream":
            self.text += message.content["text"]

    def raw(self, rank: int, stream: str, data: bytes, now_s: float) -> None:
        """Keep it."""
        self.text += data.decode(errors="replace")

    def error(self, error: RankError | LaunchError) -> None:
        """Keep it, and when it came."""
        self.shown_s.append(time.monotonic())
        self.errors.append(error)

    def note(self, text: str) -> None:
        """Keep it."""
        self.notes.append(text)

    def ask(self, rank: int, prompt: str, password: bool) -> str:
        """Nobody can be asked."""
        raise EOFError
