# SPDX-License-Identifier: Apache-2.0
"""Requests from the parent to a rank, sent as JSON in Jupyter messages of additional types."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

REQUEST = "ddpilot_request"
"""Message type of a `Request`, on the shell channel."""

FREE = "ddpilot_free"
"""Message type of `Free`, on the control channel."""

BEGUN = "ddpilot_begun"
"""Message type of the iopub message that reports that a rank has started a cell or request, and can be interrupted.
Content: {"num_before": number of collectives it had begun before, or None}."""

REPLY = "ddpilot_reply"
"""Message type of the replies to `REQUEST` and `FREE`. Content: {REPORT_KEY: the report}."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """Call the function in the parcel, and reply with a parcel that holds its result or exception."""

    token: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Identifies the request on the rank's socket for parcels."""


@dataclass(frozen=True, kw_only=True)
class Push:
    """Set the variables in the parcel."""

    token: str = field(default_factory=lambda: uuid.uuid4().hex)


@dataclass(frozen=True, kw_only=True)
class Pull:
    """Evaluate the expressions, and reply with a parcel that holds their values."""

    expressions: list[str]
    token: str = field(default_factory=lambda: uuid.uuid4().hex)


@dataclass(frozen=True, kw_only=True)
class Rebuild:
    """Leave the current process group, if any."""

    generation: int
    """Number of times the group has been rebuilt, including this one."""

    enter: bool
    """True to enter a new group with all ranks."""

    backend: str | None
    """Backend of the new group; None: chosen for the device."""


@dataclass(frozen=True)
class Compare:
    """Compare DDP models between ranks."""


@dataclass(frozen=True)
class Finish:
    """End the kernel."""


ParcelRequest = Call | Push | Pull
Request = ParcelRequest | Rebuild | Compare | Finish
_KINDS: dict[str, Any] = {kind.__name__: kind for kind in (Call, Push, Pull, Rebuild, Compare, Finish)}


@dataclass(frozen=True, kw_only=True)
class Scope:
    """The ranks on which a cell or request runs, and whether they can enter a process group."""

    ranks: tuple[int, ...] = ()
    """The ranks; () for all ranks."""

    blocked: str = ""
    """The reason why no rank can enter a group now; "" if all can."""

    @classmethod
    def from_content(cls, content: Mapping[str, Any]) -> Scope:
        """Return the scope in the JSON of a request or cell."""
        return cls(ranks=tuple(content["ranks"]), blocked=content["blocked"])


@dataclass(frozen=True, kw_only=True)
class CellRequest:
    """Sent in the metadata of a cell."""

    number: int
    keep_cache: bool
    """True to keep the GPU's memory cache after the cell."""

    scope: Scope

    @classmethod
    def from_content(cls, content: Mapping[str, Any]) -> CellRequest:
        """Return the request in a cell's metadata."""
        return cls(**{**content, "scope": Scope.from_content(content["scope"])})


@dataclass(frozen=True, kw_only=True)
class Free:
    """Free the main thread from a collective."""

    generation: int
    """Generation of the group to free; a request for a group that has been replaced is ignored."""

    interrupt: bool
    """True to interrupt the main thread first, in case freeing raises no error there."""


def request_content(request: Request, scope: Scope) -> dict[str, Any]:
    """Return the content of a message that sends `request`."""
    return {"kind": type(request).__name__, "arguments": asdict(request), "scope": asdict(scope)}


def read_request(content: Mapping[str, Any]) -> tuple[Request, Scope]:
    """Return the request and its scope from the content of a message."""
    request: Request = _KINDS[content["kind"]](**content["arguments"])
    return request, Scope.from_content(content["scope"])
