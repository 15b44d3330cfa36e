# SPDX-License-Identifier: Apache-2.0
"""What a rank says of how a cell or a call ended, and how it travels inside a Jupyter reply."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

REPORT_KEY = "ddpilot"
"""Where a reply's content carries the report, and a request's metadata what a rank is to know of the cell."""

REQUEST = "ddpilot_request"
"""The type of the shell channel's messages that are no cells: content {"verb": ..., "token": ...}."""

FREE = "ddpilot_free"
"""The type of the control channel's message that frees a rank which is stuck in a collective of the group that is the
`generation`-th: content {"generation": ..., "interrupt": whether what it runs is to be interrupted first where
freeing it raises no error there}."""

BEGUN = "ddpilot_begun"
"""The type of the iopub message that says that a rank has begun with a cell or request, and takes a stop: content
{"num_before": how many collectives it had begun before, or None}."""

REPLY = "ddpilot_reply"
"""The type of the answers to both: content {REPORT_KEY: the report}."""


def writable(text: str) -> str:
    """`text` without what UTF-8 cannot write: a message with half a surrogate pair in it could not be sent."""
    return text.encode("utf-8", "backslashreplace").decode()


Status = Literal["ok", "error"]


@dataclass(frozen=True, kw_only=True)
class Report:
    """How it ended on one rank. `time_s` (of the machine's monotonic clock) is when it raised, or returned."""

    status: Status
    time_s: float
    has_group: bool = False
    """Whether the rank is in a process group now."""

    num_collectives: int | None = None
    """How many collectives the rank began in it; None where they are not recorded."""

    num_groups: int = 0
    """How many process groups the rank has."""

    num_group_names: int = 0
    """How many it has begun to make since it entered the default one."""

    type_name: str = ""
    message: str = ""
    traceback: str = ""
    """With ANSI colours."""

    is_victim: bool = False
    interrupted: bool = False
    in_backward: bool = False
    """Whether it came out of a backward pass: the gradients of a DDP model are reduced in part then."""

    exitcode: int = 1
    """What SystemExit asked for."""

    device_error: str = ""
    """What the rank's device answers to everything since; "" where it works, or has not failed so far."""

    value: Any = None
    """What a request answers, where that is small and JSON; anything else goes as a parcel."""

    def to_content(self) -> dict[str, Any]:
        """The report as JSON."""
        return {name: writable(value) if isinstance(value, str) else value for name, value in asdict(self).items()}

    @classmethod
    def from_content(cls, content: Mapping[str, Any]) -> Report | None:
        """The report in a reply's content; None where there is none (an aborted request)."""
        found = content.get(REPORT_KEY)
        return None if found is None else cls(**found)
