# SPDX-License-Identifier: Apache-2.0
"""`View`: interface for displaying the output of a session; implemented for terminals and notebooks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ddpilot.errors import LaunchError, RankError

SendToRank = Callable[[int, str, dict[str, Any], dict[str, Any], list[bytes]], None]
"""Sends a comm message from the front end to a rank: ``send(rank, kind, content, metadata, buffers)``."""


@dataclass(frozen=True)
class RankMessage:
    """A Jupyter iopub message from a rank's kernel.

    `kind`: "stream", "display_data", "execute_result", "update_display_data", "clear_output", "comm_open", "comm_msg"
    or "comm_close".
    """

    rank: int
    kind: str
    content: dict[str, Any]
    metadata: dict[str, Any] = field(default_factory=dict)
    buffers: list[bytes] = field(default_factory=list)


class View(Protocol):
    """Displays the output of ranks.

    It is called from one thread at a time: the cell's while one runs, else the session's. Times are seconds of the
    monotonic clock.
    """

    def bind(self, send: SendToRank) -> None:
        """Set the function that sends messages to the ranks' widgets; called once, before any other method."""

    def begin(self, ranks: Sequence[int]) -> None:
        """A cell starts on `ranks`."""

    def message(self, message: RankMessage, now_s: float) -> None:
        """A rank published a message."""

    def raw(self, rank: int, stream: str, data: bytes, now_s: float) -> None:
        """A rank's process wrote bytes that bypassed Python; `stream` is "stdout" or "stderr"."""

    def show(self, now_s: float) -> None:
        """Show pending output that has waited long enough to be merged with equal output of other ranks."""

    def next_due_s(self) -> float | None:
        """Return when to call `show` next; None if no output is pending."""

    def error(self, error: RankError | LaunchError) -> None:
        """Show the first failure in time; called as soon as it is known, before the group is rebuilt."""

    def note(self, text: str) -> None:
        """Show a message of ddpilot itself."""

    def ask(self, rank: int, prompt: str, password: bool) -> str:
        """Return the user's answer to `input` or `getpass` on a rank. Raises EOFError if the user cannot be asked."""

    def end(self) -> None:
        """The cell is over: show all pending output."""
