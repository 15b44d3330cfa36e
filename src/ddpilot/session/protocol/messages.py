# SPDX-License-Identifier: Apache-2.0
"""Messages between the parent and a rank, sent as JSON: requests, the metadata of a cell, and the `Report` in a reply.

Requests are Jupyter messages of additional types. `KernelStart` has the arguments of a kernel. The parent imports this
module before it checks what is installed: it imports neither torch nor IPython nor zmq.
"""

from __future__ import annotations

import importlib
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ddpilot.launching.rank_reports import Raised
from ddpilot.module_names import SESSION_MAIN
from ddpilot.user_files import install_sources


@dataclass(frozen=True, kw_only=True)
class KernelStart:
    """Arguments of the kernels, the same for all ranks of a session; file names are derived from the rank."""

    folder: Path
    """The session's private folder."""

    incarnations: tuple[int, ...]
    """By rank: number of times that it was started before."""

    apps: tuple[str, ...] = ()
    seed: int | None = None
    keep_cache: bool = False
    verbose: bool = False

    def connection_file(self, rank: int) -> Path:
        """Return the path of the kernel's connection file, which the parent has written."""
        return self.folder / f"{self.stem(rank)}.json"

    def parcel_socket(self, rank: int) -> Path:
        """Return the path of the socket on which the rank accepts parcels."""
        return self.folder / f"{self.stem(rank)}.parcels"

    def stem(self, rank: int) -> str:
        """Return the common prefix of the rank's file names, which differs after each restart."""
        return f"r{rank}.{self.incarnations[rank]}"


def serve(start: KernelStart) -> None:
    """Run a kernel until the session ends."""
    importlib.import_module(SESSION_MAIN).serve_kernel(start)


def call_with_sources(sources: dict[str, list[str]], fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Install `sources` for `linecache` on this rank and return `fn(*args, **kwargs)`."""
    install_sources(sources)
    return fn(*args, **kwargs)


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
    profile_folder: str = ""
    """Folder into which the rank records where the time of the cell's updates goes; "" to record nothing."""

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
        content = {**vars(self), "raised": None if self.raised is None else asdict(self.raised)}
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
