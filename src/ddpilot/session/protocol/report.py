# SPDX-License-Identifier: Apache-2.0
"""`Report`: how a cell or request ended on a rank, and the message types that carry it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

REPORT_KEY = "ddpilot"
"""Key of the report in a reply's content, and of information about the cell in a request's metadata."""

REQUEST = "ddpilot_request"
"""Message type of requests other than cells, on the shell channel. Content: {"verb": ..., "arguments": {...}, "ranks":
[...], "blocked": ...}."""

FREE = "ddpilot_free"
"""Message type of the request to free a rank that is stuck in a collective, on the control channel. Content:
{"generation": the generation of the group to free, "interrupt": whether to interrupt the main thread first, in case
freeing raises no error there}."""

BEGUN = "ddpilot_begun"
"""Message type of the iopub message that reports that a rank has started a cell or request, and can be interrupted.
Content: {"num_before": number of collectives it had begun before, or None}."""

REPLY = "ddpilot_reply"
"""Message type of the replies to `REQUEST` and `FREE`. Content: {REPORT_KEY: the report}."""


def writable(text: str) -> str:
    """Return `text` with lone surrogates escaped. UTF-8 cannot encode them, and the message could not be sent."""
    return text.encode("utf-8", "backslashreplace").decode()


Status = Literal["ok", "error"]


@dataclass(frozen=True, kw_only=True)
class Report:
    """How a cell or request ended on one rank. `time_s` (monotonic clock) is when it raised or returned."""

    status: Status
    time_s: float
    has_group: bool = False
    """True if the rank is in a process group now."""

    num_collectives: int | None = None
    """Number of collectives that the rank began in it; None if not recorded."""

    num_groups: int = 0
    """Number of process groups that the rank is in."""

    num_group_names: int = 0
    """Number of process groups that the rank has started to create since it entered the default one."""

    group_counts: Mapping[str, int] = field(default_factory=dict)
    """Number of collectives that the rank has begun in each of its process groups; see `GroupBook.count`."""

    type_name: str = ""
    message: str = ""
    traceback: str = ""
    """May contain ANSI colours."""

    is_victim: bool = False
    interrupted: bool = False
    in_backward: bool = False
    """True if the error was raised in a backward pass, so that only some gradients of a DDP model may be reduced."""

    exitcode: int = 1
    """The exit code of a SystemExit."""

    device_error: str = ""
    """The error with which the rank's device now answers every call; "" if there is none so far."""

    value: Any = None
    """The result of a request if it is small and JSON-serializable; other results are sent as parcels."""

    def to_content(self) -> dict[str, Any]:
        """Return the report as a JSON-serializable dictionary."""
        return {name: writable(value) if isinstance(value, str) else value for name, value in asdict(self).items()}

    @classmethod
    def from_content(cls, content: Mapping[str, Any]) -> Report | None:
        """Return the report in a reply's content; None if there is none, as for an aborted request."""
        found = content.get(REPORT_KEY)
        return None if found is None else cls(**found)
