# SPDX-License-Identifier: Apache-2.0
"""Who goes along with a launch: may prepare its ranks, look at them from outside, and end it. Implemented above."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from ddpilot.errors import RankError, WatchError
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

    def explain(self, error: RankError) -> None:
        """Add to `error`, by which the launch ends, what was seen from outside."""

    def finish(self, note: Callable[[str], None]) -> WatchError | None:
        """The ranks have ended well: show by `note` what there is to say; the error that it ends with all the same."""

    def end(self, is_clean: bool) -> None:
        """The launch is over, and its ranks are gone."""
