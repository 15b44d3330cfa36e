# SPDX-License-Identifier: Apache-2.0
"""`AttemptObserver`: creates a `LaunchObserver` for each attempt of a run, and forwards the agent's calls to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ddpilot.errors import RankError, WatchError
from ddpilot.launching.elastic.rank_main import HOOKS_VARIABLE
from ddpilot.launching.observer import LaunchObserver, Mailbox, RankState

MakeObserver = Callable[[str, int, tuple[int, ...], Mailbox | None], LaunchObserver | None]
"""Creates the observer of an attempt, or returns None, given the script's name, the world size, the ranks of this node
and the mailbox for the other nodes (None on one node)."""


class AttemptObserver:
    """Asks `make_observer`, if it is given, for a observer for each attempt. `note` shows a notice.

    `open_mailbox`: returns the carrier of messages between the nodes for the current attempt, or None.
    """

    def __init__(
        self,
        make_observer: MakeObserver | None,
        name: str,
        note: Callable[[str], None],
        open_mailbox: Callable[[], Mailbox | None] | None,
    ) -> None:
        self._make_observer = make_observer
        self._open_mailbox = open_mailbox
        self._name = name
        self._note = note
        self._observer: LaunchObserver | None = None

    def begin_attempt(self, world_size: int, ranks: tuple[int, ...]) -> Mapping[str, str]:
        """Environment variables for `ranks`, which are about to be started."""
        self.end(is_clean=False)
        if self._make_observer is None:
            return {}
        mailbox = None if self._open_mailbox is None else self._open_mailbox()
        self._observer = observer = self._make_observer(self._name, world_size, ranks, mailbox)
        if observer is None:
            return {}
        return {**observer.variables, HOOKS_VARIABLE: ",".join(observer.hooks)}

    def watch(self, ranks: Sequence[RankState]) -> None:
        if self._observer is not None:
            self._observer.begin(ranks, {})

    def take(self) -> WatchError | None:
        return None if self._observer is None else self._observer.take(self._note)

    def explain(self, error: RankError) -> None:
        if self._observer is not None:
            self._observer.explain(error)

    def finish(self) -> WatchError | None:
        return None if self._observer is None else self._observer.finish(self._note)

    def end(self, *, is_clean: bool) -> None:
        """End the attempt's observation."""
        observer, self._observer = self._observer, None
        if observer is not None:
            observer.take(self._note)
            observer.end(is_clean)
