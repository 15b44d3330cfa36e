# SPDX-License-Identifier: Apache-2.0
"""Interface for observers of a launch, which may prepare ranks, watch them from outside and stop the launch.

Implemented by packages above `launching`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

from ddpilot.errors import LaunchTimeoutError, RankError, WatchError
from ddpilot.launching.rank_reports import Exited, Raised


class RankState(Protocol):
    """State of one rank's process. It changes while the launch runs."""

    @property
    def rank(self) -> int:
        """Rank of the process."""

    @property
    def pid(self) -> int | None:
        """Process id, or None if the process has not been started."""

    @property
    def exited(self) -> Exited | None:
        """Exit status of the process, or None while it is running."""

    @property
    def raised(self) -> Raised | None:
        """The exception that the rank reported, or None."""

    @property
    def has_returned(self) -> bool:
        """True if the rank's program finished without an error."""


class Message(NamedTuple):
    """The most recent message from the observer of a different node."""

    text: str
    number: int
    """Sequence number among the messages of that node, starting at 1."""
    after_ns: int
    before_ns: int
    """The message was written between `after_ns` and `before_ns`, in this machine's CLOCK_MONOTONIC."""


class Chunk(NamedTuple):
    """One part of the stream that the observer of a different node appends to."""

    text: str
    number: int
    """Sequence number among the chunks of that node, starting at 1; a gap means that a chunk was overwritten unread."""
    read_ns: int
    """Time at which this node read the chunk, in this machine's CLOCK_MONOTONIC."""


class Mailbox(Protocol):
    """Exchanges messages between the observers of a job's nodes. Methods never block and never raise."""

    @property
    def node_rank(self) -> int:
        """Rank of this node."""

    @property
    def places(self) -> Mapping[int, str]:
        """Display name of each other node, by node rank."""

    @property
    def messages(self) -> Mapping[int, Message]:
        """The most recent message of each other node that has written one, by node rank."""

    @property
    def fault(self) -> str:
        """Reason for which messages are no longer exchanged; empty while the exchange works."""

    def write(self, text: str) -> None:
        """Publish `text` to the other nodes, replacing this node's previous message."""

    def append(self, text: str) -> None:
        """Append `text` to this node's stream. Node 0 reads every stream; the other nodes read node 0's."""

    def take_chunks(self) -> Mapping[int, Sequence[Chunk]]:
        """Pieces received from other nodes since the last call, by node rank."""


class LaunchObserver:
    """Observer of one launch. This one observes nothing; its subclasses do. Methods must not raise."""

    hooks: tuple[str, ...] = ()
    """Functions, as "module:name", that each rank calls before the user's function."""

    variables: Mapping[str, str] = MappingProxyType({})
    """Environment variables to set in the ranks."""

    fd: int | None = None
    """File descriptor that becomes readable when `take` has something to process; None if that never happens."""

    def begin(self, ranks: Sequence[RankState], sources: Mapping[str, str]) -> None:
        """Called when the ranks are being started. `sources`: source text that has no file, such as cells, by name."""

    def take(self, note: Callable[[str], None]) -> WatchError | None:  # noqa: ARG002
        """Report events by calling `note`. Returns the error that the launch must end with, or None."""
        return None

    def explain(self, error: RankError | LaunchTimeoutError) -> None:
        """Add what was observed from outside to `error`, which ends the launch."""

    def finish(self, note: Callable[[str], None]) -> WatchError | None:  # noqa: ARG002
        """Called after all ranks succeeded: report by calling `note`. Returns an error to end with anyway, or None."""
        return None

    def end(self, is_clean: bool) -> None:
        """Called when the launch has finished and its ranks have exited. `is_clean`: True if it raised nothing."""


MakeObserver = Callable[[str, int, tuple[int, ...], Mailbox | None], LaunchObserver | None]
"""Creates the observer of an attempt of a run, or returns None, given the script's name, the world size, the ranks of
this node and the mailbox for the other nodes (None on one node)."""
