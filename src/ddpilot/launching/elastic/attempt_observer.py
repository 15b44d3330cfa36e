# SPDX-License-Identifier: Apache-2.0
"""Create and forward to the companion (observer) of each attempt of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ddpilot.errors import RankError, WatchError
from ddpilot.launching.elastic.rank_main import HOOKS_VARIABLE
from ddpilot.launching.observer import LaunchObserver, Mailbox, RankState

MakeObserver = Callable[[str, int, tuple[int, ...], Mailbox | None], LaunchObserver | None]
"""Makes the observer of an attempt from the script's name, the world size, the ranks of this node and the carrier of
messages to the other nodes (None on one node). Returns None for no observer."""


class AttemptObserver:
    """Asks `accompany`, if it is given, for a companion for each attempt. `say` shows a notice.

    `open_post`: returns the carrier of messages between the nodes for the current attempt, or None.
    """

    def __init__(
        self,
        accompany: MakeObserver | None,
        name: str,
        say: Callable[[str], None],
        open_post: Callable[[], Mailbox | None] = lambda: None,
    ) -> None:
        self._accompany = accompany
        self._open_post = open_post
        self._name = name
        self._say = say
        self._companion: LaunchObserver | None = None

    def begin_attempt(self, world_size: int, ranks: tuple[int, ...]) -> Mapping[str, str]:
        """Environment variables for `ranks`, which are about to be started."""
        self.end(is_clean=False)
        if self._accompany is None:
            return {}
        self._companion = companion = self._accompany(self._name, world_size, ranks, self._open_post())
        if companion is None:
            return {}
        return {**companion.variables, HOOKS_VARIABLE: ",".join(companion.hooks)}

    def watch(self, ranks: Sequence[RankState]) -> None:
        """Called when the ranks have been started."""
        if self._companion is not None:
            self._companion.begin(ranks, {})

    def take(self) -> WatchError | None:
        """Show new findings. Returns the error that the attempt must end with, or None."""
        return None if self._companion is None else self._companion.take(self._say)

    def explain(self, error: RankError) -> None:
        """Add what was observed from outside to `error`, which ends the attempt."""
        if self._companion is not None:
            self._companion.explain(error)

    def finish(self) -> WatchError | None:
        """Called after all ranks succeeded: show new findings. Returns an error that the run must end with, or None."""
        return None if self._companion is None else self._companion.finish(self._say)

    def end(self, *, is_clean: bool) -> None:
        """End the attempt's observation."""
        companion, self._companion = self._companion, None
        if companion is not None:
            companion.take(self._say)
            companion.end(is_clean)
