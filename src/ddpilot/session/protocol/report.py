# SPDX-License-Identifier: Apache-2.0
"""`Report`: how a cell or request ended on a rank, sent as JSON in the reply."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ddpilot.launching.rank_reports import Raised

REPORT_KEY = "ddpilot"
"""Key of the report in a reply's content, and of the `CellRequest` in a cell's metadata."""


def writable(text: str) -> str:
    """Return `text` with lone surrogates escaped. UTF-8 cannot encode them, and the message could not be sent."""
    return text.encode("utf-8", "backslashreplace").decode()


@dataclass(frozen=True, kw_only=True)
class Report:
    """How a cell or request ended on one rank."""

    raised: Raised | None = None
    """The exception with which it ended; None on success. The traceback may contain ANSI colours."""

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

    in_backward: bool = False
    """True if the error was raised in a backward pass, so that only some gradients of a DDP model may be reduced."""

    device_error: str = ""
    """The error with which the rank's device now answers every call; "" if there is none so far."""

    value: Any = None
    """The result of a request if it is small and JSON-serializable; other results are sent as parcels."""

    @property
    def error(self) -> tuple[str, str, str] | None:
        """Type, message and traceback of the exception, to compare ranks; None on success."""
        raised = self.raised
        return None if raised is None else (raised.type_name, raised.message, raised.traceback)

    def to_content(self) -> dict[str, Any]:
        """Return the report as a JSON-serializable dictionary."""
        content = asdict(self)
        for fields in (content, content["raised"] or {}):
            fields.update({name: writable(value) for name, value in fields.items() if isinstance(value, str)})
        return content

    @classmethod
    def from_content(cls, content: Mapping[str, Any]) -> Report | None:
        """Return the report in a reply's content; None if there is none, as for an aborted request."""
        found = content.get(REPORT_KEY)
        if found is None:
            return None
        raised = found["raised"]
        return cls(**{**found, "raised": None if raised is None else Raised(**raised)})
