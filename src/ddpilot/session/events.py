# SPDX-License-Identifier: Apache-2.0
"""What reaches a session from its ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ddpilot.launching.local.report import Exited


@dataclass(frozen=True, kw_only=True)
class Said:
    """A Jupyter message of a rank. `parent_id`: of the message that it answers or belongs to."""

    rank: int
    channel: str
    """"shell", "iopub", "stdin" or "control"."""

    kind: str
    parent_id: str
    content: dict[str, Any]
    metadata: dict[str, Any]
    buffers: list[bytes]
    header: dict[str, Any]


@dataclass(frozen=True)
class Wrote:
    """Bytes that a rank's process wrote into its descriptor 1 ("stdout") or 2 ("stderr"), past Python."""

    rank: int
    stream: str
    data: bytes


@dataclass(frozen=True)
class Ended:
    """A rank's process ended. `exited` is None where nobody saw it; `reason`: what is known beyond it, or ""."""

    rank: int
    exited: Exited | None
    reason: str = ""


@dataclass(frozen=True)
class Interrupted:
    """The person pressed stop, or Ctrl-C."""


Event = Said | Wrote | Ended | Interrupted
