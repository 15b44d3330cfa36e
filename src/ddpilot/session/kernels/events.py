# SPDX-License-Identifier: Apache-2.0
"""Events that a session receives from its ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ddpilot.launching.spawning import Ended, Wrote
from ddpilot.output.view import RankMessage


@dataclass(frozen=True, kw_only=True)
class KernelMessage:
    """A Jupyter message from a rank's kernel. `parent_id` is the id of the message that it belongs to."""

    rank: int
    channel: str
    """"shell", "iopub", "stdin" or "control"."""

    kind: str
    parent_id: str
    content: dict[str, Any]
    metadata: dict[str, Any]
    buffers: list[bytes]
    header: dict[str, Any]

    def for_view(self) -> RankMessage:
        """Return the message in the form in which views show it."""
        return RankMessage(self.rank, self.kind, self.content, self.metadata, self.buffers)


@dataclass(frozen=True)
class Interrupted:
    """The user interrupted the cell (interrupt button or Ctrl-C)."""


Event = KernelMessage | Wrote | Ended | Interrupted
