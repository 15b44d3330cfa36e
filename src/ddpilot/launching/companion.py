# SPDX-License-Identifier: Apache-2.0
"""Who goes along with a launch: may prepare its ranks, look at them from outside, and end it. Implemented above."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from ddpilot.errors import LaunchTimeoutError, RankError, WatchError
from ddpilot.launching.local.report import Exited, Raised


class RankState(Protocol):
    """What is known of one rank's process; it changes while the launch runs."""

    @property
    def rank(self) -> int:
        """Its number."""

    @property
    def pid(self) -> int | None:
        """Of its process, once it has one."""

    @property
    def exited(self) -> Exited | None:
        """How its process ended; None while it has not."""

    @property
    def raised(self) -> Raised | None:
        """What it raised."""

    @property
    def has_returned(self) -> bool:
        """Whether its program came to its end without an error."""


class Letter(NamedTuple):
    """What the companion of another node wrote last."""

    text: str
    number: int
    """Counts those of that node, from 1."""
    after_ns: int
    before_ns: int
    """It was written between the two, on this machine's CLOCK_MONOTONIC."""


class Piece(NamedTuple):
    """A part of what the companion of another node tells on and on."""

    text: str
    number: int
    """Counts those of that node, from 1; where one is missing, it was overwritten before it was read."""
    read_ns: int
    """When it came, on this machine's CLOCK_MONOTONIC."""


class Carrier(Protocol):
    """Carries letters between the companions of a job's nodes. Nothing of it blocks or raises."""

    @property
    def node_rank(self) -> int:
        """The number of this node."""

    @property
    def places(self) -> Mapping[int, str]:
        """The other nodes, as they should be shown, by number."""

    @property
    def letters(self) -> Mapping[int, Letter]:
        """The last letter of each other node that has written one, by its number."""

    @property
    def marks(self) -> Mapping[int, str]:
        """What each other node shows of itself, by its number."""

    @property
    def fault(self) -> str:
        """Why nothing is carried any more; empty while all is well."""

    def write(self, text: str) -> None:
        """Let the other nodes read `text`, in place of what was written before."""

    def show(self, mark: str) -> None:
        """Let the other nodes see `mark`, some hundred characters, with the next sign of life of this node."""

    def append(self, text: str) -> None:
        """Let node 0 read `text` after all that was appended before; of node 0 itself: all the others."""

    def take_pieces(self) -> Mapping[int, Sequence[Piece]]:
        """What other nodes have appended for this one since the last call, by their numbers."""


class Companion(Protocol):
    """Of one launch. None of its methods raises."""

    @property
    def hooks(self) -> tuple[str, ...]:
        """Functions "module:name" that each rank calls before the user's function."""

    @property
    def variables(self) -> Mapping[str, str]:
        """For the ranks' environment."""

    @property
    def fd(self) -> int:
        """Becomes readable when there is something for `take`."""

    def begin(self, ranks: Sequence[RankState], sources: Mapping[str, str]) -> None:
        """The ranks are being started. `sources`: texts of the user's that lie in no file, such as cells, by name."""

    def take(self, note: Callable[[str], None]) -> WatchError | None:
        """Show by `note` what there is to say; the error that the launch is to end with, else None."""

    def explain(self, error: RankError | LaunchTimeoutError) -> None:
        """Add to `error`, by which the launch ends, what was seen from outside."""

    def finish(self, note: Callable[[str], None]) -> WatchError | None:
        """The ranks have ended well: show by `note` what there is to say; the error that it ends with all the same."""

    def end(self, is_clean: bool) -> None:
        """The launch is over, and its ranks are gone."""
