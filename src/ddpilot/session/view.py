# SPDX-License-Identifier: Apache-2.0
"""Where what the ranks of a session say is shown: the interface, which a terminal and a notebook fill differently."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ddpilot.errors import LaunchError, RankError

SendToRank = Callable[[int, str, dict[str, Any], dict[str, Any], list[bytes]], None]
"""How a view answers a rank's widget: ``send(rank, kind, content, metadata, buffers)``."""


@dataclass(frozen=True)
class RankMessage:
    """What a rank's kernel published, in Jupyter's words.

    `kind`: "stream", "display_data", "execute_result", "update_display_data", "clear_output", "comm_open", "comm_msg"
    or "comm_close".
    """

    rank: int
    kind: str
    content: dict[str, Any]
    metadata: dict[str, Any] = field(default_factory=dict)
    buffers: list[bytes] = field(default_factory=list)


class View(Protocol):
    """Shows what ranks say. It is called from one thread at a time: the cell's while one runs, else the session's.

    Times are seconds of the monotonic clock.
    """

    def bind(self, send: SendToRank) -> None:
        """Take the way by which messages go back to a rank's widgets; called once, before everything else."""

    def begin(self, ranks: Sequence[int]) -> None:
        """A cell starts on these ranks."""

    def message(self, message: RankMessage, now_s: float) -> None:
        """A rank published something."""

    def raw(self, rank: int, stream: str, data: bytes, now_s: float) -> None:
        """Bytes that a rank's process wrote past Python; `stream` is "stdout" or "stderr"."""

    def show(self, now_s: float) -> None:
        """Show what has waited long enough for its like from other ranks."""

    def next_due_s(self) -> float | None:
        """When `show` has something to do next; None if nothing waits."""

    def error(self, error: RankError | LaunchError) -> None:
        """The first failure in time, as soon as it is known and before the group is rebuilt."""

    def note(self, text: str) -> None:
        """A line of ddpilot's own."""

    def ask(self, rank: int, prompt: str, password: bool) -> str:
        """What the person answers to `input` or `getpass` on a rank. Raises `EOFError` where nobody can be asked."""

    def end(self) -> None:
        """The cell is over: show everything that still waits."""
